"""A user's graph in the vocabulary's terms: our ops by packet with positional arguments, and torch's functional
collectives as transition ops."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from emulator.errors import UsageError
from emulator.ops.foreign import function_name

_NAMESPACES = ("_c10d_functional", "c10d_functional")


def normalise(graph: fx.Graph, sizes: Mapping[str, int], who: str) -> None:
    """Rewrites the graph in place. sizes: lengths of the mesh axes. Raises UsageError as the parts do."""
    for node in graph.nodes:
        if node.op == "call_function" and _namespace(node.target) == "emulator":
            node.target = getattr(node.target, "overloadpacket", node.target)
            names = [a.name for a in node.target.default._schema.arguments]
            missing = [k for k in node.kwargs if k not in names]
            if missing:
                raise UsageError(
                    f"{who}: {node.target.__name__} has no argument {missing[0]!r} (has: {', '.join(names)})"
                )
            given = {**dict(zip(names, node.args)), **node.kwargs}
            last = max((names.index(k) for k in given), default=-1)
            node.args, node.kwargs = tuple(given.get(k) for k in names[: last + 1]), {}
    _replace_functional_collectives(graph, sizes, who)


def _replace_functional_collectives(graph: fx.Graph, sizes: Mapping[str, int], who: str) -> None:
    """Rewrites all_reduce, all_gather_into_tensor, reduce_scatter_tensor and wait_tensor in place.

    A group's name must be the name of a mesh axis. Raises UsageError for another group, a reduction that is no sum, or
    a functional collective that has no transition.
    """
    for node in list(graph.nodes):
        if node.op != "call_function" or _namespace(node.target) not in _NAMESPACES:
            continue
        name = function_name(node)
        value = node.args[0]
        if name == "wait_tensor":
            node.replace_all_uses_with(value)
            graph.erase_node(node)
            continue
        axis = node.args[-1] if isinstance(node.args[-1], str) else node.kwargs.get("group_name")
        if axis not in sizes:
            raise UsageError(f"{who}: {name} on group {axis!r} (allowed: {', '.join(sizes)}, the axes of the mesh)")
        if name in ("all_reduce", "reduce_scatter_tensor") and node.args[1] != "sum":
            raise UsageError(f"{who}: {name} with reduction {node.args[1]!r} (allowed: sum)")
        made = {
            "all_reduce": ("all_reduce", ()),
            "all_gather_into_tensor": ("all_gather", (0,)),
            "reduce_scatter_tensor": ("reduce_scatter", (0,)),
        }.get(name)
        if made is None:
            raise UsageError(f"{who}: {name} has no transition (allowed: all_reduce, all_gather, reduce_scatter)")
        op, dims = made
        with graph.inserting_before(node):
            new = graph.call_function(getattr(torch.ops.emulator, op), (value, axis, sizes[axis], *dims))
        new.meta.update(node.meta)
        node.replace_all_uses_with(new)
        graph.erase_node(node)


def _namespace(target: Any) -> str:
    if isinstance(target, torch._ops.OpOverload):
        return target.namespace
    if isinstance(target, torch._ops.OpOverloadPacket):
        return target._qualified_op_name.partition("::")[0]
    return ""
