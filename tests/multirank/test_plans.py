"""The main claim: every plan on real ranks equals the one-process Program at every boundary, on every rank."""

import pytest

import emulator.prepare
from emulator.job import single_thread
from emulator.prepare import prepare
from emulator.rank import run_on_rank
from emulator.runtime.world import World
from emulator.scenario import load_scenario
from emulator.verdict import summarise

VARIANTS = [
    {},
    {"embedding": "replicated"},
    {"shared_experts": "gather_scatter"},
    {"embedding": "replicated", "shared_experts": "gather_scatter", "dense_mlp": "replicated"},
]


def _summary(model: str, plan: str, tp: int, tokens: int, **fields) -> dict:
    given = {"plan": plan, "parallel": {"tp": tp}, "tokens": tokens, **fields}
    with single_thread():
        prepared = prepare(load_scenario(model, given))
        reports = World(prepared.mesh).run(run_on_rank, prepared)
    return summarise(prepared, reports, 0.0)


def _assert_holds(summary: dict) -> None:
    assert summary["verdict"] == "pass", (summary["checks"], summary["first_failure"])
    assert [c["name"] for c in summary["checks"]][:2] == ["static layout", "values"]
    assert summary["max_rel_error"] < 1e-9
    # a value check that looked at nothing would pass too: every module of every layer is a boundary
    per_rank = len({b["module"] for b in summary["boundaries"]})
    assert per_rank > 20 * summary["layers"]


@pytest.mark.parametrize("plan", ["tp", "sp", "dsa_cp"])
@pytest.mark.parametrize(("tp", "tokens"), [(1, 16), (2, 97), (3, 3), (4, 97), (4, 1), (8, 3)])
def test_plans_equal_the_reference(plan, tp, tokens):
    _assert_holds(_summary("glm-5.1-mini", plan, tp, tokens))


@pytest.mark.parametrize("plan", ["tp", "dsa_cp"])
def test_the_other_model(plan):
    _assert_holds(_summary("deepseek-v3.2-mini", plan, 4, 97))


@pytest.mark.parametrize("variants", VARIANTS[1:], ids=lambda v: "+".join(v.values()))
@pytest.mark.parametrize("plan", ["tp", "sp", "dsa_cp"])
def test_variants(plan, variants):
    _assert_holds(_summary("glm-5.1-mini", plan, 3, 16, variants=variants))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_lower_precision_stays_within_measured_tolerance(dtype):
    summary = _summary("deepseek-v3.2-mini", "dsa_cp", 4, 97, dtype=dtype)
    assert summary["verdict"] == "pass", summary["checks"]
    assert summary["max_error_in_eps"] < 200  # and the tolerance is no blank cheque


@pytest.mark.parametrize(("ep", "tp"), [(1, 4), (2, 4)])
def test_ep_may_be_smaller_than_the_world(ep, tp):
    _assert_holds(_summary("glm-5.1-mini", "dsa_cp", tp, 13, parallel={"tp": tp, "ep": ep}))


@pytest.mark.parametrize("layers", [1, 3])
def test_cut_models(layers):
    summary = _summary("glm-5.1-mini", "dsa_cp", 2, 16, layers=layers)
    assert summary["verdict"] == "pass", summary["checks"]


@pytest.mark.parametrize(
    ("variant", "module", "layer"),
    [
        ("shared_experts", "model.layers.2.mlp.shared_experts.down_proj", 2),
        ("dense_mlp", "model.layers.0.mlp.down_proj", 0),
    ],
)
def test_all_reduce_on_local_tokens_is_wrong_at_its_first_module(variant, module, layer):
    # the RFC's literal row: it passes every shape check, so only values and token ids can show it
    summary = _summary("glm-5.1-mini", "dsa_cp", 4, 97, variants={variant: "allreduce_local"}, static_check=False)
    checks = {c["name"]: c["passed"] for c in summary["checks"]}
    assert summary["verdict"] == "fail"
    assert not checks["values"]
    assert checks["contract dsa_cp_prefill"]  # shapes and counts see nothing
    failure = summary["first_failure"]
    assert (failure["module"], failure["layer"], failure["rank"]) == (module, layer, 0)
    assert "sums rows of different tokens" in failure["detail"]
    assert "rows differ" in failure["detail"]


def test_a_wrong_weight_shard_is_caught_by_values_alone(monkeypatch):
    # rank 1 computes with rank 0's columns: every shape and count is right
    import emulator.rank as rank_module

    honest = rank_module.local_shard

    def crooked(weight, layout, mesh, rank):
        return honest(weight, layout, mesh, 0 if rank == 1 and weight.shape == (264, 144) else rank)

    monkeypatch.setattr(rank_module, "local_shard", crooked)
    summary = _summary("glm-5.1-mini", "dsa_cp", 4, 97)
    assert summary["first_failure"]["module"] == "model.layers.0.mlp.gate_proj"
    assert summary["first_failure"]["rank"] == 1
    assert {c["name"]: c["passed"] for c in summary["checks"]}["contract dsa_cp_prefill"]


@pytest.mark.slow
@pytest.mark.parametrize("model", ["glm-5.1-mini", "deepseek-v3.2-mini"])
@pytest.mark.parametrize("plan", ["tp", "sp", "dsa_cp"])
@pytest.mark.parametrize("tokens", [1, 3, 16, 97, 256])
@pytest.mark.parametrize("tp", [1, 2, 3, 4, 8])
def test_full_matrix(model, plan, tokens, tp):
    for embedding in ("row", "replicated"):
        for shared in ("replicated", "gather_scatter"):
            variants = {"embedding": embedding, "shared_experts": shared}
            _assert_holds(_summary(model, plan, tp, tokens, variants=variants))


def test_all_plans_agree_with_each_other():
    # each equals its own reference run; the reference must then be one and the same
    references = []
    for plan in ("tp", "sp", "dsa_cp"):
        with single_thread():
            prepared = emulator.prepare.prepare(load_scenario("glm-5.1-mini", {"plan": plan, "tokens": 16}))
        references.append(prepared.reference[max(prepared.reference, key=len)].sum().item())
    assert references[0] == references[1] == references[2]
