"""Decoder layers of a rank graph: which nodes are whose, and what a layer does apart from its number."""

import operator
import re
from collections import defaultdict
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from emulator.layout.rank_graph import Boundary, RankGraph
from emulator.passes.effects import communicates, written

_LAYER = re.compile(r"(?<![^.])layers\.(\d+)(?![^.])")
_BEFORE = -1


def layer_of(name: str) -> int | None:
    """Number of the decoder layer that a module or weight belongs to."""
    match = _LAYER.search(name)
    return int(match[1]) if match else None


def shifted(name: str, by: int) -> str:
    """The module or weight of the same name `by` layers on: model.layers.3.mlp by 2 is model.layers.5.mlp."""
    return _LAYER.sub(lambda match: f"layers.{int(match[1]) + by}", name, count=1)


def is_cache_index(node: fx.Node) -> bool:
    """Whether a node takes one layer's cache out of the list of caches, by number."""
    source = node.args[0] if node.target is operator.getitem else None
    return isinstance(source, fx.Node) and source.op == "placeholder" and source.meta["layout"].kind == "cache"


@dataclass
class Layer:
    """One decoder layer. outside: values it takes from elsewhere, in order of first use. leaving: indices of its nodes
    that others use; used_by: the layers that do (None: what comes after the layers). pattern: equal for layers that do
    the same with their outside values."""

    number: int
    nodes: list[fx.Node] = field(default_factory=list)
    boundaries: list[Boundary] = field(default_factory=list)
    outside: list[fx.Node] = field(default_factory=list)
    leaving: list[int] = field(default_factory=list)
    used_by: set[int | None] = field(default_factory=set)
    pattern: Hashable = None


@dataclass
class Layers:
    """A rank graph in order: what comes before the decoder layers, the layers, what comes after them.

    boundaries: those of modules outside the layers.
    """

    before: list[fx.Node]
    layers: list[Layer]
    after: list[fx.Node]
    boundaries: list[Boundary]


def split_layers(rank_graph: RankGraph) -> Layers:
    """The graph by layers. Taking them one after the other keeps every operand before its use, and the order of nodes
    that communicate or write."""
    place = _places(rank_graph.graph)
    layers: dict[int, Layer] = {}
    parts = Layers([], [], [], [])
    for node, number in place.items():
        if number is None:
            parts.after.append(node)
        elif number == _BEFORE:
            parts.before.append(node)
        else:
            layers.setdefault(number, Layer(number)).nodes.append(node)
    parts.layers = [layers[number] for number in sorted(layers)]
    used: dict[fx.Node, set[int | None]] = defaultdict(set)
    for node in place:
        for operand in node.all_input_nodes:
            used[operand].add(place[node])
    named = {node.name: node for node in place}
    for boundary in rank_graph.boundaries:
        number = layer_of(boundary.module)
        used[named[boundary.node]].add(number)
        (layers[number].boundaries if number in layers else parts.boundaries).append(boundary)
    for layer in parts.layers:
        layer.leaving = [i for i, node in enumerate(layer.nodes) if used[node] - {layer.number}]
        layer.used_by = {number for node in layer.nodes for number in used[node]} - {layer.number}
        _describe(layer, named)
    return parts


def _places(graph: fx.Graph) -> dict[fx.Node, int | None]:
    """Node -> layer number, _BEFORE, or None for what comes after the layers; in graph order.

    A node stands in the layer of its module, but never before its operands, nor before an earlier node that
    communicates or writes if it does so itself. A multi-token-prediction layer, which has an eh_proj, comes after them.
    """
    nodes = list(graph.nodes)
    own = {node: layer_of(node.meta.get("module", "")) for node in nodes}
    mtp = {own[node] for node in nodes if node.meta.get("module", "").endswith(".eh_proj")}
    own = {node: None if number in mtp else number for node, number in own.items()}
    last = max((i for i, node in enumerate(nodes) if own[node] is not None), default=-1)
    place: dict[fx.Node, int | None] = {}
    floor: int | None = _BEFORE
    for i, node in enumerate(nodes):
        number = own[node]
        acts = communicates(node) or bool(written(node))
        least = [place[n] for n in node.all_input_nodes] + ([floor] if acts else [])
        if (number is None and i > last) or None in least:
            place[node] = None
        else:
            place[node] = max([_BEFORE if number is None else number, *(n for n in least if n is not None)])
        floor = place[node] if acts else floor
    return place


def _describe(layer: Layer, named: dict[str, fx.Node]) -> None:
    """Sets `outside` and `pattern`."""
    here = {node: i for i, node in enumerate(layer.nodes)}
    outside: dict[fx.Node, int] = {}

    def frozen(value: Any) -> Any:
        if isinstance(value, fx.Node):
            if value in here:
                return ("here", here[value])
            return ("outside", outside.setdefault(value, len(outside)), value.meta["layout"])
        if isinstance(value, (list, tuple)):
            return tuple(frozen(v) for v in value)
        if isinstance(value, dict):
            return tuple((k, frozen(v)) for k, v in value.items())
        return (value.start, value.stop, value.step) if isinstance(value, slice) else value

    def described(node: fx.Node) -> Hashable:
        target: Any = shifted(node.target, -layer.number) if isinstance(node.target, str) else node.target
        args = (node.args[0], node.args[1] - layer.number) if is_cache_index(node) else node.args  # type: ignore[operator]
        meta = node.meta
        kept = (meta["layout"], meta.get("traffic"), bool(meta.get("padded")), meta.get("origin") is None)
        module = shifted(meta.get("module", ""), -layer.number)
        return (node.op, target, frozen(args), frozen(node.kwargs), module, kept)

    nodes = tuple(described(node) for node in layer.nodes)
    edges = [(shifted(b.module, -layer.number), b.port, named[b.node]) for b in layer.boundaries]
    edges.sort(key=lambda edge: edge[:2])
    layer.pattern = (nodes, tuple((module, port, frozen(node)) for module, port, node in edges))
    layer.outside = list(outside)
