"""What a slice carries beside its times, under the names that other tools look for.

Input Dims and Input type: torch_npu; simulation_shapes and kernel_type: msmodeling; Collective name and its neighbours:
Kineto's communication arguments, which HTA reads; the rest is this project's own.
"""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from emulator.cost.kernel import Cost, Kernel, Slice
from emulator.export.wall_clock import is_collective

KINETO_NAMES = {
    "all_reduce": "allreduce", "all_gather": "_allgather_base", "reduce_scatter": "_reduce_scatter_base",
    "all_to_all": "all_to_allv", "broadcast": "broadcast",
}  # fmt: skip


def slice_args(piece: Slice, members: Sequence[int]) -> dict[str, Any]:
    """The arguments of one slice; members: of its group, for a collective."""
    record = piece.record
    shapes = [tensor["shape"] for tensor in record["inputs"]]
    args: dict[str, Any] = {
        "Input Dims": shapes,
        "Input type": [tensor["dtype"] for tensor in record["inputs"]],
        "simulation_shapes": json.dumps(shapes),
        "kernel_type": ";".join(kernel_names(piece)),
        "layout_in": [tensor["layout"] for tensor in record["inputs"]],
        "layout_out": [tensor["layout"] for tensor in record["outputs"]],
        "output_shapes": [tensor["shape"] for tensor in record["outputs"]],
        "value_state": record["outputs"][0]["layout"],
        "module": record["module"],
        "seq": record["seq"],
    }
    if record["window"] is not None:
        args["token_window"] = record["window"]
    if is_collective(record):
        args |= {
            "Collective name": KINETO_NAMES.get(record["op"], record["op"]),
            "In msg nelems": math.prod(shapes[0]),
            "Out msg nelems": math.prod(record["outputs"][0]["shape"]),
            "Group size": len(members),
            "dtype": record["inputs"][0]["dtype"],
            "Process Group Name": group_name(record["group"], members),
            "Process Group Description": record["group"],
            "Process Group Ranks": str(list(members)),
            "Rank": piece.rank,
            "bytes": record["bytes"],
            "wait_us": micros(piece.wait),
        }
    if piece.kernels:
        args |= cost_args([cost for _, cost in piece.kernels])
    return args


def cost_args(costs: Sequence[Cost]) -> dict[str, Any]:
    """The cost of one or more kernels; the source is the weakest of theirs, the bound that of the longest."""
    sources = {cost.source for cost in costs}
    return {
        "cost_us": micros(sum(cost.seconds for cost in costs)),
        "cost_source": next(s for s in ("analytic", "interpolated", "measured") if s in sources),
        "cost_bound": max(costs, key=lambda cost: cost.seconds).bound,
        "flops": sum(cost.flops for cost in costs),
        "memory_bytes": sum(cost.bytes for cost in costs),
    }


def kernel_names(piece: Slice) -> list[str]:
    """The kernels that a slice was priced as; the op's own name where that is not known."""
    return [kernel.name or piece.record["op"] for kernel, _ in piece.kernels] or [piece.record["op"]]


def kernel_args(kernel: Kernel, cost: Cost) -> dict[str, Any]:
    """The arguments of one kernel inside an op's slice."""
    return {"family": kernel.family, "sizes": _plain(kernel.sizes), "dtype": kernel.dtype, **cost_args([cost])}


def _plain(sizes: Mapping[str, Any]) -> dict[str, Any]:
    return {key: list(value) if isinstance(value, tuple) else value for key, value in sizes.items()}


def group_name(axis: str, members: Sequence[int]) -> str:
    """A name that only one group has: its axis and its first member."""
    return f"{axis}{members[0]}"


def micros(seconds: float) -> float:
    """Microseconds, to the nanosecond."""
    return round(seconds * 1e6, 3)
