"""One run of a scenario: prepare once, run on every rank, check, summarise."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from emulator.errors import RankError
from emulator.locate import case_of, locate
from emulator.prepare import Prepared, prepare
from emulator.rank import run_on_rank
from emulator.runtime.board import Board
from emulator.runtime.threads import single_thread
from emulator.runtime.world import World
from emulator.scenario import Scenario
from emulator.trace.flight_recorder import write_flight_records
from emulator.verdict import failures_of, summarise


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
            raise
        culprit = _locate(prepared, failures_of(reports))
    return summarise(prepared, reports, time.perf_counter() - started, culprit)


def _locate(prepared: Prepared, failures: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The first wrong node of the first step that went wrong."""
    if not failures:
        return None
    step = min(f["step"] for f in failures)
    first = min((f for f in failures if f["step"] == step), key=lambda f: (f["order"], f["rank"]))
    dp = prepared.mesh.index("dp", first["rank"])
    here = [f for f in failures if f["step"] == step and prepared.mesh.index("dp", f["rank"]) == dp]
    found = locate(case_of(prepared, step, dp), here)
    if found is not None:
        found |= {"step": step, "dp": dp}
    return found
