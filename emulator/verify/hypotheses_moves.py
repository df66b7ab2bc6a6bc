"""Transitions carried out over the list of all ranks' values, and the way a value took through a graph."""

from collections.abc import Iterator, Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor, fx

from emulator.ops.registry import op_name
from emulator.ops.transition import COLLECTIVES, LOCAL_CUTS, TRANSITIONS, window_lengths, windows_of
from emulator.runtime.collectives import splits
from emulator.runtime.mesh import Mesh

Values = list[Tensor]

MOVES = (*COLLECTIVES, *LOCAL_CUTS)  # depend on the rank


def total(parts: Sequence[Tensor]) -> Tensor:
    return reduce(torch.add, parts)


def axis_at(op: str) -> int:
    """Position of the mesh axis among a transition's arguments."""
    arguments = getattr(torch.ops.emulator, op).default._schema.arguments
    return [a.name for a in arguments].index("axis")


def transition(op: str, operands: list[list[Any]], mesh: Mesh) -> Values:
    """A transition op on every rank: its meaning in runtime/collectives, over a list of values."""
    values, at = [args[0] for args in operands], axis_at(op)
    result = []
    for rank, args in enumerate(operands):
        members, index = mesh.members(args[at], rank), mesh.index(args[at], rank)
        parts = [values[m] for m in members]
        if op == "slice":
            result.append(args[0].chunk(args[2], args[3])[index])
        elif op == "slice_rows":
            result.append(args[0].split(splits(args[1], args[3]))[index])
        elif op in ("local_query_lens", "local_kv_lens"):
            _, size, per, order = args[at:]
            windows = windows_of(order, size, per, index)
            result.append(window_lengths(args[at - 1], args[0], windows)[op == "local_kv_lens"])
        elif op == "broadcast":
            result.append(parts[args[3]])
        elif op == "all_reduce":
            result.append(total(parts))
        elif op == "reduce_scatter":
            result.append(total(parts).chunk(len(members), args[3])[index])
        elif op == "all_gather":
            result.append(torch.cat(parts, args[3]))
        elif op == "all_to_all":
            result.append(torch.cat([p.chunk(args[2], args[3])[index] for p in parts], args[4]))
        else:
            assert op == "all_to_all_rows", op
            sent = [values[m].split(splits(operands[m][1], args[4]))[index] for m in members]
            result.append(torch.cat(sent))
    return result


def upstream(node: fx.Node) -> Iterator[fx.Node]:
    """The transitions and views that a value came through, last first, and the op behind them."""
    while isinstance(node, fx.Node) and node.op == "call_function":
        yield node
        if op_name(node.target) not in (*TRANSITIONS, None) or not node.args:
            return
        node = node.args[0]
