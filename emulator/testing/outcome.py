"""What comes back from one rank after one test."""

from dataclasses import dataclass, field
from typing import Any


@dataclass
class Phase:
    """One report of pytest on one rank.

    when: setup, call or teardown. kind: passed, failed, skipped, xfailed, xpassed, or strict (a strict xfail that
    passed). report: the serialised TestReport, None when it would say no more than these fields. error: type of the
    exception. culprits: the ranks that the exception blames. stopped: the exception only says that another rank failed.
    doing: what the rank was doing when it ended.
    """

    when: str
    kind: str
    start: float = 0.0
    stop: float = 0.0
    duration: float = 0.0
    report: dict[str, Any] | None = None
    error: str = ""
    culprits: list[int] = field(default_factory=list)
    stopped: bool = False
    doing: str = ""


@dataclass
class GroupEnd:
    """The messages of one rank in one process group: those of all members must pair up."""

    slot: int
    label: str
    members: list[int]
    sent: dict[int, int]
    received: dict[int, int]
    sites: list[tuple[str, int, str]]  # (send or recv, peer, call site) of this test


@dataclass
class RankOutcome:
    """lost: how the rank ended when it did not come back (died, killed); its stack and output were saved from it.
    calls: its communication calls (fields of CommCall), kept when the test failed. regroup: it made or destroyed
    process groups. leave: (message, exit code) of a pytest.exit()."""

    rank: int
    phases: list[Phase] = field(default_factory=list)
    warnings: list[tuple[str, str, str, int]] = field(default_factory=list)
    last_call: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)
    groups: list[GroupEnd] = field(default_factory=list)
    regroup: bool = False
    leave: tuple[str, int | None] | None = None
    lost: str = ""
    doing: str = ""
    sections: list[tuple[str, str]] = field(default_factory=list)

    @property
    def disturbed(self) -> bool:
        """Whether the rank's calls or fixtures may be half done."""
        return bool(self.lost or self.leave) or any(phase.kind in ("failed", "xfailed") for phase in self.phases)


def ranks_text(ranks: list[int]) -> str:
    """rank 1; ranks 0, 2; ranks 0-3, 7."""
    parts: list[str] = []
    ordered = sorted(ranks)
    at = 0
    while at < len(ordered):
        end = at
        while end + 1 < len(ordered) and ordered[end + 1] == ordered[end] + 1:
            end += 1
        run = ordered[at : end + 1]
        parts += [f"{run[0]}-{run[-1]}"] if len(run) > 2 else [str(r) for r in run]
        at = end + 1
    return f"rank{'s' if len(ordered) > 1 else ''} {', '.join(parts)}"
