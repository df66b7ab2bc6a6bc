"""Many ranks' failures as one text: equal ones once, those of one place with other values as their values only.

The result is made of pytest's own pieces, so that --tb styles, colours, the short summary and xdist's transport work.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from _pytest._code.code import (
    ExceptionChainRepr,
    ReprEntry,
    ReprFileLocation,
    ReprFuncArgs,
    ReprTraceback,
    ReprTracebackNative,
)

from emulator.testing.outcome import ranks_text

_Link = tuple[ReprTraceback, ReprFileLocation | None, str | None]
_ADDRESS = re.compile(r"\b0x[0-9a-f]+")


@dataclass
class Failure:
    """One failure and the ranks that met it."""

    ranks: list[int]
    chain: list[_Link]

    @classmethod
    def of(cls, ranks: Iterable[int], longrepr: Any) -> "Failure":
        """longrepr: that of a report, or a text."""
        if isinstance(longrepr, ExceptionChainRepr):
            return cls(list(ranks), list(longrepr.chain))
        if hasattr(longrepr, "reprtraceback"):
            return cls(list(ranks), [(longrepr.reprtraceback, longrepr.reprcrash, None)])
        return cls(list(ranks), [(ReprTracebackNative([f"{str(longrepr).rstrip()}\n"]), None, None)])

    @property
    def place(self) -> tuple:
        """Where: file and line of every frame; None for a text."""
        return tuple(
            (entry.reprfileloc.path, entry.reprfileloc.lineno)
            if isinstance(entry, ReprEntry) and entry.reprfileloc
            else None
            for traceback, _, _ in self.chain
            for entry in traceback.reprentries
        )

    @property
    def evidence(self) -> tuple[str, ...]:
        """What: pytest's lines of values (marked E), or the whole text."""
        lines: list[str] = []
        for traceback, _, _ in self.chain:
            for entry in traceback.reprentries:
                lines += _values(entry) if isinstance(entry, ReprEntry) else entry.lines
        return tuple(lines)

    @property
    def location(self) -> tuple[str, int] | None:
        """Where it ended, if it has a place."""
        crash = next((crash for _, crash, _ in reversed(self.chain) if crash is not None), None)
        return (crash.path, crash.lineno) if crash is not None else None

    @property
    def headline(self) -> str:
        """The first line of the message."""
        for _, crash, _ in reversed(self.chain):
            if crash is not None:
                return crash.message.partition("\n")[0].removeprefix("emulator.runtime.board.")
        return next((line.strip() for line in self.evidence if line.strip()), "")


def _values(entry: ReprEntry) -> Sequence[str]:
    first = next((i for i, line in enumerate(entry.lines) if line.startswith("E   ")), len(entry.lines))
    return entry.lines[first:]


def folded(title: str, failures: Sequence[Failure], notes: Sequence[str], crash: ReprFileLocation) -> Any:
    """One longrepr: title, every distinct failure under its ranks, notes. crash: what the short summary shows."""
    links: list[_Link] = [_text(f"{title}\n")]
    places: dict[Any, dict[Any, Failure]] = {}
    for failure in failures:
        key = tuple(_ADDRESS.sub("0x", line) for line in failure.evidence)
        at_place = places.setdefault(failure.place if any(failure.place) else (failure.place, key), {})
        if key in at_place:
            at_place[key] = _together(at_place[key], failure)
        else:
            at_place[key] = failure
    for at_place in places.values():
        first, *others = at_place.values()
        if first.ranks:
            links.append(_text(f"\n{ranks_text(first.ranks)}:\n"))
        links += first.chain
        for other in others:
            values = "\n".join(other.evidence)
            links.append(_text(f"\n{ranks_text(other.ranks)}, at the same place:\n{values}\n"))
    links.append(_text("".join(f"\n{note}" for note in notes) + "\n" if notes else ""))
    links[-1] = (links[-1][0], crash, None)
    return ExceptionChainRepr(links)


def _text(text: str) -> _Link:
    return ReprTracebackNative([text]), None, None


def _together(one: Failure, other: Failure) -> Failure:
    """The failure of both, without the arguments in which they differ (rank = 0)."""
    chain: list[_Link] = []
    for (traceback, crash, description), (another, _, _) in zip(one.chain, other.chain):
        for entry, twin in zip(traceback.reprentries, another.reprentries):
            if isinstance(entry, ReprEntry) and isinstance(twin, ReprEntry) and entry.reprfuncargs:
                theirs = dict(twin.reprfuncargs.args) if twin.reprfuncargs else {}
                same = [(n, v) for n, v in entry.reprfuncargs.args if _plain(theirs.get(n)) == _plain(v)]
                entry.reprfuncargs = ReprFuncArgs(same)
        chain.append((traceback, crash, description))
    return Failure([*one.ranks, *other.ranks], chain)


def _plain(value: object) -> str:
    return _ADDRESS.sub("0x", str(value))
