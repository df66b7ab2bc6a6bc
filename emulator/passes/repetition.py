"""Repetition: equal decoder layers as one representative with a repeat count, and back.

A folded graph holds, for each run of equal layers, the first of them between region_begin and region_end, and one
copy_region for each other (emulator/ops/region.py). Layouts, shapes, communication and values are those of the graph
with all its layers, which `expand` gives back.
"""

import operator
from collections import ChainMap
from collections.abc import MutableMapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from emulator.errors import UsageError
from emulator.layout.rank_graph import Boundary, RankGraph, in_order
from emulator.ops.region import MARKERS
from emulator.ops.registry import op_name
from emulator.passes.layers import Layer, is_cache_index, layer_of, shifted, split_layers

ops = torch.ops.emulator


def fold(rank_graph: RankGraph) -> RankGraph:
    """The graph with one representative for each run of consecutive decoder layers that do the same.

    Layers are equal when nodes, layouts and boundaries are, up to the layer number in modules, weights and the lists of
    caches, and up to the values that one layer hands to the next. A layer whose values are used further on than in the
    next layer ends its run. Single layers stay as they are.
    """
    full = expand(rank_graph)
    parts = split_layers(full)
    folding = _Folding(full)
    folding.keep(parts.before)
    for run in _runs(parts.layers):
        folding.add(run)
    folding.keep(parts.after)
    folding.edges += [(b, folding.env) for b in parts.boundaries]
    return folding.result()


@dataclass
class _Run:
    """carried: index of an outside value -> index of the node of the previous layer that it is. origins: of each other
    layer, what stands there for an origin of the first."""

    layers: list[Layer]
    carried: dict[int, int] = field(default_factory=dict)
    origins: list[dict[str, str]] = field(default_factory=list)


def _runs(layers: list[Layer]) -> list[_Run]:
    runs: list[_Run] = []
    for layer in layers:
        if not runs or not _extends(runs[-1], layer):
            runs.append(_Run([layer]))
    return runs


def _extends(run: _Run, layer: Layer) -> bool:
    """Adds a layer to a run that it continues."""
    first, previous = run.layers[0], run.layers[-1]
    if layer.pattern != first.pattern or previous.used_by - {layer.number}:
        return False
    at = {node: i for i, node in enumerate(previous.nodes)}
    carried = {}
    for i, (earlier, later) in enumerate(zip(previous.outside, layer.outside)):
        if later in at:
            carried[i] = at[later]
        elif later is not earlier:
            return False
    origins: dict[str, str] = {}
    for mine, theirs in zip([*first.nodes, *first.outside], [*layer.nodes, *layer.outside]):
        before, after = mine.meta.get("origin"), theirs.meta.get("origin")
        if before is not None and after is not None and origins.setdefault(before, after) != after:
            return False
    if len(run.layers) > 1 and carried != run.carried:
        return False
    run.layers.append(layer)
    run.carried = carried
    run.origins.append(origins)
    return True


class _Folding:
    def __init__(self, full: RankGraph):
        self.full, self.graph = full, fx.Graph()
        self.env: dict[fx.Node, fx.Node] = {}
        self.edges: list[tuple[Boundary, MutableMapping[fx.Node, fx.Node]]] = []

    def keep(self, nodes: list[fx.Node]) -> None:
        for node in nodes:
            self.env[node] = self._copy(node, self.env)

    def add(self, run: _Run) -> None:
        first, last = run.layers[0], run.layers[-1]
        if first is last:
            self.keep(first.nodes)
            self.edges += [(b, self.env) for b in first.boundaries]
            return
        inputs = [first.outside[i] for i in run.carried]
        begin = self._marker(ops.region_begin, [self.env[n] for n in inputs], first.number, len(run.layers))
        inside = ChainMap({value: self._item(begin, i, value, "carried") for i, value in enumerate(inputs)}, self.env)
        for node in first.nodes:
            inside[node] = self._copy(node, inside)
        ends = list(run.carried.values())
        ends += [i for i in last.leaving if i not in ends]
        state = self._marker(ops.region_end, [inside[first.nodes[i]] for i in ends])
        layouts = state.meta["layout"]
        for layer, origins in zip(run.layers[1:], run.origins):
            state = self._marker(ops.copy_region, state, layer.number)
            names = zip([*first.nodes, *first.outside], [*layer.nodes, *layer.outside])
            state.meta.update(layout=layouts, origins=origins, names={a.name: b.name for a, b in names})
        for i in last.leaving:
            self.env[last.nodes[i]] = self._item(state, ends.index(i), last.nodes[i], "left")
        self.edges += [(b, inside) for b in first.boundaries]

    def _copy(self, node: fx.Node, env: MutableMapping[fx.Node, fx.Node]) -> fx.Node:
        args, kwargs = fx.map_arg((node.args, node.kwargs), env.__getitem__)
        new = self.graph.create_node(node.op, node.target, args, kwargs, node.name, node.type)
        new.meta = dict(node.meta)
        return new

    def _marker(self, target: Any, values: Any, *numbers: int) -> fx.Node:
        node = self.graph.call_function(target, (values, *numbers))
        layouts = tuple(v.meta["layout"] for v in values) if isinstance(values, list) else ()
        node.meta.update(module="", layout=layouts, origin=None, traffic="payload")
        return node

    def _item(self, marker: fx.Node, index: int, value: fx.Node, name: str) -> fx.Node:
        node = self.graph.create_node("call_function", operator.getitem, (marker, index), {}, name)
        node.meta = dict(value.meta, module="")
        return node

    def result(self) -> RankGraph:
        named = {node.name: node for node in self.full.graph.nodes}
        edges = [replace(b, node=env[named[b.node]].name) for b, env in self.edges]
        return replace(self.full, graph=self.graph, boundaries=in_order(edges, self.graph))


