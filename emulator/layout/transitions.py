"""Which ops lead from one placement to another: the only source of collectives in a rank graph."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.distributed.tensor.placement_types import Placement, Shard

from emulator.layout.placement import Tokens
from emulator.layout.propagation import infer
from emulator.ops.registry import LOCAL, PARTIAL, Mixed, R


@dataclass(frozen=True)
class Step:
    """One op to insert: its name in the vocabulary and its arguments behind the tensor."""

    op: str
    args: tuple[Any, ...]


def transition_steps(source: Placement, target: Placement, axis: str, size: int, tokens: Tokens) -> list[Step] | None:
    """Steps that bring a token value from `source` to `target` on `axis`; None when there is no sound way.

    Rows are padded and put into the ranks' order on the way to local-token, and back, as a step of its own.
    """
    pad = [Step("pad", (0, tokens.padded, *tokens.arrangement))] if tokens.rearranged else []
    unpad = [Step("unpad", (0, tokens.real, *tokens.arrangement))] if tokens.rearranged else []
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


def insert_transition(
    graph: fx.Graph, op: str, args: tuple, source: fx.Node, *, holds_value: bool, sizes: Mapping[str, int],
    tokens: Tokens,
) -> fx.Node:  # fmt: skip
    """A new transition op with its layout. holds_value: it ends the way of source's value to a layout, so it holds that
    value; between pad and cut, or gather and unpad, it does not. What is unsound is reported where it became so."""
    node = graph.call_function(getattr(torch.ops.emulator, op), args)
    found = infer(node, sizes, tokens)
    origin = source.meta["origin"] if holds_value else None
    node.meta.update(layout=found.layout, padded=found.padded, origin=origin, traffic=source.meta["traffic"])
    return node
