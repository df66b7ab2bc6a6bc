"""effective_ops counts a folded graph as the graph with all its layers, without making them."""

from collections import Counter

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from emulator.jobs.job import run
from emulator.jobs.prepare import Prepared, prepare
from emulator.jobs.rank import build_batch_shapes
from emulator.layout.rank_graph import RankGraph
from emulator.passes.effective import EffectiveOp, effective_ops
from emulator.passes.repetition import expand, fold
from emulator.runtime.shape_mode import ShapeMode
from emulator.scenario import load_scenario


def count(prepared: Prepared, graph: RankGraph, rank: int = 0) -> Counter[EffectiveOp]:
    """effective_ops of a graph with the shapes of a prepared scenario, as one rank sees them."""
    config, parameters = prepared.config, prepared.program.parameters
    shapes = ShapeMode(
        prepared.mesh, rank, [graph.tokens], config.n_routed_experts, config.num_experts_per_tok, torch.bfloat16
    )
    with FakeTensorMode():
        return effective_ops(
            graph,
            inputs=build_batch_shapes(prepared),
            weights=lambda name, layout: shapes.weight(name, parameters[name], layout),
            shapes=shapes,
        )


def times(counted: Counter[EffectiveOp], op: str, *operands: tuple[int, ...], group: str | None = None) -> int:
    """How often an op ran on these first operands."""
    return sum(n for e, n in counted.items() if (e.op, e.inputs[: len(operands)], e.group) == (op, operands, group))


@pytest.mark.parametrize("plan", ["tp", "sp", "dsa_cp"])
@pytest.mark.parametrize(("model", "layers"), [("glm-5.1", 78), ("deepseek-v3.2", 61)])
def test_folded_and_expanded_models_run_the_same_ops(model: str, layers: int, plan: str) -> None:
    made = prepare(load_scenario(model, {"plan": plan}), graph_only=True)
    assert (made.mesh.tp, made.mesh.ep, made.scenario.tokens) == (16, 16, 4096)
    folded = fold(made.rank_graph)
    counted = count(made, folded)
    assert counted == count(made, expand(folded))
    assert counted == count(made, made.rank_graph)
    # one layer each of what a layer does once
    assert sum(n for e, n in counted.items() if e.op == "mla_sparse_attention") == layers
    assert sum(n for e, n in counted.items() if e.op == "grouped_matmul") == 2 * (layers - 3)


@pytest.fixture(scope="module")
def glm() -> dict[str, Counter[EffectiveOp]]:
    """GLM-5.1, folded, by plan."""
    found = {}
    for plan in ("tp", "dsa_cp"):
        made = prepare(load_scenario("glm-5.1", {"plan": plan}), graph_only=True)
        found[plan] = count(made, fold(made.rank_graph))
    return found


def test_published_counts_of_dsa_cp(glm: dict[str, Counter[EffectiveOp]]) -> None:
    # reference/tensorcast_observed.md, and the RFC's section 3.3.1
    counted = glm["dsa_cp"]
    assert times(counted, "linear", (256, 16384), (6144, 16384)) == 78  # o_proj on local tokens, whole weight
    assert times(counted, "slice", (4096, 64, 256), group="tp") == 78  # before it
    assert times(counted, "reduce_scatter", (4096, 6144), group="tp") == 1 + 3
    assert times(counted, "all_gather", (256, 6144), group="tp") == 78 + 3 + 1
    assert times(counted, "all_gather", (4096, 9680), group="tp") == 1  # logits
    assert times(counted, "all_to_all_rows", (2048, 6144), group="ep") == 150
    assert times(counted, "moe_gate", (256, 6144), (256, 6144)) == 75
    assert times(counted, "moe_topk", (256, 256)) == 75
    assert times(counted, "add_rms_norm2", (256, 6144), (256, 6144)) == 78 + 77
    assert not any(e.op == "all_reduce" for e in counted)
    assert max(max(shape[0] for shape in e.outputs) for e in counted if e.op != "cache_write") == 4096


def test_published_counts_of_the_tp_baseline(glm: dict[str, Counter[EffectiveOp]]) -> None:
    counted = glm["tp"]
    assert times(counted, "linear", (4096, 1024), (6144, 1024)) == 78
    assert times(counted, "all_reduce", (4096, 6144), group="tp") == 78 + 3 + 1
    assert times(counted, "all_gather", (256, 6144), group="tp") == 75  # MoE exit
    assert times(counted, "add_rms_norm2", (4096, 6144), (4096, 6144)) == 78 + 77


@pytest.mark.parametrize("rank", [0, 15])
def test_ranks_with_fewer_tokens(rank: int) -> None:
    # 4099 tokens: 257 rows on ranks 0 to 14, and 244 with 13 of padding on rank 15
    made = prepare(load_scenario("glm-5.1", {"tokens": 4099, "layers": 7}), graph_only=True)
    folded = fold(made.rank_graph)
    counted = count(made, folded, rank)
    assert counted == count(made, made.rank_graph, rank)
    real = 257 if rank == 0 else 244
    assert sum(n for e, n in counted.items() if e.op == "moe_dispatch" and e.outputs[0] == (real * 8, 6144)) == 4
    assert times(counted, "all_gather", (257, 6144), group="tp") == 7 + 3 + 1
    assert times(counted, "unpad", (4112, 6144)) == 7 + 3 + 1


def test_counts_are_those_of_a_run() -> None:
    scenario = load_scenario("glm-5.1", {"layers": 7})
    made = prepare(scenario, graph_only=True)
    counted = count(made, fold(made.rank_graph))
    called = ("all_reduce", "reduce_scatter", "all_gather", "slice", "all_to_all_rows")
    found: Counter[tuple] = Counter()
    for e, n in counted.items():
        if e.op in called and e.inputs[0] != (4096,):  # the token mask's cut is a host's
            op = e.op.removesuffix("_rows")
            found[e.group, op, e.inputs[0], e.outputs[0]] += n
    ran: Counter[tuple] = Counter()
    for c in run(scenario)["collectives"]:
        ran[c["group"], c["op"], tuple(c["input_shape"]), tuple(c["output_shape"])] += c["count"]
    assert found == ran
    assert sum(found.values()) == 4 + (7 + 4) + 1 + 7 + 2 * 4