def expand(rank_graph: RankGraph) -> RankGraph:
    """The graph with every layer, in place of regions and their copies; a graph without regions as it is.

    Nodes of a copy get its layer's number in module and weight names and in the lists of caches, and where `fold` made
    the copy, the names and origins that they had before. Raises UsageError for markers that do not fit together.
    """
    if not any(op_name(node.target) in MARKERS for node in rank_graph.graph.nodes):
        return rank_graph
    return _Expansion(rank_graph).run()


@dataclass
class _Region:
    """body: nodes between the markers. layers: for the representative and each copy, how many layers on it is, and
    what its nodes are."""

    begin: fx.Node
    layer: int
    repeat: int
    end: fx.Node | None = None
    body: list[fx.Node] = field(default_factory=list)
    layers: list[tuple[int, MutableMapping[fx.Node, Any]]] = field(default_factory=list)


class _Expansion:
    def __init__(self, folded: RankGraph):
        self.folded, self.graph = folded, fx.Graph()
        self.env: dict[fx.Node, Any] = {}  # node -> node; marker -> list of nodes
        self.regions: list[_Region] = []
        self.ended: dict[fx.Node, _Region] = {}  # region_end and copy_region -> its region

    def run(self) -> RankGraph:
        open_region: _Region | None = None
        for node in self.folded.graph.nodes:
            name = op_name(node.target)
            if name == "region_begin":
                if open_region:
                    raise UsageError(f"{node.name} stands inside the region of {open_region.begin.name}: no nesting")
                values, layer, repeat = node.args
                open_region = _Region(node, layer, repeat)
                open_region.layers.append(
                    (0, ChainMap({node: [self._of(v, self.env, node) for v in values]}, self.env))
                )
                self.regions.append(open_region)
            elif name == "region_end":
                if open_region is None:
                    raise UsageError(f"{node.name} ends no region: region_begin is missing")
                open_region.end = node
                self._leave(node, open_region)
                open_region = None
            elif name == "copy_region":
                self._copy(node)
            else:
                env = open_region.layers[0][1] if open_region else self.env
                if open_region:
                    open_region.body.append(node)
                self._emit(node, env, 0, node.name, node.meta)
        for region in self.regions:
            if region.end is None:
                raise UsageError(f"{region.begin.name} opens a region that no region_end ends")
            if region.repeat != len(region.layers):
                raise UsageError(
                    f"{region.begin.name} says repeat {region.repeat}, but its layer and copies are "
                    f"{len(region.layers)}"
                )
        return replace(self.folded, graph=self.graph, boundaries=self._boundaries())

    def _leave(self, marker: fx.Node, region: _Region) -> None:
        """The values that a layer of a region ends with, under the marker that stands behind it."""
        assert region.end is not None
        env = region.layers[-1][1]
        self.env[marker] = [self._of(value, env, region.end) for value in region.end.args[0]]  # type: ignore[union-attr]
        self.ended[marker] = region
        if len(self.env[marker]) < len(env[region.begin]):
            taken, given = len(env[region.begin]), len(self.env[marker])
            raise UsageError(f"{region.begin.name} takes {taken} values, but {region.end.name} hands on {given}")

    def _copy(self, node: fx.Node) -> None:
        state, layer = node.args
        region = self.ended.get(state)  # type: ignore[arg-type]
        if region is None:
            raise UsageError(f"{node.name} copies {state}: it takes what region_end or another copy_region gives")
        carried = self.env[state][: len(region.layers[0][1][region.begin])]  # type: ignore[index]
        env = ChainMap({region.begin: carried}, self.env)
        by = layer - region.layer  # type: ignore[operator]
        names, origins = node.meta.get("names", {}), node.meta.get("origins", {})
        for inner in region.body:
            meta = dict(inner.meta, module=shifted(inner.meta.get("module", ""), by))
            for key in ("origin", "moved"):
                if key in meta:
                    meta[key] = origins.get(meta[key])
            if "moves" in meta:
                meta["moves"] = names.get(meta["moves"], meta["moves"])
            self._emit(inner, env, by, names.get(inner.name), meta)
        region.layers.append((by, env))
        self._leave(node, region)

    def _emit(
        self, node: fx.Node, env: MutableMapping[fx.Node, Any], by: int, name: str | None, meta: dict[str, Any]
    ) -> None:
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: self._of(n, env, node))
        if node.target is operator.getitem and isinstance(args[0], list):
            env[node] = args[0][args[1]]
            return
        if is_cache_index(node):
            args = (args[0], args[1] + by)
        target = shifted(node.target, by) if node.op == "get_attr" else node.target
        env[node] = self.graph.create_node(node.op, target, args, kwargs, name, node.type)
        env[node].meta = dict(meta)

    def _of(self, node: fx.Node, env: MutableMapping[fx.Node, Any], user: fx.Node) -> Any:
        if node not in env:
            raise UsageError(f"{user.name} uses {node.name} from inside a region: values leave it through region_end")
        return env[node]

    def _boundaries(self) -> list[Boundary]:
        named = {node.name: node for node in self.folded.graph.nodes}
        inside = {node: region for region in self.regions for node in region.body}
        of_layer = {region.layer: region for region in self.regions}
        edges = []
        for boundary in self.folded.boundaries:
            node = named[boundary.node]
            region = inside.get(node) or of_layer.get(layer_of(boundary.module))  # type: ignore[arg-type]
            for by, env in region.layers if region else [(0, self.env)]:
                edges.append(Boundary(shifted(boundary.module, by), boundary.port, env[node].name))
        return in_order(edges, self.graph)
