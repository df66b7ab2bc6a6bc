"""Overlap: collectives that a plan starts early, and the places where their values are waited for.

A rank graph's order is the order in which a rank works. A collective whose row names a `start` moves in front of that
module, with all that it needs, and a `wait` op stands before the first use of its value.
"""

from collections.abc import Iterable

import torch
from torch import fx

from emulator.errors import UsageError
from emulator.layout.plan import layer_of, module_pattern
from emulator.layout.rank_graph import Boundary, RankGraph, behind_moves
from emulator.ops.registry import op_name
from emulator.ops.transition import COLLECTIVES, TRANSITIONS


def start_early(rank_graph: RankGraph, edges: Iterable[Boundary]) -> dict[Boundary, None]:
    """Moves the collectives that the plan starts early, in place, and adds their waits. meta["async"] of such a
    collective: name of its wait, None where only the next step uses it. Returns the edges, at the wait where the value
    is handed on.

    Raises UsageError where a collective would start before what it needs.
    """
    renamed: dict[str, str] = {}
    for node in list(rank_graph.graph.nodes):
        if op_name(node.target) not in COLLECTIVES:
            continue
        start = rank_graph.plan.start_of(node.meta["module"])
        if start is not None and not _leaves(node):
            wait = _start(rank_graph, node, *start)
            if wait is not None:
                renamed[node.name] = wait.name
    return {Boundary(e.module, e.port, renamed.get(e.node, e.node)): None for e in edges}


def _leaves(node: fx.Node) -> bool:
    """Whether it moves what its module has computed, not what the module is given."""
    source = behind_moves(node)
    return source.op == "call_function" and (source.meta["module"] + ".").startswith(node.meta["module"] + ".")


def _start(rank_graph: RankGraph, node: fx.Node, pattern: str, ahead: int) -> fx.Node | None:
    """The wait for the node's value, or None where only the next step uses it."""
    graph, module = rank_graph.graph, node.meta["module"]
    layer = layer_of(module)
    if layer is None:
        raise UsageError(f"plan {rank_graph.plan.name}: {module} is in no layer, so nothing starts early there")
    layers = 1 + max(found for n in graph.nodes if (found := layer_of(n.meta.get("module", ""))) is not None)
    point = _first_of(graph, pattern, (layer - ahead) % layers)
    if point is None:
        where = f"layer {(layer - ahead) % layers}"
        raise UsageError(f"plan {rank_graph.plan.name}: {module} starts before {pattern}, but {where} has no such op")
    _move_before(point, node, rank_graph.plan.name)
    if not node.users:
        node.meta["async"] = None
        return None
    order = {n: i for i, n in enumerate(graph.nodes)}
    with graph.inserting_before(min(node.users, key=order.__getitem__)):
        wait = graph.call_function(torch.ops.emulator.wait, (node,))
    wait.meta.update(node.meta)
    node.replace_all_uses_with(wait, delete_user_cb=lambda user: user is not wait)
    node.meta["async"] = wait.name
    return wait


def _first_of(graph: fx.Graph, pattern: str, layer: int) -> fx.Node | None:
    """The first node that computes something in the module."""
    for node in graph.nodes:
        module = node.meta.get("module", "")
        if node.op != "call_function" or layer_of(module) != layer or op_name(node.target) in TRANSITIONS:
            continue
        if (module_pattern(module) + ".").startswith(pattern + "."):
            return node
    return None


def _move_before(point: fx.Node, node: fx.Node, plan: str) -> None:
    """Moves a node, and what it needs of the nodes behind `point`, in front of it."""
    behind: list[fx.Node] = []
    following = point
    while following is not node and following.op != "output":
        behind.append(following)
        following = following.next
    if following is not node:  # it stands before the point: it starts there, unless it is needed earlier
        if all(user in behind for user in node.users):
            point.prepend(node)
        return
    needed = {node}
    for candidate in reversed(behind):
        if any(user in needed for user in candidate.users):
            needed.add(candidate)
    if point in needed:
        what = f"the {op_name(node.target)} of {node.meta['module']}"
        raise UsageError(f"plan {plan}: {what} cannot start before {point.meta['module']}, whose result it needs")
    for moved in [n for n in behind if n in needed] + [node]:
        point.prepend(moved)
