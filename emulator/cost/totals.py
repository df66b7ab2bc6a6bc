"""Sums over a timeline: by op, module, layer, rank, bound and source; and where each rank's time goes."""

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from emulator.cost.intervals import length, union
from emulator.cost.kernel import Slice, Timeline
from emulator.layout.plan import module_pattern


@dataclass(frozen=True)
class RankTime:
    """Seconds of one rank's step. compute, comm: of its slices. overlapped: both streams at work. wait: nothing runs,
    as a collective stands ready for other ranks. idle: nothing runs, and nothing is waited for.

    busy + wait + idle is the step's time, with busy = compute + comm - overlapped.
    """

    rank: int
    compute: float
    comm: float
    overlapped: float
    wait: float
    idle: float

    @property
    def busy(self) -> float:
        return self.compute + self.comm - self.overlapped


@dataclass
class Group:
    """What slices sum to. seconds, wait, flops, bytes: of all ranks; slowest: seconds of the rank with the most; calls
    of one rank; sources: seconds by how they were found."""

    key: Any
    stream: str
    seconds: float = 0.0
    wait: float = 0.0
    flops: float = 0.0
    bytes: float = 0.0
    calls: int = 0
    sources: dict[str, float] = field(default_factory=dict)
    ranks: dict[int, float] = field(default_factory=dict)

    @property
    def slowest(self) -> float:
        return max(self.ranks.values(), default=0.0)

    @property
    def mean(self) -> float:
        return self.seconds / max(len(self.ranks), 1)

    def as_dict(self) -> dict[str, Any]:
        return {
            "stream": self.stream, "calls": self.calls / max(len(self.ranks), 1), "seconds_mean": self.mean,
            "seconds_slowest_rank": self.slowest, "wait_mean": self.wait / max(len(self.ranks), 1),
            "flops": self.flops, "bytes": self.bytes, "sources": self.sources,
        }  # fmt: skip


def group_by(timeline: Timeline, key: Callable[[Slice], Hashable]) -> list[Group]:
    """Sums of slices by key and stream, longest first."""
    groups: dict[tuple[Hashable, str], Group] = {}
    for own in timeline.slices:
        for piece in own:
            which = key(piece), piece.stream
            group = groups.get(which)
            if group is None:
                group = groups[which] = Group(*which)
            group.seconds += piece.seconds
            group.wait += piece.wait
            group.calls += 1
            group.ranks[piece.rank] = group.ranks.get(piece.rank, 0.0) + piece.seconds
            for _, cost in piece.kernels:
                group.flops += cost.flops
                group.bytes += cost.bytes
                group.sources[cost.source] = group.sources.get(cost.source, 0.0) + cost.seconds
    return sorted(groups.values(), key=lambda g: -g.seconds)


def by_op(timeline: Timeline) -> list[Group]:
    return group_by(timeline, lambda s: s.record["op"])


def by_module(timeline: Timeline) -> list[Group]:
    """By module pattern: `*` for the layer number."""
    return group_by(timeline, lambda s: module_pattern(s.record["module"]))


def by_layer(timeline: Timeline) -> list[Group]:
    """By layer number; None for what stands before or after the layers. In order of the layers."""
    groups = group_by(timeline, lambda s: s.record["layer"])
    return sorted(groups, key=lambda g: (-1 if g.key is None else g.key, g.stream))


def by_bound(timeline: Timeline) -> dict[str, float]:
    """Seconds of all ranks by what they are spent on."""
    return _by_cost(timeline, "bound")


def by_source(timeline: Timeline) -> dict[str, float]:
    """Seconds of all ranks by how they were found: measured, interpolated, analytic."""
    return _by_cost(timeline, "source")


def _by_cost(timeline: Timeline, name: str) -> dict[str, float]:
    found: dict[str, float] = {}
    for own in timeline.slices:
        for piece in own:
            for _, cost in piece.kernels:
                found[getattr(cost, name)] = found.get(getattr(cost, name), 0.0) + cost.seconds
    return found


def by_kernel(timeline: Timeline) -> dict[str, float]:
    """Seconds of all ranks by kernel type, longest first."""
    found: dict[str, float] = {}
    for own in timeline.slices:
        for piece in own:
            for kernel, cost in piece.kernels:
                name = kernel.name or kernel.family
                found[name] = found.get(name, 0.0) + cost.seconds
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def rank_times(timeline: Timeline) -> list[RankTime]:
    """Where the time of every rank goes, each part measured on the rank's own slices."""
    return [_rank_time(rank, own, timeline.seconds) for rank, own in enumerate(timeline.slices)]


def _rank_time(rank: int, own: Sequence[Slice], step: float) -> RankTime:
    compute = [(s.start, s.end) for s in own if s.stream == "compute"]
    comm = [(s.start, s.end) for s in own if s.stream == "comm"]
    busy = union([*compute, *comm])
    standing = union([*busy, *((s.start - s.wait, s.start) for s in own if s.wait > 0)])
    of_compute, of_comm, of_busy = length(union(compute)), length(union(comm)), length(busy)
    gaps = [b[0] - a[1] for a, b in zip([(0.0, 0.0), *standing], [*standing, (step, step)])]
    overlapped = max(of_compute + of_comm - of_busy, 0.0)  # rounding alone may take it below
    return RankTime(
        rank=rank, compute=of_compute, comm=of_comm, overlapped=overlapped,
        wait=length(standing) - of_busy, idle=sum(gaps),
    )  # fmt: skip


def skew(timeline: Timeline) -> dict[str, Any]:
    """How uneven the ranks' own work is: compute seconds of the lightest and the heaviest rank, and their ratio."""
    work = {t.rank: t.compute for t in rank_times(timeline)}
    low, high = min(work, key=lambda r: work[r]), max(work, key=lambda r: work[r])
    ratio = work[high] / work[low] if work[low] else None
    return {
        "lightest_rank": low, "lightest": work[low], "heaviest_rank": high, "heaviest": work[high],
        "max_over_min": ratio,
    }  # fmt: skip


def not_priced(records: Iterable[dict[str, Any]]) -> dict[str, int]:
    """Records of a step that are no device work, by reason: metadata (host), verification (the emulator's own)."""
    found: dict[str, int] = {}
    for record in records:
        if record["kind"] == "op" and record["traffic"] != "payload":
            found[record["traffic"]] = found.get(record["traffic"], 0) + 1
    return found


def compare_flops(single: Timeline, parallel: Timeline) -> list[dict[str, Any]]:
    """By module pattern: flops of a run on one rank, of all ranks of a parallel run, and how many times the first the
    second is. Above 1 the work is replicated, or done on padding, too; it can never be below.
    """
    one, many = (
        {g.key: g.flops for g in by_module(timeline) if g.stream == "compute"} for timeline in (single, parallel)
    )
    return [
        {
            "module": module, "single": one.get(module, 0.0), "ranks": many.get(module, 0.0),
            "ratio": many.get(module, 0.0) / one[module] if one.get(module) else None,
        }
        for module in sorted({*one, *many}, key=lambda m: (-one.get(m, 0.0), m))
    ]  # fmt: skip
