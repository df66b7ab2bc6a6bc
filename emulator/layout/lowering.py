"""Lowering: Program + plan + parallel sizes -> the one SPMD graph that every rank runs.

A transition is inserted where the layout a value has differs from the layout its consumer wants, and is shared by all
consumers that want the same. Nothing else creates a collective.
"""

import operator
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, fx
from torch.distributed.tensor.placement_types import Placement, Shard
from torch.fx.node import map_aggregate

from emulator.errors import LayoutError, UsageError
from emulator.layout.annotate import CONTAINERS, common_ancestor, left
from emulator.layout.expert_moves import ExpertMoves
from emulator.layout.moves import Value
from emulator.layout.overlap import start_early
from emulator.layout.placement import Kind, Layout, Tokens, placement_word
from emulator.layout.plan import Plan, layer_of
from emulator.layout.propagation import infer
from emulator.layout.rank_graph import Boundary, RankGraph, in_order
from emulator.model.program import Program
from emulator.ops.registry import LOCAL, PARTIAL, Owned, R, op_name

INPUT_KINDS: dict[str, Kind] = {
    "input_ids": "token",
    "next_ids": "token",
    "positions": "token",
    "slots": "token",
    "token_mask": "token",
    "query_lens": "batch",
    "kv_lens": "batch",
    "block_table": "batch",
    "latent_caches": "cache",
    "index_caches": "cache",
}


def lower(program: Program, plan: Plan, sizes: Mapping[str, int], tokens: Tokens | int) -> RankGraph:
    """The rank graph of a Program under a plan. sizes: lengths of the mesh axes tp and ep. tokens: how they lie over
    tp, or how many there are.

    Broken layout rules are collected in `violations`. Raises LayoutError where there is no way on, and UsageError when
    a weight does not divide.
    """
    plan.check_modules(program.modules)
    tokens = Tokens(tokens, sizes["tp"]) if isinstance(tokens, int) else tokens
    return _Lowering(program, plan, sizes, tokens).run()


