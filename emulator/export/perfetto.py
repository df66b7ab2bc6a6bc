"""Chrome JSON, which Perfetto (ui.perfetto.dev) and chrome://tracing open.

One process per rank with the tracks layers, compute and comm, and per collective call a flow over its ranks. Form:
Perfetto's documentation of its Chrome JSON importer, and the Trace Event Format document.
"""

import gzip
import json
from collections.abc import Iterator, Sequence
from itertools import count, groupby
from pathlib import Path
from typing import Any

from emulator.cost.kernel import Slice, Timeline
from emulator.errors import UsageError
from emulator.export.run import Run
from emulator.export.slice_args import kernel_args, kernel_names, micros, slice_args

LAYERS, COMPUTE, COMM = 1, 2, 3
_TRACKS = {LAYERS: "layers", COMPUTE: "compute", COMM: "comm"}
_TRACK_OF = {"compute": COMPUTE, "comm": COMM}

Event = dict[str, Any]


def write_perfetto(run: Run, path: Path) -> Path:
    """Writes the run as one file of all ranks, gzipped where the name ends in .gz (Perfetto opens both)."""
    data = json.dumps(chrome_trace(run), separators=(",", ":")).encode()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(gzip.compress(data, 5) if path.suffix == ".gz" else data)
    except OSError as error:
        raise UsageError(f"{path}: cannot be written ({error.strerror})") from None
    return path


def chrome_trace(run: Run) -> dict[str, Any]:
    """The JSON object: metadata events first, then by time. Times are microseconds from the start of the run."""
    flow_ids = count(1)
    events = [event for at, timeline in run.starts() for event in _step_events(run, timeline, at, flow_ids)]
    # what starts first, then the longer one: the order in which slices of a track nest; flows after their slices
    events.sort(key=lambda event: (event["ts"], event["ph"] != "X", -event.get("dur", 0), event["pid"]))
    return {
        "traceEvents": [*_names(run), *events],
        "displayTimeUnit": "ns",
        "distributedInfo": {"backend": "hccl" if run.device else "gloo", "world_size": len(run.ranks)},
        "metadata": run.metadata(),
    }


def _names(run: Run) -> Iterator[Event]:
    for rank in run.ranks:
        place = " ".join(f"{axis}{run.mesh.index(axis, rank)}" for axis in run.mesh.names)
        yield _meta(rank, "process_name", {"name": f"rank {rank} ({place})"})
        yield _meta(rank, "process_labels", {"labels": f"NPU {rank}"})
        yield _meta(rank, "process_sort_index", {"sort_index": rank})
        for track, name in _TRACKS.items():
            yield _meta(rank, "thread_name", {"name": name}, track)
            yield _meta(rank, "thread_sort_index", {"sort_index": track}, track)


def _meta(rank: int, name: str, args: dict[str, Any], track: int = 0) -> Event:
    return {"ph": "M", "name": name, "pid": rank, "tid": track, "ts": 0, "args": args}


def _step_events(run: Run, timeline: Timeline, at: float, flow_ids: Iterator[int]) -> Iterator[Event]:
    for rank, pieces in enumerate(timeline.slices):
        yield from _layer_slices(run, timeline, rank, pieces, at)
        ends = {COMPUTE: at, COMM: at}
        for piece in pieces:
            track = _TRACK_OF[piece.stream]
            yield from _op_slices(run, piece, track, at, ends[track])
            ends[track] = at + piece.end
    for number, meeting in enumerate(timeline.meetings):
        yield from _flow(timeline, meeting, at, f"{timeline.step}.{number}", next(flow_ids))


def _op_slices(run: Run, piece: Slice, track: int, at: float, free: float) -> Iterator[Event]:
    """The op, its kernels inside it where there are several, and before a collective the wait for the other ranks."""
    start, end = at + piece.start, at + piece.end
    if piece.wait > 0:
        waited = _slice("wait", "wait", piece.rank, track, max(start - piece.wait, free), start)
        yield waited | {"args": {"for": piece.record["op"], "module": piece.record["module"]}}
    name = kernel_names(piece)[0] if len(piece.kernels) == 1 else piece.record["op"]
    event = _slice(name, piece.record["op"], piece.rank, track, start, end)
    yield event | {"args": slice_args(piece, run.members(piece))}
    if len(piece.kernels) > 1:
        for kernel, cost in piece.kernels:
            stop = min(start + cost.seconds, end)
            inside = _slice(kernel.name or kernel.family, "kernel", piece.rank, track, start, stop)
            yield inside | {"args": kernel_args(kernel, cost)}
            start = stop


def _slice(name: str, category: str, rank: int, track: int, start: float, end: float) -> Event:
    """Rounded to nanoseconds at both ends, so that neighbours still touch and never overlap."""
    ts = micros(start)
    dur = max(0.0, round(micros(end) - ts, 3))
    return {"ph": "X", "name": name, "cat": category, "pid": rank, "tid": track, "ts": ts, "dur": dur}


def _layer_slices(run: Run, timeline: Timeline, rank: int, pieces: Sequence[Slice], at: float) -> Iterator[Event]:
    """The step, and in it its layers: from a layer's first op to its last (with overlap, at most to the next layer)."""
    if not pieces:
        return
    step = run.step(timeline)
    last = max(piece.end for piece in pieces)
    whole = _slice(f"step {timeline.step}: {step['phase']}", "step", rank, LAYERS, at, at + last)
    yield whole | {"args": {key: step[key] for key in ("plan", "phase", "requests", "variants")}}
    spans = [
        (layer, [*group])
        for layer, group in groupby(sorted(pieces, key=lambda p: p.index), key=lambda p: p.record["layer"])
    ]
    end = 0.0
    for layer, group in spans:
        start, end = max(end, min(p.start for p in group)), max(end, *(p.end for p in group), 0.0)
        name = f"layer {layer}" if layer is not None else group[0].record["module"]
        yield _slice(name, "layer", rank, LAYERS, at + start, at + end) | {"args": {"ops": len(group)}}


def _flow(
    timeline: Timeline, meeting: Sequence[tuple[int, int]], at: float, label: str, number: int
) -> Iterator[Event]:
    """Arrows through the middles of one call's slices, in time's order. A slice of no length holds no arrow."""
    pieces = [timeline.slices[rank][position] for rank, position in meeting]
    ends = [(p, micros(at + p.start), micros(at + p.end)) for p in pieces]
    points = sorted((round((start + end) / 2, 3), p.rank, p) for p, start, end in ends if end - start > 0.001)
    if len(points) < 2:
        return
    for place, (ts, rank, piece) in enumerate(points):
        phase = "s" if place == 0 else "f" if place == len(points) - 1 else "t"
        yield {
            "ph": phase, "bp": "e", "id": number, "name": f"{piece.record['op']} {label}", "cat": "collective",
            "pid": rank, "tid": _TRACK_OF[piece.stream], "ts": ts,
        }  # fmt: skip
