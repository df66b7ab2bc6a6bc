"""From every rank's reports to those of one test: did it pass, and if not, on which ranks and why."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pytest
from _pytest._code.code import ReprFileLocation
from _pytest.skipping import evaluate_xfail_marks

from emulator.testing.folding import Failure, folded
from emulator.testing.outcome import Phase, RankOutcome, ranks_text
from emulator.testing.watch import Watch

_BAD = ("failed", "xfailed", "strict", "skipped")


class Merger:
    """One test's outcomes, in rank order."""

    def __init__(self, item: pytest.Item, outcomes: Sequence[RankOutcome], watch: Watch):
        self.item, self.outcomes, self.watch = item, outcomes, watch
        self.everyone = [outcome.rank for outcome in outcomes]
        self.reports = {
            id(phase): _report(item, phase) for outcome in outcomes for phase in outcome.phases if phase.report
        }
        self.lost = [outcome for outcome in outcomes if outcome.lost]
        self.decisive = {o.rank: _decisive(o.phases) for o in outcomes if not o.lost}
        self._excuse_victims()

    def _excuse_victims(self) -> None:
        """A rank that waited for one that failed, skipped or died did not fail itself."""
        guilty = {o.rank for o in self.lost}
        guilty |= {
            rank for rank, p in self.decisive.items() if p.kind == "skipped" or (_bad(p) and p.error != "PeerStalled")
        }
        for phase in self.decisive.values():
            if phase.error == "PeerStalled" and guilty & set(phase.culprits):
                phase.stopped = True

    def reports_of_test(self) -> list[pytest.TestReport]:
        """setup, call if it came to that, and teardown."""
        main = self.main()
        reports = [self.make("setup", "passed"), main] if main.when == "call" else [main]
        ended = {o.rank: p for o in self.outcomes for p in o.phases if p.when == "teardown" and _bad(p)}
        failed = [Failure.of([rank], self.longrepr(phase)) for rank, phase in ended.items()]
        teardown = self.make("teardown", "failed" if failed else "passed")
        if failed:
            teardown.longrepr = self.folded(failed, "failed on")
        return [*reports, teardown]

    def main(self) -> pytest.TestReport:
        """The report that decides."""
        acting = {rank: phase for rank, phase in self.decisive.items() if not phase.stopped}
        kinds = {kind: [r for r, p in acting.items() if p.kind == kind] for kind in (*_BAD, "xpassed", "passed")}
        failures = [self.failure(rank) for rank in kinds["failed"]]
        failures += [Failure.of([o.rank], self.obituary(o)) for o in self.lost]
        failures += self.between_ranks()
        if kinds["skipped"] and len(kinds["skipped"]) < len(self.everyone):
            failures += [Failure.of(kinds["skipped"], self.partly_skipped(kinds["skipped"], acting))]
        in_setup = any(p.when == "setup" and p.kind != "passed" for p in acting.values())
        when = "setup" if in_setup and all(p.when == "setup" or p.kind == "passed" for p in acting.values()) else "call"

        if failures:
            report = self.make(when, "failed")
            report.longrepr = self.folded(failures, "failed on")
            if not kinds["failed"]:  # no rank could judge these against an xfail mark
                self.expect(report)
        elif kinds["skipped"]:
            report = self.make(when, "skipped")
            report.longrepr = self.longrepr(acting[kinds["skipped"][0]])
        elif kinds["xfailed"]:
            report = self.make(when, "skipped")
            report.longrepr = self.folded([self.failure(rank) for rank in kinds["xfailed"]], "failed as expected on")
            report.wasxfail = self.reports[id(acting[kinds["xfailed"][0]])].wasxfail
        elif kinds["strict"]:
            report = self.make(when, "failed")
            report.longrepr = self.longrepr(acting[kinds["strict"][0]])
        else:
            report = self.make(when, "passed")
            if kinds["xpassed"]:
                report.wasxfail = self.reports[id(acting[kinds["xpassed"][0]])].wasxfail
        return report

    # -- failures -----------------------------------------------------------------------------------------------------

    def failure(self, rank: int) -> Failure:
        return Failure.of([rank], self.longrepr(self.decisive[rank]))

    def longrepr(self, phase: Phase) -> Any:
        return self.reports[id(phase)].longrepr

    def obituary(self, outcome: RankOutcome) -> str:
        first, _, stack = outcome.lost.partition("\n")
        if first.startswith("Traceback"):
            return outcome.lost  # the plugin's own error
        return f"{first}, while {outcome.doing or 'starting'}" + (f"\n{stack}" if stack else "")

    def between_ranks(self) -> Iterable[Failure]:
        """What no rank can see alone."""
        from emulator.testing.unmatched import unpaired_messages

        if self.lost or any(_bad(p) for p in self.decisive.values()):
            return
        if self.watch.late:  # each waited for another
            doing = "; ".join(f"rank {rank} was {text}" for rank, text in self.watch.late.items())
            yield Failure.of(self.watch.late, f"no end within {self.watch.limit:g} s: {doing}")
        for ranks, text in unpaired_messages(self.outcomes):
            yield Failure.of(ranks, text)

    def partly_skipped(self, skipped: list[int], acting: Mapping[int, Phase]) -> str:
        reason = str(self.longrepr(acting[skipped[0]])[2])
        others = [rank for rank in self.everyone if rank not in skipped]
        return f"{ranks_text(skipped)} skipped ({reason.removeprefix('Skipped: ')}), {ranks_text(others)} did not"

    def folded(self, failures: list[Failure], verb: str) -> Any:
        ranks = sorted({rank for failure in failures for rank in failure.ranks})
        size = len(self.everyone)
        where = f"all {size} ranks" if len(ranks) == size > 1 else f"{ranks_text(ranks)} of {size}"
        path, line = failures[0].location or (self.item.location[0], (self.item.location[1] or 0) + 1)
        crash = ReprFileLocation(path, line, f"{where}: {failures[0].headline}")
        return folded(f"{verb} {where}", failures, self.notes(ranks), crash)

    def notes(self, failed: list[int]) -> list[str]:
        """What the other ranks were doing, equal ones together."""
        blamed = {c for phase in self.decisive.values() if _bad(phase) for c in phase.culprits}
        told: dict[str, list[int]] = {}
        for outcome in self.outcomes:
            rank, phase = outcome.rank, self.decisive.get(outcome.rank)
            if rank in failed or phase is None:
                continue
            if phase.stopped:
                text = f"stopped while {phase.doing}"
            elif rank in blamed:
                text = f"ended without an error; last call: {outcome.last_call or 'none'}"
            else:
                text = "ended without an error" if phase.kind != "skipped" else "skipped"
            told.setdefault(text, []).append(rank)
        return [f"{ranks_text(ranks)}: {text}" for text, ranks in told.items()]

    # -- reports ------------------------------------------------------------------------------------------------------

    def make(self, when: Any, outcome: Any) -> pytest.TestReport:
        phases = [p for o in self.outcomes for p in o.phases if p.when == when and p.stop]
        known = [self.reports[id(p)] for p in phases if p.report]
        return pytest.TestReport(
            nodeid=self.item.nodeid,
            location=self.item.location,
            keywords=dict.fromkeys(self.item.keywords, 1),
            outcome=outcome,
            longrepr=None,
            when=when,
            sections=self.sections(when),
            duration=max((p.duration for p in phases), default=0.0),
            start=min((p.start for p in phases), default=0.0),
            stop=max((p.stop for p in phases), default=0.0),
            user_properties=list(dict.fromkeys(p for report in known for p in report.user_properties)),
        )

    def sections(self, when: str) -> list[tuple[str, str]]:
        """Captured output, labelled with its ranks."""
        found: dict[tuple[str, str], list[int]] = {}
        for outcome in self.outcomes:
            of_rank = list(outcome.sections) if when == "call" else []
            for phase in outcome.phases:
                if phase.when == when and phase.report:
                    of_rank += self.reports[id(phase)].sections
            for section in dict.fromkeys(of_rank):
                found.setdefault(section, []).append(outcome.rank)
        return [(f"{title} ({ranks_text(ranks)})", text) for (title, text), ranks in found.items()]

    def expect(self, report: pytest.TestReport) -> None:
        mark = evaluate_xfail_marks(self.item)
        if mark is not None and mark.raises is None and not self.item.config.option.runxfail:
            report.outcome, report.wasxfail = "skipped", mark.reason


def merge(item: pytest.Item, outcomes: Sequence[RankOutcome], watch: Watch) -> list[pytest.TestReport]:
    return Merger(item, outcomes, watch).reports_of_test()


def problem_report(item: pytest.Item, text: str) -> list[pytest.TestReport]:
    """The test could not be given to ranks."""
    report = Merger(item, [], Watch(0, [])).make("setup", "failed")
    report.longrepr = text
    return [report]


def _bad(phase: Phase) -> bool:
    return phase.kind in ("failed", "xfailed") and not phase.stopped


def _decisive(phases: Sequence[Phase]) -> Phase:
    """The worst of setup and call; of equals the last."""
    main = [p for p in phases if p.when != "teardown"] or [Phase("call", "passed")]
    return max(main, key=lambda p: (_bad(p), p.stopped, p.kind in _BAD, p.kind == "xpassed", p.when == "call"))


def _report(item: pytest.Item, phase: Phase) -> Any:
    data = phase.report or {}
    if "outcome" not in data:  # made by settle, not by pytest
        return pytest.TestReport(item.nodeid, item.location, {}, "failed", data["longrepr"], phase.when)  # type: ignore
    return item.config.hook.pytest_report_from_serializable(config=item.config, data=data)
