"""Where lowering places what stands beside a quantised weight."""

import pytest

from emulator.layout.lowering import lower
from emulator.layout.plan import load_plan
from emulator.layout.rank_graph import RankGraph
from emulator.model.config import load_config
from emulator.model.layers import ProgramOptions
from emulator.model.program import build_program
from emulator.ops.registry import op_name

DYNAMIC, STATIC = ("weight_scale", "weight_offset"), ("input_scale", "input_offset", "quant_bias", "deq_scale")


def lowered(plan: str, quant: str) -> RankGraph:
    config = load_config("glm-5.1-mini").with_layers(3)
    return lower(build_program(config, ProgramOptions(quant=quant)), load_plan(plan), {"tp": 4, "ep": 4}, 13)


def beside(graph: RankGraph, module: str) -> dict[str, str]:
    names = {str(n.target): str(n.meta["layout"]) for n in graph.graph.nodes if n.op == "get_attr"}
    return {
        n.rpartition(".")[2]: layout for n, layout in names.items() if n.rpartition(".")[0] == f"model.layers.{module}"
    }


def test_column_parallel_scales_are_cut_with_the_out_features():
    found = beside(lowered("tp", "w8a8"), "1.mlp.up_proj")
    cut = ("weight", *DYNAMIC, "quant_bias", "deq_scale")
    assert found == {name: "replicated" if name not in cut else "tp:shard(0)" for name in ("weight", *DYNAMIC, *STATIC)}


def test_row_parallel_scales_are_whole_and_quant_bias_counts_once():
    found = beside(lowered("tp", "w8a8"), "1.mlp.down_proj")
    expected = {name: "replicated" for name in (*DYNAMIC, *STATIC)}
    assert found == {**expected, "weight": "tp:shard(1)", "quant_bias": "tp:partial"}


def test_a_gathered_weight_has_its_bias_on_every_rank():
    graph = lowered("dsa_cp_engine", "w8a8")
    found = beside(graph, "1.self_attn.o_proj")
    assert found == {**{name: "replicated" for name in (*DYNAMIC, *STATIC)}, "weight": "tp:shard(1)"}
    gathered = [
        n.args[0].target for n in graph.graph.nodes if op_name(n.target) == "all_gather" and n.args[0].op == "get_attr"
    ]
    assert gathered == [f"model.layers.{i}.self_attn.o_proj.weight" for i in range(3)]  # codes travel, scales do not


def test_layer_sharding_concerns_the_weight_alone():
    found = beside(lowered("dsa_cp_engine_a", "w8a8_dynamic"), "2.self_attn.q_b_proj")
    assert found == {"weight": "tp:owner(2)", **{name: "replicated" for name in DYNAMIC}}


@pytest.mark.parametrize("quant", ["w8a8_dynamic", "w8a8_w4a8_moe"])
def test_scales_stand_with_their_experts(quant):
    found = beside(lowered("sp", quant), "2.mlp.experts.down_proj")
    assert set(found.values()) == {"ep:shard(0)"}
    assert ("scale_bias" in found) == (quant == "w8a8_w4a8_moe")


@pytest.mark.parametrize("plan", ["tp", "sp", "dsa_cp", "dsa_cp_engine", "dsa_cp_engine_c"])
def test_quantisation_changes_no_transition(plan):
    def moves(graph: RankGraph) -> list[tuple]:
        return [(n.name, n.meta["module"], str(n.meta["layout"])) for n in graph.graph.nodes if n.op == "call_function"]

    plain = moves(lowered(plan, "none"))
    for quant in ("w8a8", "w8a8_dynamic", "w8a8_w4a8_moe"):
        graph = lowered(plan, quant)
        assert graph.violations == []
        assert moves(graph) == plain
