"""The plugin on a rank: runs one item with pytest's own protocol and keeps its reports, for the parent to merge."""

import os
import unittest
from collections.abc import Generator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import _pytest
import pluggy
import pytest
from _pytest.runner import runtestprotocol

from emulator.testing.outcome import Phase, RankOutcome
from emulator.testing.rank_setup import adopt, quiet

if TYPE_CHECKING:
    from emulator.runtime.rank_process import RankContext

RANK_SIDE = pytest.StashKey["RankSide"]()
_SKIPS = (pytest.skip.Exception, unittest.SkipTest)


def run_item(
    nodeid: str, next_nodeid: str | None, session: Any, folder: Any, context: Any, inherited: Any
) -> RankOutcome:
    """The function that every rank runs for a test. All but its names and context is inherited from the parent."""
    side = _side(session, folder, context)
    side.inherited = inherited
    return side.run(nodeid, next_nodeid)


def end_fixtures(session: Any, folder: Any, context: Any) -> str:
    """Between tests: tears down whatever fixtures are still set up; returns what went wrong."""
    side = _side(session, folder, context)
    try:
        with quiet(side.config):
            side.session._setupstate.teardown_exact(None)
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _side(session: Any, folder: Path, context: "RankContext") -> "RankSide":
    side = session.config.stash.get(RANK_SIDE, None)
    if side is None:
        side = session.config.stash[RANK_SIDE] = RankSide(session, folder, context)
    return side


class RankSide:
    """This rank's part of the session; registered as a plugin, it sees what pytest reports here."""

    def __init__(self, session: pytest.Session, folder: Path, context: "RankContext"):
        self.session, self.config, self.context = session, session.config, context
        self.items = {item.nodeid: item for item in session.items}
        self.phases: list[Phase] = []
        self.warnings: list[tuple[str, str, str, int]] = []
        self.inherited: Any = None
        adopt(session, context.rank, folder)
        parent = self.config.pluginmanager.unregister(name="emulator-parent")
        assert parent is not None
        self.config.pluginmanager.register(self, "emulator-rank")

    def run(self, nodeid: str, next_nodeid: str | None) -> RankOutcome:
        from emulator.testing.unmatched import settle

        self.phases, self.warnings = [], []
        outcome = RankOutcome(self.context.rank, self.phases, self.warnings)
        item, nextitem = self.items[nodeid], self.items.get(next_nodeid or "")
        try:
            self.config.hook.pytest_runtest_protocol(item=item, nextitem=nextitem)
        except pytest.exit.Exception as error:
            outcome.leave = (error.msg, error.returncode)
        except KeyboardInterrupt:
            outcome.leave = (f"KeyboardInterrupt on rank {self.context.rank}", None)
        if outcome.leave:
            self.context.board.abort()
        settle(self.context, outcome)
        return outcome

    @property
    def doing(self) -> str:
        return self.context.board.status(self.context.rank)[1]

    # -- hooks --------------------------------------------------------------------------------------------------------

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool:
        runtestprotocol(item, log=False, nextitem=nextitem)  # no log: the parent reports
        return True

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        self._say("setting up its fixtures")
        # what earlier items left: the parent cannot know which item comes next on these ranks
        item.session._setupstate.teardown_exact(item)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_call(self) -> None:
        self._say("running the test body")

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_teardown(self) -> None:
        self._say("tearing down its fixtures")

    def _say(self, text: str) -> None:
        self.context.board.set_status(self.context.rank, text)

    @pytest.hookimpl(tryfirst=True)
    def pytest_warning_recorded(self, warning_message: Any) -> None:
        w = warning_message
        self.warnings.append((w.category.__name__, str(w.message), w.filename, w.lineno))

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        error = call.excinfo.value if call.excinfo is not None else None
        doing = self.doing
        if error is not None and not isinstance(error, _SKIPS):
            self.context.board.abort()  # the others must not wait for this rank
            _cut_traceback(error)
        report = yield
        kind = _kind(report)
        telling = kind != "passed" or report.sections or report.user_properties
        self.phases.append(
            Phase(
                when=str(report.when),
                kind=kind,
                start=report.start,
                stop=report.stop,
                duration=report.duration,
                report=self._serialised(report) if telling else None,
                error=type(error).__name__ if error is not None else "",
                culprits=list(getattr(error, "culprits", [])),
                stopped=_stopped(error),
                doing=doing,
            )
        )
        return report

    def _serialised(self, report: pytest.TestReport) -> dict[str, Any]:
        return self.config.hook.pytest_report_to_serializable(config=self.config, report=report)


def _kind(report: pytest.TestReport) -> str:
    expected = hasattr(report, "wasxfail")
    if report.outcome == "failed":
        strict = isinstance(report.longrepr, str) and report.longrepr.startswith("[XPASS(strict)]")
        return "strict" if strict else "failed"
    if report.outcome == "skipped":
        return "xfailed" if expected else "skipped"
    return "xpassed" if expected else "passed"


def _stopped(error: BaseException | None) -> bool:
    """Whether a PeerFailed is behind the error, also when the test or torch wrapped it."""
    from emulator.runtime.board import PeerFailed

    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, PeerFailed):
            return True
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return False


def _cut_traceback(error: BaseException) -> None:
    """A failed agreement of the ranks is about the line that made the call: leave out torch's and our frames below."""
    from emulator.runtime.board import CallMismatch, PeerFailed, PeerStalled

    if not isinstance(error, CallMismatch | PeerStalled | PeerFailed):
        return
    last, frame = None, error.__traceback__
    while frame is not None:
        if not frame.tb_frame.f_code.co_filename.startswith(_not_users()):
            last = frame
        frame = frame.tb_next
    if last is not None:
        last.tb_next = None


def _not_users() -> tuple[str, ...]:
    import torch

    ours = os.path.dirname(os.path.dirname(__file__))
    return (
        os.path.join(os.path.dirname(torch.__file__), ""),
        os.path.join(os.path.dirname(_pytest.__file__), ""),
        os.path.join(os.path.dirname(pluggy.__file__), ""),
        os.path.join(ours, "runtime", ""),
        os.path.join(ours, "testing", ""),
    )
