"""Which ops lead from one placement to another: the only source of collectives in a rank graph."""

from dataclasses import dataclass
from typing import Any

from torch.distributed.tensor.placement_types import Placement, Shard

from emulator.ops.registry import LOCAL, PARTIAL, Mixed, R


@dataclass(frozen=True)
class Step:
    """One op to insert: its name in the vocabulary and its arguments behind the tensor."""

    op: str
    args: tuple[Any, ...]


def transition_steps(
    source: Placement, target: Placement, axis: str, size: int, real: int, padded: int
) -> list[Step] | None:
    """Steps that bring a token value from `source` to `target` on `axis`; None when there is no sound way.

    Padding is added on the way to local-token and removed on the way back, as its own step.
    """
    pad = [Step("pad", (0, padded))] if padded != real else []
    unpad = [Step("unpad", (0, real))] if padded != real else []
    if source == PARTIAL and target == R:
        return [Step("all_reduce", (axis, size))]
    if source == PARTIAL and target == LOCAL:
        return [*pad, Step("reduce_scatter", (axis, size, 0))]
    if source == LOCAL and target == R:
        return [Step("all_gather", (axis, size, 0)), *unpad]
    if source == R and target == LOCAL:
        return [*pad, Step("slice", (axis, size, 0))]
    if source == R and isinstance(target, Shard):
        return [Step("slice", (axis, size, target.dim))]
    if isinstance(source, Shard) and target == R:
        return [Step("all_gather", (axis, size, source.dim))]
    if source == LOCAL and isinstance(target, Shard):
        return [Step("all_to_all", (axis, size, target.dim, 0)), *unpad]
    if isinstance(source, Shard) and target == LOCAL:
        return [*pad, Step("all_to_all", (axis, size, 0, source.dim))]
    if source == Mixed(PARTIAL) and target == LOCAL:
        return [Step("all_reduce", (axis, size))]  # sums different tokens: reported by the static check
    return None
