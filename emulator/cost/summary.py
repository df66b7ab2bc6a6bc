"""What a replay says, as one object: the shape of `emulator replay --json` and of `cost` in a run's summary."""

import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from emulator.cost.database import Database
from emulator.cost.device import load_device
from emulator.cost.kernel import Timeline
from emulator.cost.local_rows import applied_splits, priced_rows
from emulator.cost.replay import DEFAULT, Options, Trace, quant_of, replay
from emulator.cost.totals import (
    by_bound,
    by_kernel,
    by_layer,
    by_module,
    by_op,
    by_source,
    not_priced,
    rank_times,
    skew,
)
from emulator.trace.record import no_collector, read_trace, steps_of, trace_files


def price_folder(
    trace_dir: Path, device: str, options: Options = DEFAULT, database: Path | None = None
) -> dict[str, Any]:
    """Replays the traces of a folder: what `describe` says, and the seconds that reading and replaying took.

    Raises UsageError for a folder, device or database that cannot be read, and as `replay` does.
    """
    target = load_device(device)
    measured = Database(database) if database is not None else None
    with no_collector():
        started = time.perf_counter()
        traces = [read_trace(path) for path in trace_files(trace_dir)]
        read = time.perf_counter()
        timelines = replay(traces, target, options=options, database=measured)
        replayed = time.perf_counter()
        return {**describe(traces, timelines, options), "read_s": read - started, "replay_s": replayed - read}


def describe(traces: Sequence[Trace], timelines: Sequence[Timeline], options: Options) -> dict[str, Any]:
    """{device, options, trace_dtype, steps}; per step: seconds, finished (False: a rank's trace ends inside it), rows
    (local_rows.priced_rows), ranks, skew, ops, modules, layers, kernels, bounds, sources, and what is not priced on
    rank 0."""
    of_ranks = [{step["step"]: (step, records) for step, records in steps_of(own)} for _, own in traces]
    steps = of_ranks[0]
    return {
        "device": timelines[0].device,
        "options": {**asdict(options), "quant": quant_of(traces, options)},
        "trace_dtype": traces[0][0]["dtype"],
        "steps": [
            {
                **_step(timeline, *steps[timeline.step], options),
                "finished": all(_finished(own[timeline.step][1]) for own in of_ranks),
            }
            for timeline in timelines
        ],
    }


def _finished(records: Sequence[dict[str, Any]]) -> bool:
    """Whether a rank came to the end of a step: it writes its peak of memory there."""
    return any(record["kind"] == "memory" for record in records)


def _step(timeline: Timeline, step: dict[str, Any], records: list[dict[str, Any]], options: Options) -> dict[str, Any]:
    return {
        "step": timeline.step, "phase": step["phase"], "plan": step["plan"], "seconds": timeline.seconds,
        "rows": priced_rows(records, applied_splits(records, options.split_attention)),
        "ranks": [{**asdict(t), "busy": t.busy} for t in rank_times(timeline)],
        "skew": skew(timeline),
        "ops": [{"op": g.key, **g.as_dict()} for g in by_op(timeline)],
        "modules": [{"module": g.key, **g.as_dict()} for g in by_module(timeline)],
        "layers": [{"layer": g.key, **g.as_dict()} for g in by_layer(timeline)],
        "kernels": by_kernel(timeline),
        "bounds": by_bound(timeline),
        "sources": by_source(timeline),
        "collectives": len(timeline.meetings),
        "not_priced": not_priced(records),
    }  # fmt: skip
