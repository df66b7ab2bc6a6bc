"""The session's worlds: started when a test first needs one, shared by all tests of its size and mesh, and rebuilt only
after a crash."""

import contextlib
import inspect
import shutil
import tempfile
import warnings
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from emulator.testing.outcome import RankOutcome
from emulator.testing.rank_side import end_fixtures, run_item
from emulator.testing.watch import Watch

_NEVER_S = 24 * 3600.0  # the watch ends tests that hang; the world's own limits stay out of its way
_FIXTURES_S = 10.0  # for tearing down what tests left set up


@dataclass(frozen=True)
class Spec:
    """What a marker asks for. Tests that differ at most in their timeout share a world.

    inherit: what the ranks inherit is inherit(**parameters), made once in the pytest process.
    """

    size: int
    axes: tuple[tuple[str, int], ...]
    timeout: float
    memory_limit: int | None = None
    inherit: Callable | None = None
    parameters: tuple[tuple[str, str, Any], ...] = ()  # name, its value's repr, its value

    @classmethod
    def of(cls, mark: pytest.Mark, default_timeout: float, params: Mapping[str, Any]) -> "Spec":
        """params: the test's parameters. TypeError or UsageError for a marker that makes no sense."""
        from emulator.errors import UsageError
        from emulator.runtime.mesh import Mesh

        def ranks(
            size: int,
            mesh: Mapping[str, int] | None = None,
            timeout: float = default_timeout,
            memory_limit: int | None = None,
            inherit: Callable | None = None,
        ) -> "Spec":
            made = Mesh.of(size, mesh)
            wanted = inspect.signature(inherit).parameters if inherit is not None else ()
            parameters = tuple((name, repr(params[name]), params[name]) for name in wanted if name in params)
            return cls(size, tuple(made.describe().items()), float(timeout), memory_limit, inherit, parameters)

        try:
            return ranks(*mark.args, **mark.kwargs)
        except (TypeError, UsageError) as error:
            raise UsageError(f"@pytest.mark.ranks: {error}".replace("Spec.of.<locals>.", "")) from error

    @property
    def key(self) -> tuple[Any, ...]:
        parameters = tuple(text for _, text, _ in self.parameters)
        return self.size, self.axes, self.memory_limit, self.inherit, parameters

    def inherited(self) -> Any:
        """What the ranks inherit; None if the marker names nothing."""
        from emulator.runtime.threads import single_thread

        if self.inherit is None:
            return None
        try:
            with single_thread():  # no thread pool may exist when the ranks are forked
                return self.inherit(**{name: value for name, _, value in self.parameters})
        except Exception as error:
            raise RuntimeError(f"inherit={self.inherit.__name__}: {type(error).__name__}: {error}") from error


