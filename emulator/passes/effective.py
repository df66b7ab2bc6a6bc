"""Effective ops: what a rank graph runs, by op and shapes, with regions counted as often as they repeat."""

import operator
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

from torch import Tensor, fx

from emulator.layout.placement import Layout
from emulator.layout.rank_graph import RankGraph
from emulator.ops.region import MARKERS
from emulator.ops.registry import op_name
from emulator.ops.transition import TRANSITIONS

Shape = tuple[int, ...]


class EffectiveOp(NamedTuple):
    """group: mesh axis of a transition between ranks; None for all other ops."""

    op: str
    inputs: tuple[Shape, ...]
    outputs: tuple[Shape, ...]
    group: str | None


class Shapes(Protocol):
    """What stands in for values (runtime's ShapeMode): fake kernels, and the routing that shapes alone cannot tell."""

    def call(self, target: Callable, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any: ...
    def dispatch(self, x: Tensor, ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]: ...
    def splits(self, node: fx.Node) -> tuple[list[int], list[int]]: ...


def effective_ops(
    rank_graph: RankGraph, *, inputs: Mapping[str, Any], weights: Callable[[str, Layout], Tensor], shapes: Shapes
) -> Counter[EffectiveOp]:
    """How often one rank runs each op of the vocabulary on which shapes. Use inside a FakeTensorMode.

    A region is run once and counted `repeat` times: its copies see the shapes that it saw. inputs, weights, shapes: as
    for the executor (inputs by name; parameter name and layout -> this rank's tensor; stand-in for values).
    """
    counts: Counter[EffectiveOp] = Counter()
    env: dict[fx.Node, Any] = {}
    times = 1
    for node in rank_graph.graph.nodes:
        if node.op == "placeholder":
            env[node] = inputs[node.target]
        elif node.op == "get_attr":
            env[node] = weights(node.target, node.meta["layout"])
        elif node.op == "call_function":
            args, kwargs = fx.map_arg((node.args, node.kwargs), env.__getitem__)
            name = op_name(node.target)
            if name == "region_begin":
                times = args[2]
            elif name == "region_end":
                times = 1
            env[node] = _run(node, name, args, kwargs, shapes)
            if name is not None and name not in MARKERS:
                given = _shapes_of((*args, *kwargs.values()))
                counts[EffectiveOp(name, given, _shapes_of((env[node],)), _group(name, args))] += times
    return counts


def _run(node: fx.Node, name: str | None, args: tuple[Any, ...], kwargs: dict[str, Any], shapes: Shapes) -> Any:
    if node.target is operator.getitem:
        return args[0][args[1]]
    if name == "moe_dispatch":
        return shapes.dispatch(*args)
    if name == "all_to_all_rows":
        rows, (_, receive) = args[0], shapes.splits(node)
        return rows.new_empty((sum(receive), *rows.shape[1:]))
    return shapes.call(node.target, args, kwargs)


def _group(name: str, args: tuple[Any, ...]) -> str | None:
    if name not in TRANSITIONS or name in ("pad", "unpad"):
        return None
    return args[3] if name == "all_to_all_rows" else args[1]


def _shapes_of(values: Any) -> tuple[Shape, ...]:
    found: list[Shape] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(tuple(value.shape))
        elif isinstance(value, (list, tuple)):
            found += _shapes_of(value)
    return tuple(found)
