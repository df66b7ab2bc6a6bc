"""Propagation reads a graph without its plan: it must find the layouts that lowering meant, and every broken rule."""

import pytest
import torch

from emulator.layout.lowering import lower
from emulator.layout.placement import Tokens
from emulator.layout.plan import load_plan
from emulator.layout.propagation import infer, propagate
from emulator.model.config import load_config
from emulator.model.program import build_program
from emulator.ops.registry import R, op_name

PROGRAMS = {name: build_program(load_config(name)) for name in ("glm-5.1-mini", "deepseek-v3.2-mini")}


def _lowered(plan="dsa_cp", tp=4, tokens=97, model="glm-5.1-mini", **variants):
    return lower(PROGRAMS[model], load_plan(plan, variants), {"tp": tp, "ep": tp}, tokens)


@pytest.mark.parametrize("moe", ["all_to_all", "all_gather", "mc2"])
@pytest.mark.parametrize("plan", ["tp", "sp", "dsa_cp_engine"])
def test_experts_over_dp_ranks_alone(plan, moe):
    """tp 1, dp 2, ep 2: each rank dispatches its own tokens, 5 of them padded to the other dp rank's 8."""
    tokens = Tokens(5, 1, rows=8)
    graph = lower(PROGRAMS["glm-5.1-mini"], load_plan(plan, {"moe": moe}), {"tp": 1, "ep": 2}, tokens)
    assert any("ep" in n.args for n in graph.graph.nodes)
    assert propagate(graph) == []


def test_rows_dispatched_by_every_rank_are_named_with_their_axis():
    graph = _lowered("sp")
    dispatch = _node(graph, "moe_dispatch")
    for operand in dispatch.all_input_nodes:  # as if full tokens came to the experts
        operand.meta["layout"] = operand.meta["layout"].placed(tp=R)
    dispatch.meta["layout"] = tuple(layout.placed(tp=R) for layout in dispatch.meta["layout"])
    rows = next(u for u in dispatch.users if u.args[1] == 0)
    rows.meta["layout"] = dispatch.meta["layout"][0]
    [violation] = infer(_node(graph, "all_to_all_rows"), graph.sizes, graph.tokens).violations
    assert "each would reach its expert tp times" in violation.reason
    assert violation.found.endswith(" on ep")


def _node(graph, op, module=""):
    return next(n for n in graph.graph.nodes if op_name(n.target) == op and n.meta["module"].startswith(module))


@pytest.mark.parametrize("model", PROGRAMS)
@pytest.mark.parametrize("plan", ["tp", "sp", "dsa_cp"])
@pytest.mark.parametrize(("tp", "tokens"), [(4, 96), (4, 97), (4, 3), (1, 5)])
@pytest.mark.parametrize("embedding", ["row", "replicated"])
def test_a_lowered_graph_has_the_layouts_that_lowering_gave_it(model, plan, tp, tokens, embedding):
    graph = _lowered(plan, tp, tokens, model, embedding=embedding)
    meant = {n.name: str(n.meta["layout"]) for n in graph.graph.nodes}
    assert propagate(graph) == []
    assert {n.name: str(n.meta["layout"]) for n in graph.graph.nodes} == meant
    assert len(set(meant.values())) > (1 if tp == 1 else 4)


def _rewire(node, make):
    """Puts make(node) between a node and its users."""
    users = list(node.users)
    with node.graph.inserting_after(node):
        new = make(node)
    new.meta.update(module=node.meta["module"], origin=None, traffic="payload")
    for user in users:
        user.replace_input_with(node, new)
    return new


def _op(name, *args):
    return lambda node: node.graph.call_function(getattr(torch.ops.emulator, name), (node, *args))


LAYER = "model.layers.2."


@pytest.mark.parametrize(
    ("plan", "op", "module", "insert", "reason"),
    [
        ("sp", "reduce_scatter", LAYER + "self_attn.o_proj", ("all_gather", "tp", 4, 0), "padding rows"),
        ("tp", "all_reduce", LAYER + "self_attn.o_proj", ("all_reduce", "tp", 4), "4 times too large"),
        ("dsa_cp", "unpad", LAYER + "self_attn", ("all_gather", "tp", 4, 0), "grow 4 times"),
        ("dsa_cp", "slice", LAYER + "self_attn.o_proj", ("slice", "tp", 4, 0), "local-token already"),
        ("sp", "linear", LAYER + "self_attn.o_proj", ("slice", "tp", 4, 1), "which no rank completes"),
        ("dsa_cp", "moe_combine", "", ("all_reduce", "tp", 4), "rows of different tokens"),
        ("sp", "linear", LAYER + "self_attn.o_proj", ("unpad", 0, 97), "not padded"),
    ],
)
def test_an_unsound_insertion_is_named(plan, op, module, insert, reason):
    graph = _lowered(plan)
    _rewire(_node(graph, op, module), _op(*insert))
    violations = propagate(graph)
    assert any(reason in v.reason for v in violations), violations
    assert all(v.node and v.allowed for v in violations)
    assert violations[0].module.startswith(LAYER if module else "model.layers.")


def test_every_violation_is_listed():
    # every layer loses its reduction: the norm behind it must be told once in each
    graph = _lowered("tp", model="glm-5.1-mini")
    removed = [n for n in graph.graph.nodes if op_name(n.target) == "all_reduce" and "o_proj" in n.meta["module"]]
    for node in removed:
        node.replace_all_uses_with(node.args[0])
        graph.graph.erase_node(node)
    violations = propagate(graph)
    assert [v.module for v in violations] == [f"model.layers.{i}.post_attention_layernorm" for i in range(len(removed))]
    assert violations[0].found == "partial (linear_3) x full-token (all_reduce) x replicated on tp"


def test_a_reduction_on_an_axis_that_does_not_exist():
    graph = _lowered("tp")
    node = _node(graph, "all_reduce", LAYER)
    node.args = (node.args[0], "cp", 4)
    assert "no mesh axis 'cp'" in str(propagate(graph)[0])


@pytest.mark.parametrize(
    ("function", "placements", "expected"),
    [
        (torch.relu, ["partial"], "is not the partial sum of relu"),
        (torch.add, ["local-token", "full-token"], "laid out differently"),
        (torch.cumsum, ["local-token"], "no layout rule is known for cumsum"),
        (torch.softmax, ["shard(1)"], "needs whole rows"),
    ],
)
def test_functions_of_a_users_graph(function, placements, expected):
    from torch import fx

    from emulator.layout.placement import Layout, Tokens, parse_want
    from emulator.layout.rank_graph import RankGraph

    tokens, graph = Tokens(8, 4), fx.Graph()
    operands = []
    for i, word in enumerate(placements):
        operands.append(graph.placeholder(f"x{i}"))
        operands[-1].meta.update(layout=Layout("token", (), tokens).placed(**parse_want(word, "")[1]), module="")
    graph.call_function(function, tuple(operands)).meta["module"] = "mine"
    found = propagate(RankGraph(graph, {"tp": 4}, tokens, load_plan("tp")))
    assert len(found) == 1
    assert expected in found[0].reason
    assert found[0].module == "mine"
