"""The plugin in the pytest process: hands marked items to ranks, and reports one merged result for each."""

import builtins
import contextlib
import tempfile
import warnings
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from _pytest.skipping import evaluate_skip_marks

from emulator.testing.outcome import RankOutcome
from emulator.testing.worlds import RankWorld, Spec, Worlds, session_folder


class ParentSide:
    def __init__(self, config: pytest.Config):
        self.config = config
        self.timeout = float(config.getini("ranks_timeout"))
        self.worlds = Worlds(int(config.getini("ranks_worlds")))
        self._dumps = 0
        self._ready: tuple[Spec, RankWorld] | Exception | None = None
        self._last: dict[Any, str] | None = None

    # -- one item -----------------------------------------------------------------------------------------------------

    @pytest.hookimpl(specname="pytest_runtest_protocol", wrapper=True, tryfirst=True)
    def pytest_emulator_start_ranks(self, item: pytest.Item) -> Generator[None, object, object]:
        """Outermost of all wrappers, so that the ranks inherit no item's warning filters and the like."""
        mark = item.get_closest_marker("ranks")
        self._ready = None
        if mark is not None and not _skips(item):
            try:
                spec = Spec.of(mark, self.timeout, _parameters(item))
                self._ready = spec, self.worlds.get(item.session, spec)
            except Exception as error:  # reported as the item's
                self._ready = error
        return (yield)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
        if self._ready is None:
            return None
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        outcomes = self._run(item, nextitem)
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        for outcome in outcomes:
            if outcome.leave:
                pytest.exit(*outcome.leave)
        return True

    def _run(self, item: pytest.Item, nextitem: pytest.Item | None) -> list[RankOutcome]:
        from emulator.testing.merge import merge, problem_report

        outcomes: list[RankOutcome] = []
        if isinstance(self._ready, tuple):
            spec, world = self._ready
            # fixtures that outlive the item stay up on the ranks as long as they would here
            last = self._last_of(item.session).get(spec.key) == item.nodeid
            outcomes, watch = world.run(item.nodeid, nextitem.nodeid if nextitem and not last else None, spec.timeout)
            reports = merge(item, outcomes, watch)
            self._keep_flight_records(reports, outcomes)
            if watch.late or any(report.failed for report in reports) or any(o.disturbed for o in outcomes):
                world.refresh()
            elif any(outcome.regroup for outcome in outcomes):
                world.regroup()
            self._pass_warnings_on(outcomes)
        else:
            reports = problem_report(item, str(self._ready))
        for report in reports:
            item.ihook.pytest_runtest_logreport(report=report)
        self._tear_down_own(item, nextitem)
        return outcomes

    def _keep_flight_records(self, reports: list[pytest.TestReport], outcomes: list[RankOutcome]) -> None:
        """Of a failed test, a dump per rank for torchfrtrace, named in its report."""
        failed = [report for report in reports if report.failed]
        if not failed or not any(outcome.calls for outcome in outcomes):
            return
        from emulator.trace.flight_recorder import write_flight_records

        self._dumps += 1
        folder = Path(tempfile.mkdtemp(prefix=f"flight{self._dumps}-", dir=session_folder(self.config)))
        write_flight_records(folder, {o.rank: o.calls for o in outcomes if not o.lost})
        failed[0].sections.append(("Flight records", f"torchfrtrace -p flight_ {folder}"))

    def _tear_down_own(self, item: pytest.Item, nextitem: pytest.Item | None) -> None:
        """This process may hold fixtures of unmarked items that end here, as they would after any item."""
        session = item.session
        after = None if session.shouldfail or session.shouldstop else nextitem
        call = pytest.CallInfo.from_call(lambda: session._setupstate.teardown_exact(after), when="teardown")
        if call.excinfo is not None:
            report = item.ihook.pytest_runtest_makereport(item=item, call=call)
            item.ihook.pytest_runtest_logreport(report=report)

    def _pass_warnings_on(self, outcomes: list[RankOutcome]) -> None:
        """Each distinct warning of the ranks, once, into pytest's summary."""
        for name, text, file, line in dict.fromkeys(w for outcome in outcomes for w in outcome.warnings):
            category = getattr(builtins, name, None)
            if not (isinstance(category, type) and issubclass(category, Warning)):
                category = type(name, (UserWarning,), {})
            with contextlib.suppress(Warning):  # a filter that makes it an error: the ranks' own filters decide
                warnings.warn_explicit(text, category, file, line)

    def _last_of(self, session: pytest.Session) -> dict[Any, str]:
        """The last item of every kind of world."""
        if self._last is None:
            self._last = {}
            for item in session.items:
                mark = item.get_closest_marker("ranks")
                with contextlib.suppress(Exception):
                    if mark is not None:
                        self._last[Spec.of(mark, self.timeout, _parameters(item)).key] = item.nodeid
        return self._last

    # -- end ----------------------------------------------------------------------------------------------------------

    def pytest_sessionfinish(self) -> None:
        for problem in self.worlds.close():
            self.config.issue_config_time_warning(
                pytest.PytestWarning(f"tearing down fixtures on the ranks failed: {problem}"), stacklevel=2
            )

    def pytest_unconfigure(self) -> None:
        self.worlds.close(kill=True)


def _parameters(item: pytest.Item) -> dict[str, Any]:
    callspec = getattr(item, "callspec", None)
    return dict(callspec.params) if callspec is not None else {}


def _skips(item: pytest.Item) -> bool:
    """Whether a mark skips the item, so that no rank need be started for it; pytest itself reports it then."""
    try:
        return evaluate_skip_marks(item) is not None
    except BaseException:  # a broken condition: pytest reports that too
        return True
