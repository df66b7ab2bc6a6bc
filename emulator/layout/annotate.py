"""A graph that a pass wrote or changed becomes a rank graph again: modules, origins, layouts and boundaries."""

import operator
from collections.abc import Iterable

from torch import fx

from emulator.layout.placement import Layout
from emulator.layout.propagation import propagate
from emulator.layout.rank_graph import Boundary, RankGraph, in_order
from emulator.ops.registry import op_name
from emulator.ops.transition import TRANSITIONS

_REDUCTIONS = ("all_reduce", "reduce_scatter")
CONTAINERS = ("", "model", "model.layers")


def annotate(graph: fx.Graph, like: RankGraph) -> RankGraph:
    """The rank graph of `graph`, with the sizes, tokens and plan of `like`; `violations` lists all broken rules.

    Nodes keep their meta (a pass that copies nodes or edits in place keeps it). A new transition gets the module of the
    value it completes or of the consumers it serves, and holds its operand's value; another new node holds no known
    value, so it is not compared.
    """
    found = RankGraph(graph, like.sizes, like.tokens, like.plan)
    for node in graph.nodes:
        node.meta.setdefault("traffic", "payload")
    found.violations = propagate(found)
    for node in graph.nodes:
        _set_origin(node)
    for node in reversed(graph.nodes):  # a transition serves consumers, which may be transitions that serve others
        if "module" not in node.meta:
            node.meta["module"] = _module(node)
    found.boundaries = boundaries(graph)
    return found


def _set_origin(node: fx.Node) -> None:
    """A transition moves a value but does not change it; while padding is among its rows it is not the value itself."""
    if op_name(node.target) in TRANSITIONS and isinstance(node.args[0], fx.Node):
        source = node.args[0]
        node.meta["moved"] = source.meta.get("moved") or source.meta.get("origin")
        node.meta["origin"] = None if node.meta["padded"] else node.meta["moved"]
    node.meta.setdefault("origin", None)


def _module(node: fx.Node) -> str:
    """Of a new node: a transition's by what it serves; another's by its weights, else by its first user."""
    if node.op == "output":
        return ""
    operands = [n.meta.get("module", "") for n in node.all_input_nodes]
    served = [user.meta["module"] for user in node.users if user.op != "output"]
    name = op_name(node.target)
    if name in _REDUCTIONS or not served:
        return operands[0] if operands else ""
    if name in TRANSITIONS:
        return common_ancestor(served)
    weights = [n.meta["module"] for n in node.all_input_nodes if n.op == "get_attr"]
    return (weights or served)[0]


def boundaries(graph: fx.Graph) -> list[Boundary]:
    """Every value that crosses a module's edge, read from the graph alone.

    Between producer and consumer stand transitions; each belongs to the module that it names: to the outputs of a
    module that the value leaves, or to the inputs of one that it enters.
    """
    edges: dict[Boundary, None] = {}
    for node in graph.nodes:
        if node.op not in ("call_function", "output"):
            continue
        if op_name(node.target) in TRANSITIONS or node.target is operator.getitem:
            continue
        for operand in node.all_input_nodes:
            for module, port, at in _edges(operand, node):
                edges.setdefault(Boundary(module, port, at.name))
    return in_order(edges, graph)


def _edges(operand: fx.Node, consumer: fx.Node) -> Iterable[tuple[str, str, fx.Node]]:
    chain = [operand]  # from the producer's own output to what the consumer takes
    while op_name(chain[0].target) in TRANSITIONS:
        chain.insert(0, chain[0].args[0])
    value = chain.pop(0)
    given = value.args[0] if value.target is operator.getitem else value
    layout = value.meta["layout"]
    if given.op != "call_function" or not isinstance(layout, Layout) or layout.kind in ("weight", "batch"):
        return
    produced, consumed = given.meta["module"], consumer.meta["module"]
    index = value.args[1] if value.target is operator.getitem else 0
    at = value
    for module in left(produced, consumed):
        while chain and chain[0].meta["module"] == module:
            at = chain.pop(0)
        if module not in CONTAINERS:
            yield module, f"output{index or ''}", at
    for module in reversed(left(consumed, produced)):
        while chain and chain[0].meta["module"] == module:
            at = chain.pop(0)
        if module not in CONTAINERS:
            yield module, "input", at


def left(module: str, other: str) -> list[str]:
    """Modules that contain `module` but not `other`, inner first."""
    found = []
    while module and not (other == module or other.startswith(module + ".")):
        found.append(module)
        module = module.rpartition(".")[0]
    return found


def common_ancestor(modules: list[str]) -> str:
    """The innermost module that contains them all; "" for none."""
    shared = []
    for parts in zip(*[m.split(".") for m in modules]):
        if len(set(parts)) > 1:
            break
        shared.append(parts[0])
    return ".".join(shared)
