"""Timelines as the emulation itself ran: a record's own start and duration."""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from emulator.cost.kernel import Slice, Timeline
from emulator.runtime.mesh import Mesh
from emulator.trace.record import steps_of


def is_collective(record: Mapping[str, Any]) -> bool:
    """Whether an op's record talks to other ranks (a slice has a group, but cuts its own rank's copy)."""
    return record["group"] is not None and record["op"] != "slice"


def wall_timelines(traces: Sequence[tuple[dict[str, Any], list[dict[str, Any]]]]) -> list[Timeline]:
    """One timeline per step, in the wall-clock seconds of the records. Verification traffic is left out.

    A step starts with its first record on any rank. How long a rank waited inside a collective is not known, so no
    slice has a wait. Ranks may have stopped at different places.
    """
    mesh = Mesh(**traces[0][0]["mesh"])
    by_rank = [steps_of(records) for _, records in traces]
    timelines = []
    for number in range(max(map(len, by_rank))):
        ops = [_ops(steps[number][1]) if number < len(steps) else [] for steps in by_rank]
        first = min((record["start"] for listed in ops for _, record in listed), default=0.0)
        slices = tuple(_slices(rank, listed, first) for rank, listed in enumerate(ops))
        end = max((piece.end for listed in slices for piece in listed), default=0.0)
        timelines.append(Timeline(number, "", end, slices, _meetings(slices, mesh)))
    return timelines


def _ops(records: Sequence[Mapping[str, Any]]) -> list[tuple[int, Mapping[str, Any]]]:
    return [(i, r) for i, r in enumerate(records) if r["kind"] == "op" and r["traffic"] != "verification"]


def _slices(rank: int, listed: list[tuple[int, Mapping[str, Any]]], first: float) -> tuple[Slice, ...]:
    slices: list[Slice] = []
    for index, record in listed:
        start, end = record["start"] - first, record["start"] - first + record["duration"]
        if slices:  # starts and durations are rounded to 0.1 us, and a rank does one thing at a time
            start = max(start, slices[-1].end)
        stream = "comm" if is_collective(record) else "compute"
        slices.append(Slice(rank, stream, start, max(0.0, end - start), 0.0, record, index))  # type: ignore[arg-type]
    return tuple(slices)


def _meetings(slices: Sequence[Sequence[Slice]], mesh: Mesh) -> tuple[tuple[tuple[int, int], ...], ...]:
    """The n-th call of each group, wherever its members made it."""
    calls: dict[tuple, list[tuple[int, int]]] = defaultdict(list)
    for rank, listed in enumerate(slices):
        seen: Counter[str] = Counter()
        for position, piece in enumerate(listed):
            if piece.stream == "comm":
                axis = piece.record["group"]
                calls[axis, tuple(mesh.members(axis, rank)), seen[axis]].append((rank, position))
                seen[axis] += 1
    return tuple(tuple(call) for call in calls.values())
