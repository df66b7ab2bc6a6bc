"""trace_view.json of an Ascend profiler folder: a rank's Chrome events in the processes that MindStudio Insight knows.

Processes and track names: those that torch_npu's profiler writes (Ascend Hardware, Communication, Overlap Analysis).
"""

from collections.abc import Iterator, Mapping
from typing import Any

from emulator.cost.intervals import Interval, overlap, union, without
from emulator.export.communication import Call
from emulator.export.run import Run
from emulator.export.slice_args import kernel_args, kernel_names, micros, slice_args

_HARDWARE, _COMMUNICATION, _OVERLAP = 1, 2, 3
_PROCESSES = {_HARDWARE: "Ascend Hardware", _COMMUNICATION: "Communication", _OVERLAP: "Overlap Analysis"}
_ANALYSIS = ("Computing", "Communication", "Communication(Not Overlapped)", "Free")

Event = dict[str, Any]


def trace_view(run: Run, rank: int, calls: Mapping[tuple[int, int], Call]) -> list[Event]:
    """The events: metadata first, then by time."""
    groups = {group: i for i, group in enumerate(dict.fromkeys(call.group for call in calls.values()))}
    events = [*_compute(run, rank), *_communicate(run, rank, calls, groups), *_analyse(run, rank)]
    events.sort(key=lambda event: (event["ts"], -event["dur"]))
    return [*_names(rank, groups), *events]


def _names(rank: int, groups: Mapping[str, int]) -> Iterator[Event]:
    for process, name in _PROCESSES.items():
        yield _meta("process_name", process, 0, name=name)
        yield _meta("process_labels", process, 0, labels=f"NPU {rank}")
        yield _meta("process_sort_index", process, 0, sort_index=process)
    tracks = [(_HARDWARE, 0, "Stream 0")]
    tracks += [(_COMMUNICATION, i, f"Group {group} Communication") for group, i in groups.items()]
    tracks += [(_OVERLAP, i, name) for i, name in enumerate(_ANALYSIS)]
    for process, track, name in tracks:
        yield _meta("thread_name", process, track, name=name)
        yield _meta("thread_sort_index", process, track, sort_index=track)


def _meta(kind: str, process: int, track: int, **args: Any) -> Event:
    return {"ph": "M", "name": kind, "pid": process, "tid": track, "args": args}


def _slice(name: str, process: int, track: int, interval: Interval, args: dict[str, Any]) -> Event:
    ts = micros(interval[0])
    dur = max(0.0, round(micros(interval[1]) - ts, 3))
    return {"ph": "X", "name": name, "pid": process, "tid": track, "ts": ts, "dur": dur, "args": args}


def _compute(run: Run, rank: int) -> Iterator[Event]:
    for at, timeline in run.starts():
        for piece in timeline.slices[rank]:
            if piece.stream != "compute":
                continue
            start, args = at + piece.start, slice_args(piece, (rank,))
            if not piece.kernels:
                yield _slice(piece.record["op"], _HARDWARE, 0, (start, at + piece.end), args)
            for (kernel, cost), name in zip(piece.kernels, kernel_names(piece)):
                stop = min(start + cost.seconds, at + piece.end)
                yield _slice(name, _HARDWARE, 0, (start, stop), args | kernel_args(kernel, cost))
                start = stop


def _communicate(
    run: Run, rank: int, calls: Mapping[tuple[int, int], Call], groups: Mapping[str, int]
) -> Iterator[Event]:
    for _, timeline in run.starts():
        for piece in timeline.slices[rank]:
            if piece.stream == "comm":
                call = calls[timeline.step, piece.index]
                interval = call.start, call.start + call.wait + call.seconds
                args = slice_args(piece, call.members)
                yield _slice(call.name, _COMMUNICATION, groups[call.group], interval, args)


def _analyse(run: Run, rank: int) -> Iterator[Event]:
    for at, timeline in run.starts():
        pieces = timeline.slices[rank]
        computing = union((at + p.start, at + p.end) for p in pieces if p.stream == "compute")
        talking = union((at + p.start - p.wait, at + p.end) for p in pieces if p.stream == "comm")
        alone = without(talking, overlap(computing, talking))
        free = without([(at, at + timeline.seconds)], union([*computing, *talking]))
        for track, intervals in enumerate((computing, talking, alone, free)):
            for interval in intervals:
                yield _slice(_ANALYSIS[track], _OVERLAP, track, interval, {})
