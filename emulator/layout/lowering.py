"""Lowering: Program + plan + parallel sizes -> the one SPMD graph that every rank runs.

A transition is inserted where the layout a value has differs from the layout its consumer wants, and is shared by all
consumers that want the same. Nothing else creates a collective.
"""

import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import fx
from torch.distributed.tensor.placement_types import Placement, Shard
from torch.fx.node import map_aggregate

from emulator.errors import LayoutError, UsageError
from emulator.layout.annotate import CONTAINERS, common_ancestor, left
from emulator.layout.placement import Kind, Layout, Tokens, placement_word
from emulator.layout.plan import Plan
from emulator.layout.propagation import infer
from emulator.layout.rank_graph import Boundary, RankGraph
from emulator.layout.transitions import insert_transition, transition_steps
from emulator.model.program import Program
from emulator.ops.registry import LOCAL, PARTIAL, R, op_name

INPUT_KINDS: dict[str, Kind] = {
    "input_ids": "token",
    "positions": "token",
    "slots": "token",
    "token_mask": "token",
    "query_lens": "batch",
    "kv_lens": "batch",
    "block_table": "batch",
    "latent_caches": "cache",
    "index_caches": "cache",
}


@dataclass(frozen=True)
class _Value:
    """A value on its way: node in the rank graph, its layout(s), and for dispatched rows the Program's dispatch."""

    node: fx.Node
    layout: Any
    dispatch: fx.Node | None = None


def lower(program: Program, plan: Plan, sizes: Mapping[str, int], tokens: Tokens | int) -> RankGraph:
    """The rank graph of a Program under a plan. sizes: lengths of the mesh axes tp and ep. tokens: how they lie over
    tp, or how many there are.

    Broken layout rules are collected in `violations`. Raises LayoutError where there is no way on, and UsageError when
    a weight does not divide.
    """
    plan.check_modules(program.modules)
    tokens = Tokens(tokens, sizes["tp"]) if isinstance(tokens, int) else tokens
    return _Lowering(program, plan, sizes, tokens).run()


