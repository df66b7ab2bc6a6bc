"""What a node does beyond making its value: it talks to other ranks, or writes into an operand."""

from typing import Any

import torch
from torch import fx

from emulator.ops.registry import op_name
from emulator.ops.transition import COLLECTIVES


def schema_of(target: Any) -> Any:
    """Schema of a torch.library op (of its default overload, where several are meant); None for a plain function."""
    if isinstance(target, torch._ops.OpOverloadPacket):
        return target.default._schema if "default" in target.overloads() else None
    return target._schema if isinstance(target, torch._ops.OpOverload) else None


def communicates(node: fx.Node) -> bool:
    """Whether a node is a call that all ranks of a group must make in the same order."""
    return op_name(node.target) in COLLECTIVES


def written(node: fx.Node) -> list[fx.Node]:
    """The operands that a node changes in place, such as the cache of cache_write."""
    schema = schema_of(node.target)
    if schema is None:
        return []
    given = {a.name: v for a, v in zip(schema.arguments, node.args)} | node.kwargs
    changed = [given.get(a.name) for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    return [value for value in changed if isinstance(value, fx.Node)]