class _Lowering(ExpertMoves):
    def __init__(self, program: Program, plan: Plan, sizes: Mapping[str, int], tokens: Tokens):
        super().__init__(plan, sizes, tokens)
        self.program = program
        self.edges: dict[Boundary, None] = {}
        self.uneven: dict[str, str] = {}

    def run(self) -> RankGraph:
        for node in self.program.graph.nodes:
            if node.op == "placeholder":
                kind = INPUT_KINDS[node.target]
                layout = Layout(kind, (), self.tokens if kind == "token" else None)
                self._emit(node, self.out.graph.placeholder(node.target), layout)
            elif node.op == "get_attr":
                self._parameter(node)
            elif node.op == "call_function":
                self._call(node)
            else:
                values = map_aggregate(node.args[0], lambda a: self._fetch(a, "") if isinstance(a, fx.Node) else a)
                output = self.out.graph.output(map_aggregate(values, lambda v: v.node))
                output.meta.update(module="", layout=output.all_input_nodes[0].meta["layout"], origin=None)
        if self.uneven:
            found = "; ".join(f"{what} of {name}" for what, name in self.uneven.items())
            raise UsageError(f"plan {self.plan.name} splits weights that do not divide: {found}")
        for node, modules in self.requesters.items():
            node.meta["module"] = common_ancestor(modules)
        self.edges = start_early(self.out, self.edges)
        self.out.boundaries = in_order(self.edges, self.out.graph)
        return self.out

    def _emit(self, origin: fx.Node, node: fx.Node, layout: Any, dispatch: fx.Node | None = None) -> None:
        traffic = "metadata" if origin.op == "placeholder" else "payload"
        node.meta.update(module=origin.meta["module"], layout=layout, origin=origin.name, traffic=traffic)
        self.values[origin] = Value(node, layout, dispatch)

    def _parameter(self, origin: fx.Node) -> None:
        """A parameter as it is stored. One that is brought layers ahead is there, whole, for the first of them, and its
        transition runs at the end of the step for the next."""
        name, module = origin.target, origin.meta["module"]
        stored = self._weight_layout(name)
        self._emit(origin, self.out.graph.create_node("get_attr", name), stored)
        start, layer = self.plan.start_of(module), layer_of(module)
        if start is None or layer is None or layer >= start[1] or not self.plan.gathers_weight(module):
            return
        if stored.placements:
            self._whole_weight(self.values[origin], module)
            self._emit(origin, self.out.graph.create_node("get_attr", name), Layout("weight"))

    def _weight_layout(self, name: str) -> Layout:
        """Placement of a parameter. A bias follows its weight: split with the out-features, one rank's share (partial)
        where the product is partial, whole beside a layer-sharded weight. What stands beside a quantised weight follows
        it in the sizes that both have, and is whole beside a split of others; quant_bias is placed like a bias."""
        module, _, leaf = name.rpartition(".")
        parameter = self.program.parameters[name]
        placements = self.plan.weight_of(module)
        if leaf == "bias" or (leaf == "quant_bias" and any(p == Shard(1) for p in placements.values())):
            share = R if self.plan.gathers_weight(module) else PARTIAL  # with the whole weight every product is whole
            placements = {
                a: share if p == Shard(1) else R if isinstance(p, Owned) else p for a, p in placements.items()
            }
        elif leaf != "weight" and module in self.program.quantised:
            placements = _beside(parameter, self.program.parameters[f"{module}.weight"], placements)
        for axis, placement in placements.items():
            if axis not in self.sizes or (isinstance(placement, Shard) and placement.dim >= parameter.dim()):
                want, axes = placement_word(placement, "weight"), ", ".join(self.sizes)
                raise UsageError(
                    f"plan {self.plan.name}: {name} {list(parameter.shape)} cannot be {axis}:{want} "
                    f"(axes: {axes}; dims: 0 to {parameter.dim() - 1})"
                )
            if isinstance(placement, Shard):
                unit = getattr(parameter, "shard_unit", 1) if leaf == "weight" else 1
                num_units = parameter.shape[placement.dim] // unit
                if num_units % self.sizes[axis]:
                    what = f"{num_units} heads" if unit > 1 else f"{num_units} (dim {placement.dim})"
                    self.uneven.setdefault(f"{axis} {self.sizes[axis]} does not divide {what}", name)
        placed = {a: _owned(p, self.sizes[a]) for a, p in placements.items() if self.sizes[a] > 1}
        return Layout("weight").placed(**placed)

    def _call(self, node: fx.Node) -> None:
        module = node.meta["module"]
        arguments = map_aggregate(node.args, lambda a: self._fetch(a, module) if isinstance(a, fx.Node) else a)
        inputs = list(_tensors(arguments))
        new = self.out.graph.call_function(
            node.target, map_aggregate(arguments, lambda a: a.node if isinstance(a, Value) else a), node.kwargs
        )
        dispatch = next((v.dispatch for v in inputs if v.dispatch is not None), None)
        new.meta["module"] = module
        found = infer(new, self.sizes, self.tokens)
        self.out.violations += found.violations
        if found.dead_end:
            raise LayoutError(f"plan {self.plan.name}: {found.violations[-1]}")
        if op_name(node.target) == "moe_dispatch":
            dispatch = node
        elif isinstance(found.layout, Layout) and found.layout.kind != "rows":
            dispatch = None
        self._emit(node, new, found.layout, dispatch)

    def _fetch(self, origin: fx.Node, consumer: str) -> Value:
        """The value as `consumer` wants it: brought to the output layouts of the modules it leaves, inner first, then
        to the input layouts of the modules it enters, outer first."""
        value, producer = self.values[origin], origin.meta["module"]
        if isinstance(value.layout, tuple) or (producer == consumer and value.layout.kind != "weight"):
            return value
        if value.layout.kind == "weight":
            return self._whole_weight(value, consumer) if self.plan.gathers_weight(consumer) else value
        if origin.op == "placeholder":  # what every rank is given needs no way through outer modules
            return self._given(value, origin, consumer)
        if value.layout.kind == "batch":
            return value
        index = origin.args[1] if origin.target is operator.getitem and producer else 0
        for module in left(producer, consumer):
            value = self.convert(value, self.plan.output_of(module), module)
            self._edge(module, f"output{index or ''}", value, origin)
        for module in reversed(left(consumer, producer)):
            value = self.convert(value, self.plan.input_of(module), module)
            self._edge(module, "input", value, origin)
        return value

    def _given(self, value: Value, origin: fx.Node, consumer: str) -> Value:
        """A graph input as the innermost module that says so wants it. Lengths follow the rows of that module."""
        modules = left(consumer, "")
        module, wanted = next(((m, w) for m in modules if (w := self.plan.input_of(m))), (consumer, None))
        if value.layout.kind != "batch":
            return self.convert(value, wanted, module)
        if wanted is None or wanted[1].get("tp") != LOCAL or self.sizes["tp"] == 1:
            return value
        if origin.target == "block_table" and self.tokens.order == "contiguous":
            return value
        key = (value.node, "tp", LOCAL)
        if key not in self.converted:
            args: tuple[Any, ...] = (value.node, "tp", self.sizes["tp"], self.tokens.per, self.tokens.order)
            if origin.target == "kv_lens":
                args = (value.node, next(v.node for o, v in self.values.items() if o.target == "query_lens"), *args[1:])
            elif origin.target == "block_table":
                args = (value.node, self.tokens.order, self.tokens.per)
            node = self.insert(f"local_{origin.target}", args, value.node, True)
            self.converted[key] = Value(node, node.meta["layout"])
        self.request(self.converted[key].node, module)
        return self.converted[key]

    def _whole_weight(self, value: Value, module: str) -> Value:
        """Stored shards gathered into the whole weight, once for all uses."""
        for axis, placement in value.layout.placements:
            key = (value.node, axis, R)
            if key not in self.converted:
                if isinstance(placement, Owned):
                    rows = self.program.parameters[str(value.node.target)].shape[0]
                    args: tuple[Any, ...] = (value.node, axis, self.sizes[axis], placement.index, rows)
                else:
                    assert isinstance(placement, Shard)
                    args = (value.node, axis, self.sizes[axis], placement.dim)
                op = "broadcast" if isinstance(placement, Owned) else "all_gather"
                node = self.insert(op, args, value.node, True)
                node.meta["traffic"] = "payload"
                self.converted[key] = Value(node, node.meta["layout"])
            value = self.converted[key]
            self.request(value.node, module)
        return value

    def _edge(self, module: str, port: str, value: Value, origin: fx.Node) -> None:
        given = origin.args[0] if origin.target is operator.getitem else origin
        if given.op != "placeholder" and module not in CONTAINERS:
            self.edges.setdefault(Boundary(module, port, value.node.name))


def _beside(parameter: Tensor, weight: Tensor, placements: Mapping[str, Placement]) -> dict[str, Placement]:
    """Placement of a scale or offset beside a quantised weight. Only the weight itself is layer-sharded."""
    own, words = parameter.symbols, weight.symbols  # type: ignore[attr-defined]
    split = {a: words[p.dim] for a, p in placements.items() if isinstance(p, Shard)}
    return {a: Shard(own.index(word)) for a, word in split.items() if word in own}


def _owned(placement: Placement, size: int) -> Placement:
    """A layer's owner among `size` ranks."""
    return Owned(placement.index % size) if isinstance(placement, Owned) else placement


def _tensors(arguments: Any) -> Iterator[Value]:
    for argument in arguments:
        if isinstance(argument, Value):
            yield argument
        elif isinstance(argument, (list, tuple)):
            yield from _tensors(argument)
