"""One run of a scenario: prepare once, run on every rank, check, summarise."""

import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from emulator.errors import RankError
from emulator.jobs.locate import locate_crash, locate_failure
from emulator.jobs.prepare import prepare
from emulator.jobs.rank import run_on_rank
from emulator.jobs.verdict import failures_of, summarise
from emulator.runtime.board import Board
from emulator.runtime.threads import single_thread
from emulator.runtime.world import World
from emulator.scenario import Scenario
from emulator.trace.flight_recorder import write_flight_records

# failures that no wrong value explains: a rank that died or stalled, or made another call than the others
_OF_COMMUNICATION = ("Died", "Stalled", "CallMismatch", "PeerStalled", "PeerFailed")


def run(
    scenario: Scenario, out_dir: Path | None = None, on_progress: Callable[[str, float], None] | None = None
) -> dict[str, Any]:
    """Runs a scenario on ranks forked from this process and returns the summary (see README for its fields).

    out_dir: where traces and summary.json go; None writes nothing. on_progress(stage, fraction) is called as it goes.
    Raises UsageError for bad input and RankError when a rank fails.
    """
    started = time.perf_counter()
    notify = on_progress or (lambda stage, fraction: None)
    notify("preparing", 0.0)
    with single_thread():  # no thread pool may exist when the ranks are forked
        prepared = prepare(scenario, out_dir)
        world = World(prepared.mesh, timeout=scenario.timeout, communicate=scenario.mode == "real")
        steps = [parts[0].rank_graph.graph.nodes for parts in prepared.schedule]
        num_signs = prepared.mesh.size * sum(n.op == "call_function" for nodes in steps for n in nodes)

        def progress(board: Board) -> None:
            notify("running", min(1.0, sum(board.status(r)[0] for r in range(prepared.mesh.size)) / num_signs))

        try:
            reports = world.run(run_on_rank, prepared, on_progress=progress)
        except RankError as error:
            calls = error.report.get("calls")
            if out_dir and isinstance(calls, dict):
                groups = {axis: prepared.mesh.groups(axis) for axis in prepared.mesh.names}
                write_flight_records(out_dir, calls, groups)
                error.report["flight_records"] = f"torchfrtrace -p flight_ {out_dir}"
            if scenario.mode == "real" and error.report.get("kind") not in _OF_COMMUNICATION:
                with suppress(RankError):  # a second run may end in another way: the first one's error stands
                    error.report["culprit"] = locate_crash(prepared)
            raise
        culprit = None
        with suppress(RankError):
            culprit = locate_failure(prepared, failures_of(reports))
    return summarise(prepared, reports, time.perf_counter() - started, culprit)