class _Lowering:
    def __init__(self, program: Program, plan: Plan, sizes: Mapping[str, int], tokens: Tokens):
        self.program, self.plan, self.sizes = program, plan, sizes
        self.tokens = tokens
        self.out = RankGraph(fx.Graph(), sizes, self.tokens, plan)
        self.values: dict[fx.Node, _Value] = {}
        self.converted: dict[tuple[fx.Node, str, Placement], _Value] = {}
        self.requesters: dict[fx.Node, list[str]] = {}
        self.edges: dict[Boundary, None] = {}
        self.uneven: dict[str, str] = {}

    def run(self) -> RankGraph:
        for node in self.program.graph.nodes:
            if node.op == "placeholder":
                kind = INPUT_KINDS[node.target]
                layout = Layout(kind, (), self.tokens if kind == "token" else None)
                self._emit(node, self.out.graph.placeholder(node.target), layout)
            elif node.op == "get_attr":
                new = self.out.graph.create_node("get_attr", node.target)
                self._emit(node, new, self._weight_layout(node.target))
            elif node.op == "call_function":
                self._call(node)
            else:
                value = self._fetch(node.args[0], "")
                self.out.graph.output(value.node).meta.update(module="", layout=value.layout, origin=None)
        if self.uneven:
            found = "; ".join(f"{what} of {name}" for what, name in self.uneven.items())
            raise UsageError(f"plan {self.plan.name} splits weights that do not divide: {found}")
        for node, modules in self.requesters.items():
            node.meta["module"] = common_ancestor(modules)
        order = {node.name: i for i, node in enumerate(self.out.graph.nodes)}
        self.out.boundaries = sorted(self.edges, key=lambda b: (order[b.node], b.port != "output", -len(b.module)))
        return self.out

    def _emit(self, origin: fx.Node, node: fx.Node, layout: Any, dispatch: fx.Node | None = None) -> None:
        traffic = "metadata" if origin.op == "placeholder" else "payload"
        node.meta.update(module=origin.meta["module"], layout=layout, origin=origin.name, traffic=traffic)
        self.values[origin] = _Value(node, layout, dispatch)

    def _weight_layout(self, name: str) -> Layout:
        """Placement of a parameter. A bias follows its weight: split with the out-features, or one rank's share
        (partial) where the product is partial."""
        module, _, leaf = name.rpartition(".")
        parameter = self.program.parameters[name]
        placements = self.plan.weight_of(module)
        if leaf == "bias":
            placements = {a: PARTIAL if p == Shard(1) else p for a, p in placements.items()}
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
        return Layout("weight").placed(**{a: p for a, p in placements.items() if self.sizes[a] > 1})

    def _call(self, node: fx.Node) -> None:
        module = node.meta["module"]
        arguments = map_aggregate(node.args, lambda a: self._fetch(a, module) if isinstance(a, fx.Node) else a)
        inputs = list(_tensors(arguments))
        new = self.out.graph.call_function(
            node.target, map_aggregate(arguments, lambda a: a.node if isinstance(a, _Value) else a), node.kwargs
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

    def _fetch(self, origin: fx.Node, consumer: str) -> _Value:
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
            value = self._convert(value, self.plan.output_of(module), module)
            self._edge(module, f"output{index or ''}", value, origin)
        for module in reversed(left(consumer, producer)):
            value = self._convert(value, self.plan.input_of(module), module)
            self._edge(module, "input", value, origin)
        return value

    def _given(self, value: _Value, origin: fx.Node, consumer: str) -> _Value:
        """A graph input as the innermost module that says so wants it. Lengths follow the rows of that module."""
        modules = left(consumer, "")
        module, wanted = next(((m, w) for m in modules if (w := self.plan.input_of(m))), (consumer, None))
        if value.layout.kind != "batch":
            return self._convert(value, wanted, module)
        if wanted is None or wanted[1].get("tp") != LOCAL or self.sizes["tp"] == 1 or origin.target == "block_table":
            return value
        key = (value.node, "tp", LOCAL)
        if key not in self.converted:
            lens = [value.node]
            if origin.target == "kv_lens":
                lens.append(next(v.node for o, v in self.values.items() if o.target == "query_lens"))
            op = f"local_{origin.target}"
            node = self._insert(op, (*lens, "tp", self.sizes["tp"], self.tokens.per), value.node, True)
            self.converted[key] = _Value(node, node.meta["layout"])
        self._request(self.converted[key].node, module)
        return self.converted[key]

    def _whole_weight(self, value: _Value, module: str) -> _Value:
        """Stored shards gathered into the whole weight, once for all uses."""
        for axis, placement in value.layout.placements:
            key = (value.node, axis, R)
            if key not in self.converted:
                assert isinstance(placement, Shard)
                node = self._insert("all_gather", (value.node, axis, self.sizes[axis], placement.dim), value.node, True)
                node.meta["traffic"] = "payload"
                self.converted[key] = _Value(node, node.meta["layout"])
            value = self.converted[key]
            self._request(value.node, module)
        return value

    def _edge(self, module: str, port: str, value: _Value, origin: fx.Node) -> None:
        given = origin.args[0] if origin.target is operator.getitem else origin
        if given.op != "placeholder" and module not in CONTAINERS:
            self.edges.setdefault(Boundary(module, port, value.node.name))

    def _convert(self, value: _Value, wanted: tuple[Kind, dict[str, Placement]] | None, module: str) -> _Value:
        if wanted is None:
            return value
        if {wanted[0], value.layout.kind} == {"token", "group"}:
            return self._convert_group(value, wanted[0], module)
        if wanted[0] != value.layout.kind:
            return value
        if value.layout.kind == "rows":
            return self._convert_rows(value, wanted[1], module)
        for axis, target in wanted[1].items():
            size = self.sizes[axis]
            if size == 1 or value.layout.on(axis) == target:
                continue
            key = (value.node, axis, target)
            if key not in self.converted:
                steps = transition_steps(
                    value.layout.on(axis), target, axis, size, self.tokens.real, self.tokens.padded
                )
                if steps is None:
                    found, want = placement_word(value.layout.on(axis)), placement_word(target)
                    raise LayoutError(
                        f"plan {self.plan.name}: {module} wants {want}, but no transition leads from {found}"
                    )
                node = value.node
                for step in steps:
                    node = self._insert(step.op, (node, *step.args), value.node, step is steps[-1])
                self.converted[key] = _Value(node, value.layout.placed(**{axis: target}))
            value = self.converted[key]
            self._request(value.node, module)
        return value

    def _convert_group(self, value: _Value, kind: Kind, module: str) -> _Value:
        """Local rows to those of the whole ep group, and partial sums of these back to local rows."""
        tokens, size = self.tokens, self.sizes["ep"]
        if kind == "group":
            value = self._convert(value, ("token", {"tp": LOCAL}), module)
        if size == 1:
            return value
        key = (value.node, "ep", R if kind == "group" else LOCAL)
        if key not in self.converted:
            alone = self.sizes["tp"] == 1 and tokens.padded != tokens.real  # no tp cut has padded these rows
            node = value.node
            if kind == "group":
                if alone:
                    node = self._insert("pad", (node, 0, tokens.padded), value.node, False)
                node = self._insert("all_gather", (node, "ep", size, 0), value.node, True)
            else:
                node = self._insert("reduce_scatter", (node, "ep", size, 0), value.node, not alone)
                if alone:
                    node = self._insert("unpad", (node, 0, tokens.real), value.node, True)
            self.converted[key] = _Value(node, node.meta["layout"])
        self._request(self.converted[key].node, module)
        return self.converted[key]

    def _convert_rows(self, value: _Value, wanted: dict[str, Placement], module: str) -> _Value:
        """Dispatched rows between the ranks of their tokens and the ranks of their experts: all_to_all on ep."""
        size, target = self.sizes["ep"], wanted["ep"]
        if size == 1 or value.layout.on("ep") == target:
            return value
        key = (value.node, "ep", target)
        if key not in self.converted:
            assert value.dispatch is not None
            counts = next(u for u in value.dispatch.users if u.args[1] == 1)
            if target == LOCAL and self._dispatches_group(value.dispatch):
                return self._slice_rows(value, counts, key, module)
            if value.layout.on("tp") == R and self.sizes["tp"] > 1 and target == LOCAL:
                raise LayoutError(
                    f"plan {self.plan.name}: {module} wants expert-rows of rows that every tp rank dispatched: "
                    "each row would reach its expert tp times (allowed: dispatch on local-token)"
                )
            token_counts = self.values[counts].node
            if value.node is token_counts:
                # [1, E] -> [S, X]: how many rows each source sends to each expert held here
                node = self._insert("all_to_all", (value.node, "ep", size, 1, 0), value.node, True)
                node.meta["traffic"] = "metadata"
            else:
                expert_counts = self._convert_rows(self.values[counts], {"tp": R, "ep": LOCAL}, module).node
                send, receive = (token_counts, expert_counts) if target == LOCAL else (expert_counts, token_counts)
                node = self._insert("all_to_all_rows", (value.node, send, receive, "ep", size), value.node, True)
            self.converted[key] = _Value(node, node.meta["layout"], value.dispatch)
        self._request(self.converted[key].node, module)
        return self.converted[key]

    def _dispatches_group(self, dispatch: fx.Node) -> bool:
        rows = self.values[dispatch].node.args[0]
        return rows.meta["layout"].kind == "group"  # type: ignore[union-attr]

    def _slice_rows(self, value: _Value, counts: fx.Node, key: tuple[fx.Node, str, Placement], module: str) -> _Value:
        """Of the group's rows, which every rank dispatched, those of the experts held here: no communication."""
        size, count_node = self.sizes["ep"], self.values[counts].node
        if value.node is count_node:
            node = self._insert("slice", (value.node, "ep", size, 1), value.node, True)
            node.meta["traffic"] = "metadata"
        else:
            node = self._insert("slice_rows", (value.node, count_node, "ep", size), value.node, True)
        self.converted[key] = _Value(node, node.meta["layout"], value.dispatch)
        self._request(node, module)
        return self.converted[key]

    def _insert(self, op: str, args: tuple, source: fx.Node, holds_value: bool) -> fx.Node:
        node = insert_transition(
            self.out.graph, op, args, source, holds_value=holds_value, sizes=self.sizes, tokens=self.tokens
        )
        node.meta["moves"] = source.name
        return node

    def _request(self, node: fx.Node, module: str) -> None:
        """Notes who wanted a transition; the pad before it and the gather behind an unpad belong to the same one."""
        while "moves" in node.meta:
            self.requesters.setdefault(node, []).append(module)
            if node.args[0].name == node.meta["moves"]:
                break
            node = node.args[0]


def _tensors(arguments: Any) -> Iterator[_Value]:
    for argument in arguments:
        if isinstance(argument, _Value):
            yield argument
        elif isinstance(argument, (list, tuple)):
            yield from _tensors(argument)
