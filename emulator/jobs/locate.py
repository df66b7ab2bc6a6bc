"""From a wrong boundary to the first wrong node: a second run keeps every value between the last right boundaries and
the wrong one, on all ranks; the first node whose inputs are right and whose output is not is diagnosed."""

import math
import operator
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from emulator.jobs.prepare import Prepared, reference_of
from emulator.jobs.rank import Retrace, retrace_on_rank
from emulator.layout.plan import layer_of, module_pattern
from emulator.layout.rank_graph import RankGraph
from emulator.model.program import Program
from emulator.ops.foreign import function_name
from emulator.runtime.mesh import Mesh
from emulator.runtime.world import World
from emulator.verify.blame import Blame, Captured, Witnesses, suspects, value_origin
from emulator.verify.choices import choices_of
from emulator.verify.diagnosis import diagnose
from emulator.verify.expected import Expectation, Peer, group_rows_of
from emulator.verify.reference import Tolerance
from emulator.verify.scene import Diagnosis, Scene


@dataclass(frozen=True)
class Case:
    """What was run: graphs, ranks and weights; names whose reference values the run had; and how to run it again.

    reference_of(names): reference values of Program nodes, with tolerances. capture(names): by rank, values and token
    ids of rank-graph nodes. mesh: of the ranks that run this graph, those of one dp rank.
    """

    program: Program
    rank_graph: RankGraph
    mesh: Mesh
    weights: Mapping[str, Tensor]
    known: Collection[str]
    reference_of: Callable[[set[str]], tuple[Mapping[str, Tensor], Tolerance]]
    capture: Callable[[frozenset[str]], list[Captured]]


def case_of(prepared: Prepared, step: int, dp: int) -> Case:
    """One dp rank's part of a step."""
    whole, part = prepared.mesh, prepared.schedule[step][dp]
    ranks = [r for r in range(whole.size) if whole.index("dp", r) == dp]
    mesh = whole if whole.dp == 1 else Mesh(tp=whole.tp, ep=math.gcd(whole.ep, whole.tp))

    def capture(names: frozenset[str]) -> list[Captured]:
        world = World(whole, timeout=prepared.scenario.timeout)
        found: list[Retrace] = world.run(retrace_on_rank, prepared, step, names)
        return [found[rank].captured for rank in ranks]

    return Case(
        prepared.program, part.rank_graph, mesh, prepared.weights, set(part.reference),
        lambda names: reference_of(part, names), capture,
    )  # fmt: skip