class RankWorld:
    """A running world whose ranks have inherited the session. folder: the ranks' output and stacks."""

    def __init__(self, session: pytest.Session, spec: Spec):
        from emulator.runtime.mesh import Mesh
        from emulator.runtime.world import World

        # pytest removes its old folders by itself, should this process be killed
        self.folder = Path(tempfile.mkdtemp(prefix="ranks-", dir=session_folder(session.config)))
        shared = {"session": session, "folder": self.folder, "inherited": spec.inherited()}
        mesh = Mesh(**dict(spec.axes))
        self.world = World(mesh, timeout=_NEVER_S, shared=shared, memory_limit=spec.memory_limit)
        try:
            with warnings.catch_warnings():  # Python 3.12 warns of any fork beside a thread
                warnings.simplefilter("ignore", DeprecationWarning)
                self.world.start()
        except BaseException:
            self.close(kill=True)
            raise

    @property
    def alive(self) -> bool:
        return bool(self.world.pids)

    def call(self, fn: Callable, *args: Any, limit: float) -> tuple[list[Any], Watch]:
        """fn on every rank within `limit` seconds: each one's result or exception."""
        watch = Watch(limit, self.world.pids)
        try:
            return self.world.run(fn, *args, timeout=_NEVER_S, return_exceptions=True, on_progress=watch), watch
        except BaseException:  # Ctrl-C, or a test runner's own alarm: the ranks are in the middle of something
            self.world.kill()
            raise

    def run(self, nodeid: str, next_nodeid: str | None, limit: float) -> tuple[list[RankOutcome], Watch]:
        results, watch = self.call(run_item, nodeid, next_nodeid, limit=limit)
        outcomes = [
            result if isinstance(result, RankOutcome) else self._lost(rank, result, watch)
            for rank, result in enumerate(results)
        ]
        return outcomes, watch

    def refresh(self) -> None:
        """After a failure: nothing of it may reach the next test, neither half-set fixtures nor half-made calls."""
        if self.alive:
            self.call(end_fixtures, limit=_FIXTURES_S)
        self.regroup()

    def regroup(self) -> None:
        if self.alive:
            self.world.recover()

    def _lost(self, rank: int, error: Exception, watch: Watch) -> RankOutcome:
        report: dict[str, Any] = getattr(error, "report", {})
        message = report.get("message", str(error))
        if report.get("kind") not in ("Died", "Stalled"):  # not of the rank's doing: show everything
            message = report.get("traceback", message)
        if rank in watch.killed:
            message = f"did not end within {watch.limit:g} s and was killed"
        doing = watch.late.get(rank) or report.get("doing", "")
        sections = [
            (title, text)
            for title, name in (("Captured stdout call", "out"), ("Captured stderr call", "err"))
            if (text := self._saved(rank, name))
        ]
        stack = _users_stack(self._saved(rank, "stack"))
        return RankOutcome(rank, lost=message + (f"\n{stack}" if stack else ""), doing=doing, sections=sections)

    def _saved(self, rank: int, name: str) -> str:
        try:
            return (self.folder / f"{rank}.{name}").read_text(errors="replace")
        except OSError:
            return ""

    def close(self, *, kill: bool = False) -> list[str]:
        """Ends the ranks; returns what went wrong in fixtures that were still set up on them."""
        problems: list[str] = []
        if self.alive and not kill:
            with contextlib.suppress(Exception):
                results, _ = self.call(end_fixtures, limit=_FIXTURES_S)
                problems = [f"rank {rank}: {text}" for rank, text in enumerate(results) if text]
            self.world.close()
        self.world.kill()
        shutil.rmtree(self.folder, ignore_errors=True)
        return problems


class Worlds:
    """At most `keep` worlds alive, the least recently used ones closed."""

    def __init__(self, keep: int):
        self.keep = keep
        self.problems: list[str] = []
        self._alive: OrderedDict[Any, RankWorld] = OrderedDict()

    def get(self, session: pytest.Session, spec: Spec) -> RankWorld:
        world = self._alive.get(spec.key)
        if world is not None and not world.alive:
            self._alive.pop(spec.key).close()
            world = None
        if world is None:
            while len(self._alive) >= max(1, self.keep):
                self.problems += self._alive.popitem(last=False)[1].close()
            world = self._alive[spec.key] = RankWorld(session, spec)
        self._alive.move_to_end(spec.key)
        return world

    def close(self, *, kill: bool = False) -> list[str]:
        """Ends all worlds; returns the problems of their fixtures."""
        while self._alive:
            self.problems += self._alive.popitem()[1].close(kill=kill)
        problems, self.problems = self.problems, []
        return problems


def session_folder(config: pytest.Config) -> Path | None:
    """pytest's folder for this session's temporary files; the ranks' own are below it, so it must exist before them."""
    factory: Any = getattr(config, "_tmp_path_factory", None)
    return factory.getbasetemp() if factory is not None else None


def _users_stack(text: str) -> str:
    """faulthandler's last dump, innermost call first, down to where pytest called the test."""
    lines: list[str] = []
    for line in text[max(0, text.rfind("Stack (most recent")) :].splitlines():
        if "/_pytest/" in line or "/pluggy/" in line:
            break
        if line.strip():
            lines.append(line)
    return "\n".join(lines)
