"""Collectives of traces: their groups, whether their shapes agree, what each rank puts in, and which calls of the ranks
belong together."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from emulator.cost.kernel import Kernel
from emulator.cost.mapping import Contradiction
from emulator.cost.work import ITEM_BYTES

COLLECTIVES = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast")
Record = Mapping[str, Any]


class Groups:
    """Who is with whom, from a trace header's mesh: ranks lie row-major over its axes, in order; ep's groups are
    consecutive blocks over all ranks."""

    def __init__(self, mesh: Mapping[str, int]):
        axes = {axis: size for axis, size in mesh.items() if axis != "ep"}
        grid = np.arange(int(np.prod(list(axes.values()), dtype=int))).reshape(tuple(axes.values()))
        self.size = int(grid.size)
        lines = {axis: np.moveaxis(grid, dim, -1).reshape(-1, size) for dim, (axis, size) in enumerate(axes.items())}
        if "ep" in mesh:
            lines["ep"] = grid.reshape(-1, mesh["ep"])
        self._of = {
            axis: {rank: tuple(line) for line in of_axis.tolist() for rank in line} for axis, of_axis in lines.items()
        }

    def members(self, axis: str, rank: int) -> tuple[int, ...]:
        """Global ranks of the rank's group along an axis, in order. Contradiction for an unknown axis."""
        if axis not in self._of:
            raise Contradiction(f"the mesh has no axis {axis!r}")
        return self._of[axis][rank]

    def index(self, axis: str, rank: int) -> int:
        return self.members(axis, rank).index(rank) if axis in self._of else 0


@dataclass(frozen=True)
class Call:
    """One rank's part of a collective. position: of its record in the step."""

    rank: int
    position: int
    record: Record
    group: tuple[int, ...]


def check_shapes(record: Record, size: int) -> None:
    """Raises Contradiction when a collective's or local cut's output is not what its input becomes."""
    op, attrs = record["op"], record["attrs"]
    given, made = list(record["inputs"][0]["shape"]), list(record["outputs"][0]["shape"])
    dim = attrs.get("dim", 0)
    wanted = list(given)
    if not 0 <= dim < max(len(given), 1):
        raise Contradiction(f"dim {dim} of a shape {given}")
    if op == "all_gather":
        wanted[dim] *= size
    elif op in ("reduce_scatter", "slice"):
        if given[dim] % size:
            raise Contradiction(f"dim {dim} of {given} does not divide by the {size} ranks of its group")
        wanted[dim] //= size
    elif op in ("pad", "unpad"):
        wanted[dim] = attrs["length"]
        if (attrs["length"] < given[dim]) == (op == "pad") and attrs["length"] != given[dim]:
            raise Contradiction(f"{op} of {given} to {attrs['length']} rows")
    elif op == "all_to_all" and "splits" in attrs:
        splits = attrs["splits"]
        if len(splits) != size or sum(splits) != given[0]:
            raise Contradiction(f"splits {splits} for {given[0]} rows and {size} ranks")
        wanted[0] = made[0]  # what the others send: seen where their calls meet
    elif op == "all_to_all":
        concat = attrs["concat_dim"]
        if given[dim] % size or not 0 <= concat < len(given):
            raise Contradiction(f"dim {dim} of {given} does not divide by the {size} ranks of its group")
        wanted[dim] //= size
        wanted[concat] *= size
    elif op in ("slice_rows", "broadcast"):  # who receives a broadcast holds nothing of it before
        wanted[0] = made[0]
    if made != wanted:
        raise Contradiction(f"output {made} of an input {given} on {size} ranks, expected {wanted}")


def is_weight(layout: str) -> bool:
    """Whether a layout word is that of a stored weight shard: it names its axis, as in `tp:shard(1)`."""
    return ":" in layout


def collective_kernel(call: Call, dtype: str) -> Kernel:
    """What one rank puts into a collective, in the dtype that its values are priced in."""
    record, size = call.record, len(call.group)
    item = ITEM_BYTES[dtype]
    given, made = _elements(record["inputs"][0]), _elements(record["outputs"][0])
    sizes: dict[str, Any] = {"op": record["op"], "ranks": call.group, "bytes": given * item}
    if record["op"] in ("reduce_scatter", "broadcast"):
        sizes["bytes"] = made * item
    elif record["op"] == "all_to_all":
        kept = given // size
        if "splits" in record["attrs"]:
            own = record["attrs"]["splits"][call.group.index(call.rank)]
            kept = own * _elements(record["inputs"][0], 1)
        sizes.update(bytes=(given - kept) * item, received=(made - kept) * item)
    name = "hcom_alltoall_" if record["op"] == "all_to_all" and "splits" not in record["attrs"] else _HCCL[record["op"]]
    return Kernel("collective", sizes, dtype, name)


_HCCL = {
    "all_reduce": "hcom_allReduce_", "reduce_scatter": "hcom_reduceScatter_", "all_gather": "hcom_allGather_",
    "all_to_all": "hcom_alltoallv_", "broadcast": "hcom_broadcast_",
}  # fmt: skip


def _elements(tensor: Mapping[str, Any], start: int = 0) -> int:
    count = 1
    for length in tensor["shape"][start:]:
        count *= length
    return count


def meetings(calls: Sequence[Sequence[Call]]) -> list[tuple[Call, ...]]:
    """Calls of all ranks that belong together, each in the order of its group. calls: of each rank, in order.

    The n-th call of a group on one rank meets the n-th on the others. Raises Mismatch when they are different calls.
    """
    by_group: dict[tuple[str, tuple[int, ...]], dict[int, list[Call]]] = {}
    for own in calls:
        for call in own:
            by_group.setdefault((call.record["group"], call.group), {}).setdefault(call.rank, []).append(call)
    found = []
    for (axis, group), of_ranks in by_group.items():
        queues = [of_ranks.get(rank, []) for rank in group]
        longest = max(queues, key=len)
        for n, first in enumerate(longest):
            for rank, queue in zip(group, queues):
                if n >= len(queue):
                    raise Mismatch(first, f"rank {rank} makes no call {n + 1} on its {axis} group in this step")
            meeting = tuple(queue[n] for queue in queues)
            _check_meeting(meeting)
            found.append(meeting)
    return found


class Mismatch(ValueError):
    """A call that does not fit those of the other ranks of its group."""

    def __init__(self, call: Call, why: str):
        super().__init__(why)
        self.call = call


def _check_meeting(meeting: tuple[Call, ...]) -> None:
    def words(call: Call) -> tuple:
        record, attrs = call.record, call.record["attrs"]
        shape = record["outputs" if record["op"] == "broadcast" else "inputs"][0]["shape"]
        shape = shape[1:] if "splits" in attrs else shape
        return (
            record["op"], record["module"], attrs.get("dim"), attrs.get("concat_dim"), attrs.get("leg"),
            attrs.get("owner"),
            record["inputs"][0]["dtype"], tuple(shape),
        )  # fmt: skip

    first = words(meeting[0])
    for call in meeting[1:]:
        if words(call) != first:
            other = meeting[0]
            told = f"{other.record['op']} of {other.record['module']} on {other.record['inputs'][0]['shape']}"
            raise Mismatch(call, f"rank {other.rank} calls {told} here (record {other.record.get('seq')})")
    if "splits" in meeting[0].record["attrs"]:
        for index, call in enumerate(meeting):
            received = sum(other.record["attrs"]["splits"][index] for other in meeting)
            if call.record["outputs"][0]["shape"][0] != received:
                rows = call.record["outputs"][0]["shape"][0]
                raise Mismatch(call, f"{rows} rows come out, but the ranks of its group send {received}")