def locate_failure(prepared: Prepared, failures: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The culprit of the first step that went wrong, on the dp rank where it did. failures: as verdict.failures_of."""
    if not failures:
        return None
    step = min(f["step"] for f in failures)
    first = min((f for f in failures if f["step"] == step), key=lambda f: (f["order"], f["rank"]))
    dp = prepared.mesh.index("dp", first["rank"])
    here = [f for f in failures if f["step"] == step and prepared.mesh.index("dp", f["rank"]) == dp]
    found = locate(case_of(prepared, step, dp), here)
    return {**found, "step": step, "dp": dp} if found is not None else None


def locate_crash(prepared: Prepared) -> dict[str, Any] | None:
    """The culprit of a run in which a node raised: the first wrong value before it, or the node itself. None where no
    rank raises again, or nothing explains it: then the error says more."""
    last = len(prepared.schedule) - 1
    world = World(prepared.mesh, timeout=prepared.scenario.timeout)
    traces: list[Retrace] = world.run(retrace_on_rank, prepared, last, frozenset())
    raised = [(rank, t) for rank, t in enumerate(traces) if t.raised]
    if not raised:
        return None
    step = raised[0][1].step
    wrong = [{**f, "step": step} for t in traces if t.step == step for f in t.failures]
    if wrong:
        return locate_failure(prepared, wrong)
    dp = prepared.mesh.index("dp", raised[0][0])
    case = case_of(prepared, step, dp)
    node = next(n for n in case.rank_graph.graph.nodes if n.name == raised[0][1].raised)
    if node.op != "call_function":
        return None
    found = _of_raised(case, node)
    return {**found, "step": step, "dp": dp} if found["kind"] != "unknown" else None


def _of_raised(case: Case, node: fx.Node) -> dict[str, Any]:
    """A node that does not run on its operands: it has no value on any rank."""
    ranks = list(range(case.mesh.size))
    value = next((u for u in node.users if u.target is operator.getitem), node)
    witnesses = _hear(case, [node, value])
    if value_origin(value) not in witnesses.reference:
        return _culprit(node, ranks, Diagnosis("unknown", "the node does not run on its operands", {}))
    scene = _scene(case, Blame(node, 0, ranks, value), witnesses)
    return _culprit(node, ranks, diagnose(replace(scene, found=[torch.empty(0)] * len(ranks))))


def locate(case: Case, failures: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The culprit of a run with wrong values: {node, op, module, layer, ranks, kind, text, holds}; None if none shows.

    failures: of the value check, all ranks. Runs the ranks once more, and the reference once more for the values of the
    suspects only: the nodes between the first wrong boundary and the right ones before it.
    """
    if not failures:
        return None
    first = min(failures, key=lambda f: (f["order"], f["rank"]))
    nodes = {node.name: node for node in case.rank_graph.graph.nodes}
    accused = suspects(nodes[first["node"]], _right(case, {f["node"] for f in failures}))
    witnesses = _hear(case, accused)
    blame = witnesses.first_wrong(accused)
    if blame is None:  # every value is right, as far as they can be compared: what is wrong is whose tokens they are
        misplaced = witnesses.first_misplaced(accused)
        if misplaced is not None:
            node, ranks, text = misplaced
            return _culprit(node, ranks, Diagnosis("window_shift", text, {}))
        ranks = sorted({f["rank"] for f in failures if f["node"] == first["node"]})
        return _culprit(nodes[first["node"]], ranks, Diagnosis("mixed_tokens", first["detail"], {}))
    return _culprit(blame.node, blame.wrong, diagnose(_scene(case, blame, witnesses)))


def _culprit(node: fx.Node, ranks: list[int], diagnosis: Diagnosis) -> dict[str, Any]:
    module = node.meta["module"]
    return {
        "node": node.name, "op": function_name(node), "module": module, "layer": layer_of(module), "ranks": ranks,
        "kind": diagnosis.kind, "text": diagnosis.text, "holds": diagnosis.holds,
    }  # fmt: skip


def _right(case: Case, wrong: set[str]) -> set[str]:
    """Boundary nodes whose value was compared on every rank and found right. A partial sum is not compared."""
    edges = {b.node for b in case.rank_graph.boundaries} - wrong
    return {
        n.name for n in case.rank_graph.graph.nodes
        if n.name in edges and n.meta["origin"] in case.known and "partial" not in str(n.meta["layout"])
    }  # fmt: skip


def _hear(case: Case, nodes: list[fx.Node]) -> Witnesses:
    mesh, tokens = case.mesh, case.rank_graph.tokens
    reference, tolerance = case.reference_of({o for o in map(value_origin, nodes) if o})
    captured = case.capture(frozenset(n.name for node in nodes for n in (node, *node.all_input_nodes)))
    peers, group_rows = [Peer(tokens, reference)], group_rows_of(case.rank_graph.graph)
    expectations = [Expectation(case.program, mesh, rank, peers, group_rows) for rank in range(mesh.size)]
    return Witnesses(mesh, tokens, captured, expectations, reference, tolerance, choices_of(case.program.graph))


def _scene(case: Case, blame: Blame, witnesses: Witnesses) -> Scene:
    origin = value_origin(blame.value)
    assert origin is not None
    return Scene(
        node=blame.node,
        mesh=case.mesh,
        tokens=case.rank_graph.tokens,
        found=witnesses.values(blame.value),
        expected=witnesses.expected(blame.value),
        reference=witnesses.reference[origin],
        operands=_operands(blame.node, witnesses),
        ids=witnesses.ids(blame.value),
        wrong=blame.wrong,
        tolerance=witnesses.tolerance.absolute[origin],
        weights=case.weights,
        related=_related(case, origin),
        output=blame.output,
    )


def _operands(node: fx.Node, witnesses: Witnesses) -> list[list[Any]]:
    """By rank: the values of the node's arguments."""
    return [
        list(fx.map_arg(node.args, lambda n, kept=kept: kept[n.name][0] if n.name in kept else None))
        for kept in witnesses.captured
    ]


def _related(case: Case, origin: str) -> dict[str, Tensor]:
    """Whole values that may stand in this one's place: the same value in other layers, and the node's operands."""
    node = next(n for n in case.program.graph.nodes if n.name == origin)
    alike = [n for n in case.program.graph.nodes if _kind(n) == _kind(node)]
    in_layer: dict[int | None, list[fx.Node]] = {}
    for other in alike:
        in_layer.setdefault(layer_of(other.meta["module"]), []).append(other)
    place = in_layer[layer_of(node.meta["module"])].index(node)
    names = {
        others[place].name: f"layer {layer}'s value"
        for layer, others in in_layer.items()
        if len(others) > place and others[place] is not node
    }
    maker = node.args[0] if node.target is operator.getitem else node
    assert isinstance(maker, fx.Node)
    names |= {
        o.name: f"{function_name(o)} of {o.meta['module']}" for o in maker.all_input_nodes if o.op == "call_function"
    }
    reference, _ = case.reference_of(set(names))
    return {text: reference[name] for name, text in names.items() if name in reference}


def _kind(node: fx.Node) -> tuple[Any, str]:
    return node.target, module_pattern(node.meta["module"])
