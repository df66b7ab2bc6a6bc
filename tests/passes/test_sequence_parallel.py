"""The rewrite equals what lowering with `sp` and `dsa_cp` gives, node for node, and holds on real ranks."""

import pytest
from torch import fx

from emulator.jobs.job import run
from emulator.layout.lowering import lower
from emulator.layout.plan import load_plan
from emulator.layout.propagation import propagate
from emulator.model.config import load_config
from emulator.model.program import build_program
from emulator.ops.registry import op_name
from emulator.passes.compare import first_difference
from emulator.passes.sequence_parallel import sequence_parallel
from emulator.scenario import load_scenario, parse_requests

PROGRAMS: dict = {}
VARIANTS = [
    {},
    {"embedding": "replicated"},
    {"shared_experts": "gather_scatter"},
    {"dense_mlp": "replicated"},
    {"embedding": "replicated", "dense_mlp": "replicated", "shared_experts": "gather_scatter"},
]


def lowered(model, plan, tokens=97, tp=4, variants=None):
    if model not in PROGRAMS:
        PROGRAMS[model] = build_program(load_config(model))
    return lower(PROGRAMS[model], load_plan(plan, variants), {"tp": tp, "ep": tp}, tokens)


def baseline(model, plan, **given):
    """The tp graph from which `plan` is rewritten: for DSA CP with whole q_b_proj, kv_b_proj and o_proj."""
    attention = "replicated" if plan == "dsa_cp" else "sharded"
    return lowered(model, "tp", **{**given, "variants": {**(given.get("variants") or {}), "attention": attention}})


def told(graph) -> list:
    """Every node in order, with names replaced by positions."""
    place = {n: i for i, n in enumerate(graph.graph.nodes)}
    return [
        (
            n.op,
            str(n.target),
            str(fx.map_arg(n.args, lambda a: f"%{place[a]}")),
            str(n.meta["layout"]),
            n.meta["module"],
        )
        for n in graph.graph.nodes
    ]


@pytest.mark.parametrize("variants", VARIANTS, ids=lambda v: "+".join(v) or "default")
@pytest.mark.parametrize("plan", ["sp", "dsa_cp"])
@pytest.mark.parametrize("model", ["glm-5.1-mini", "deepseek-v3.2-mini"])
@pytest.mark.parametrize("tokens", [97, 3])
def test_equals_lowering_node_for_node(model, plan, variants, tokens):
    before = baseline(model, plan, tokens=tokens, variants=variants)
    wanted = lowered(model, plan, tokens=tokens, variants=variants)
    assert told(before) != told(wanted)
    found = sequence_parallel(before)
    assert told(found) == told(wanted)
    assert first_difference(found, wanted) is None
    assert found.violations == []
    assert told(sequence_parallel(found)) == told(wanted)  # nothing more to do


@pytest.mark.parametrize("embedding", ["row", "replicated"])
@pytest.mark.parametrize("plan", ["sp", "dsa_cp"])
@pytest.mark.parametrize("model", ["glm-5.1", "deepseek-v3.2"])
def test_whole_models(model, plan, embedding):
    given = {"tokens": 4096, "tp": 16, "variants": {"embedding": embedding}}
    assert told(sequence_parallel(baseline(model, plan, **given))) == told(lowered(model, plan, **given))


@pytest.mark.parametrize("moe", ["all_to_all", "all_gather"])
def test_dp_ranks_alone(moe):
    """tp 1: nothing to rewrite, and the padding of rows that an ep group joins stays."""
    given = {
        "plan": "tp", "variants": {"moe": moe}, "parallel": {"tp": 1, "dp": 2}, "layers": 3,
        "step": [parse_requests("5/3").model_dump()],
        "passes": ["emulator.passes.library:sequence_parallel_pass"], "contract": "sp_prefill",
    }  # fmt: skip
    summary = run(load_scenario("glm-5.1-mini", given))
    assert summary["verdict"] == "pass", summary["checks"]
    assert summary["max_rel_error"] < 1e-9


def test_published_counts():
    # GLM-5.1, 4096 tokens, tp 16: 82 all_reduces (81 and the embedding's) become 4 reduce_scatters and 78 slices
    before = baseline("glm-5.1", "dsa_cp", tokens=4096, tp=16)
    after = sequence_parallel(before)

    def count(graph, op):
        return sum(op_name(n.target) == op for n in graph.graph.nodes)

    assert (count(before, "all_reduce"), count(before, "all_gather")) == (4, 75 + 1)
    assert (count(after, "all_reduce"), count(after, "reduce_scatter"), count(after, "slice")) == (
        0,
        4,
        78 + 1,
    )  # and the token mask once
    assert count(after, "all_gather") == 82 + 1  # tokens, and the logits' features


def test_it_reads_layouts_not_epsilons_or_names():
    """TensorCast's three failing situations: eps 1e-6 (DeepSeek's), a grouped top-k gate, a replicated embedding."""
    config = load_config("glm-5.1-mini").model_copy(
        update={"rms_norm_eps": 1e-6, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 4}
    )
    program = build_program(config)
    sizes = {"tp": 4, "ep": 4}
    for variants in ({}, {"embedding": "replicated"}):
        before = lower(program, load_plan("tp", {**variants, "attention": "replicated"}), sizes, 97)
        for i, node in enumerate(before.graph.nodes):
            node._rename(f"v{i}")
        found = sequence_parallel(before)
        assert told(found) == told(lower(program, load_plan("dsa_cp", variants), sizes, 97))
        gathered = {n.args[0].name for n in found.graph.nodes if op_name(n.target) == "all_gather"}
        residuals = {n.name for n in found.graph.nodes if n.args[1:] == (1,) and "norm" in n.meta["module"]}
        assert residuals
        assert not residuals & gathered  # output 1 stays local


def test_the_reductions_keep_their_group():
    before = baseline("glm-5.1-mini", "sp")
    found = sequence_parallel(before)
    groups = {n.args[1] for n in found.graph.nodes if op_name(n.target) in ("reduce_scatter", "all_gather")}
    assert groups == {"tp"}
    assert propagate(found) == []


@pytest.mark.parametrize(("plan", "attention"), [("sp", "sharded"), ("dsa_cp", "replicated")])
@pytest.mark.parametrize("model", ["glm-5.1-mini", "deepseek-v3.2-mini"])
def test_on_real_ranks(model, plan, attention):
    """As a user's pass, from the command line's scenario: values, and the contract of the plan it must arrive at."""
    given = {
        "plan": "tp", "variants": {"attention": attention}, "tokens": 13,
        "passes": ["emulator.passes.library:sequence_parallel_pass"], "contract": f"{plan}_prefill",
    }  # fmt: skip
    summary = run(load_scenario(model, given))
    assert summary["verdict"] == "pass", summary["checks"]
    assert f"contract {plan}_prefill" in [c["name"] for c in summary["checks"]]
    assert summary["max_rel_error"] < 1e-9
