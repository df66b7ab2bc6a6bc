"""From a wrong run to the first wrong node, on which ranks, and why."""

import pytest
import torch

import emulator.jobs.rank as rank_module
from emulator.errors import RankError
from emulator.jobs.job import run
from emulator.scenario import load_scenario

PASS = """
import torch
from torch import fx

def find(gm, op, module):
    return next(n for n in gm.graph.nodes if n.target is getattr(torch.ops.emulator, op) and n.meta["module"] == module)

def behind(node, op, *args):
    with node.graph.inserting_after(node):
        new = node.graph.call_function(getattr(torch.ops.emulator, op), (node, *args))
    node.replace_all_uses_with(new, delete_user_cb=lambda user: user is not new)
    return new

def reduced_twice(gm):
    behind(find(gm, "all_reduce", "model.layers.1.self_attn.o_proj"), "all_reduce", "tp", 4)
    return gm

def not_reduced(gm):
    node = find(gm, "all_reduce", "model.layers.1.self_attn.o_proj")
    node.replace_all_uses_with(node.args[0])
    gm.graph.erase_node(node)
    return gm
"""


@pytest.mark.parametrize(
    ("name", "node", "op", "module", "kind"),
    [
        ("reduced_twice", "all_reduce_9", "all_reduce", "model.layers.1.self_attn.o_proj", "reduced_twice"),
        ("not_reduced", None, "add_rms_norm2", "model.layers.1.post_attention_layernorm", "not_reduced"),
    ],
)
@pytest.mark.parametrize("tokens", [16, 13, 3])
def test_a_users_pass(tmp_path, name, node, op, module, kind, tokens):
    (tmp_path / "mine.py").write_text(PASS)
    given = {
        "plan": "tp",
        "tokens": tokens,
        "layers": 3,
        "static_check": False,
        "passes": [f"{tmp_path}/mine.py:{name}"],
    }
    summary = run(load_scenario("glm-5.1-mini", given))
    assert summary["verdict"] == "fail"
    culprit = summary["culprit"]
    assert (culprit["op"], culprit["module"], culprit["kind"]) == (op, module, kind), culprit
    assert culprit["ranks"] == [0, 1, 2, 3]


def test_one_ranks_weight(monkeypatch):
    honest = rank_module.local_shard

    def crooked(weight, layout, mesh, rank):
        return honest(weight, layout, mesh, 0 if rank == 1 and weight.shape == (264, 144) else rank)

    monkeypatch.setattr(rank_module, "local_shard", crooked)
    culprit = run(load_scenario("glm-5.1-mini", {"tokens": 13, "layers": 2}))["culprit"]
    assert (culprit["module"], culprit["op"], culprit["ranks"]) == ("model.layers.0.mlp.gate_proj", "linear", [1])
    assert culprit["kind"] == "weight_shard"
    assert "rank 0" in culprit["text"]


def test_a_partial_sum_is_told_from_its_reduction(monkeypatch):
    # the wrong value shows after the reduce_scatter; the node that made the wrong share is the linear before it
    honest = rank_module.local_shard

    def crooked(weight, layout, mesh, rank):
        shard = honest(weight, layout, mesh, rank)
        return torch.zeros_like(shard) if rank == 2 and weight.shape == (144, 264) else shard

    monkeypatch.setattr(rank_module, "local_shard", crooked)
    culprit = run(load_scenario("glm-5.1-mini", {"tokens": 13, "layers": 2}))["culprit"]
    assert (culprit["module"], culprit["op"]) == ("model.layers.0.mlp.down_proj", "linear")
    assert culprit["kind"] == "weight_value"


def test_a_right_run_has_no_culprit():
    assert run(load_scenario("glm-5.1-mini", {"tokens": 3, "layers": 1}))["culprit"] is None


def test_a_node_that_does_not_run_on_its_operands():
    """The residual gathered as well (RFC error 3): full rows meet local ones, and no kernel can add them."""
    given = {"tokens": 16, "layers": 2, "fault": "residual-gathered", "static_check": False}
    with pytest.raises(RankError) as caught:
        run(load_scenario("glm-5.1-mini", given))
    culprit = caught.value.report["culprit"]
    assert (culprit["op"], culprit["module"]) == ("add_rms_norm2", "model.layers.1.input_layernorm")
    assert culprit["kind"] == "residual_gathered"
    assert "all 16 rows" in culprit["text"]
    assert "own 4" in culprit["text"]


def test_an_error_of_one_rank_stays_its_own():
    with pytest.raises(RankError) as caught:
        run(load_scenario("glm-5.1-mini", {"tokens": 16, "layers": 2, "fault": "rank-raises", "static_check": False}))
    assert caught.value.report["culprit"] is None
    assert "MemoryError" in str(caught.value)
