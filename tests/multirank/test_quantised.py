"""Quantised weights on real ranks: equal to the one-process reference at every boundary, under every plan."""

from dataclasses import replace

import pytest
import torch

from emulator.errors import UsageError
from emulator.jobs.job import run
from emulator.jobs.prepare import Prepared, add_weights, prepare
from emulator.jobs.rank import _common, _value_run
from emulator.memory.ledger import Settings, build_ledger
from emulator.memory.rules import load_accounting
from emulator.model.batch import own_caches
from emulator.model.quantisation import load_scheme
from emulator.runtime.rank_process import RankContext
from emulator.runtime.rank_weights import local_shard
from emulator.runtime.threads import single_thread
from emulator.runtime.world import World
from emulator.scenario import load_scenario
from emulator.trace.record import TraceWriter
from emulator.verify.quantised import row_parallel
from emulator.verify.reference import run_reference

SCHEMES = ["w8a8", "w8a8_dynamic", "w8a8_w4a8_moe"]
MODELS = ["glm-5.1-mini", "deepseek-v3.2-mini"]
PLANS = ["tp", "sp", "dsa_cp", "dsa_cp_engine", "dsa_cp_engine_a", "dsa_cp_engine_c"]
RAGGED = [{"requests": [{"q": 5, "context": 9}, {"q": 1, "context": 30}, {"q": 7}]}]


def scenario(model="glm-5.1-mini", plan="tp", quant="w8a8_dynamic", tp=4, tokens=13, dp=1, **fields):
    given = {"plan": plan, "quant": quant, "tokens": tokens, "parallel": {"tp": tp, "dp": dp}, "layers": 3, **fields}
    return load_scenario(model, given)


def holds(summary: dict) -> None:
    assert summary["verdict"] == "pass", (summary["checks"], summary["first_failure"], summary["culprit"])
    assert summary["max_rel_error"] < 1e-12  # codes are equal: no row is rounded the other way
    found = summary["quantisation"]
    # a bound that nothing comes near, or an error of zero, would say that the comparison looked at nothing
    assert 0.05 < found["largest_error_in_bounds"] <= 1
    assert 1e-4 < found["logits_rel_error"] < 0.5


@pytest.mark.parametrize(
    ("plan", "quant", "fields"),
    [
        ("tp", "w8a8_dynamic", {"step": RAGGED}), ("sp", "w8a8_w4a8_moe", {}),
        ("dsa_cp", "w8a8_dynamic", {"tokens": 3}), ("dsa_cp_engine", "w8a8", {"step": RAGGED}),
    ],
)  # fmt: skip
def test_quantised_ranks_equal_the_reference(plan, quant, fields):
    summary = run(scenario(plan=plan, quant=quant, **fields))
    holds(summary)
    # 3 layers: q_a, q_b, kv_a, o_proj, wq_b each; gate, up, down in 2 dense MLPs and a shared one; 2 grouped products
    assert summary["quantisation"]["products"] == 3 * 5 + 3 * 3 + 2


def test_dense_attention_on_int8_codes():
    found = [run(scenario("deepseek-v3-mini", "sp", "w8a8", attention=a)) for a in ("float", "int8")]
    for summary in found:
        holds(summary)
    assert found[0]["quantisation"] != found[1]["quantisation"]


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("quant", SCHEMES)
@pytest.mark.parametrize("plan", ["tp", "sp", "dsa_cp", "dsa_cp_engine"])
def test_every_plan_scheme_size_and_batch(plan, quant, model):
    for tp in (1, 2, 4):
        for fields in ({"tokens": 97}, {"tokens": 3}, {"step": RAGGED}):
            holds(run(scenario(model, plan, quant, tp, **fields)))


@pytest.mark.parametrize(("dtype", "seed"), [("float32", 2), ("bfloat16", 0)])
def test_lower_precision(dtype, seed):
    """Rounding may move a code by one: with seed 2 it does, on the ranks and not in a run that is only re-rounded."""
    summary = run(scenario("deepseek-v3.2-mini", "tp", dtype=dtype, tokens=40, layers=4, seed=seed))
    assert summary["verdict"] == "pass", (summary["checks"], summary["first_failure"])
    assert summary["max_error_in_tolerances"] < 1


# --- a row-parallel linear: scales of shards, and the values of other plans ------------------------------------------


def test_plans_differ_only_by_the_scales_of_row_parallel_shards():
    """Plans that cut no quantised linear's in-features give one and the same value, and so do all with static scales.
    Scales of shards move the logits by less than two quantisations are apart."""

    def made(plan: str, quant: str, **variants: str) -> tuple[Prepared, str]:
        with single_thread():
            part = prepare(scenario(plan=plan, quant=quant, tokens=40, variants=variants))
        return part, part.rank_graph.graph.output_node().args[0].meta["origin"]

    whole = {"shared_experts": "replicated", "dense_mlp": "replicated"}
    (one, last), (other, _) = (made(plan, "w8a8_dynamic", **whole) for plan in ("dsa_cp", "dsa_cp_engine"))
    assert torch.equal(one.reference[last], other.reference[last])
    (one, last), (other, _) = made("tp", "w8a8"), made("dsa_cp", "w8a8", **whole)
    assert torch.equal(one.reference[last], other.reference[last])

    part, last = made("tp", "w8a8_dynamic")
    sharded = row_parallel(part.rank_graph)
    assert set(sharded.values()) == {4}
    assert len(sharded) == 3 + 2  # o_proj of 3 layers, down_proj of 2 dense MLPs; the shared expert's is whole
    plain = run_reference(part.program, part.weights, own_caches(part.batch), keep={last}, force=part.reference)[last]
    difference = float((part.reference[last] - plain).abs().max() / plain.abs().max())
    assert 1e-4 < difference < 2 * part.quantisation.logits  # both are that near to dequantised weights


# --- a mistake is named where it is made ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("quant", "name", "dim"),
    [
        ("w8a8_dynamic", "model.layers.0.self_attn.q_b_proj.weight_scale", 0),
        ("w8a8", "model.layers.0.mlp.up_proj.deq_scale", 0),
        ("w8a8_dynamic", "model.layers.0.self_attn.o_proj.weight", 1),
        ("w8a8_w4a8_moe", "model.layers.1.mlp.experts.down_proj.scale_bias", 0),
    ],
)  # fmt: skip
def test_a_part_of_another_rank_is_named(quant, name, dim, monkeypatch):
    """Rank 1 holds rank 0's part of one tensor of a quantised set."""
    held: list[torch.Tensor] = []

    def add(made: Prepared, weights: dict[str, torch.Tensor]) -> None:
        held.append(weights[name])
        add_weights(made, weights)

    def part_of(weight, layout, mesh, rank):
        return local_shard(weight, layout, mesh, 0 if rank == 1 and weight is held[0] else rank)

    monkeypatch.setattr("emulator.jobs.prepare.add_weights", add)
    monkeypatch.setattr("emulator.jobs.rank.local_shard", part_of)
    layers = 1 + int(name.split(".")[2])
    summary = run(scenario(plan="tp", quant=quant, layers=layers))
    first = summary["first_failure"]
    assert (first["module"], first["port"]) == (name.rpartition(".")[0], "output")
    assert first["rank"] == (0 if dim else 1)  # a sum over ranks is wrong on all of them
    assert summary["culprit"]["kind"] == "weight_shard"
    assert f"Rank 1 computes with rank 0's shard of {name} (dim {dim})" in summary["culprit"]["text"]


def test_quant_bias_on_the_wrong_ranks_is_named(monkeypatch):
    """Every rank of a row-parallel linear adds what the first one should add alone."""

    def part_of(weight, layout, mesh, rank):
        return weight if str(layout) == "tp:partial" else local_shard(weight, layout, mesh, rank)

    monkeypatch.setattr("emulator.jobs.rank.local_shard", part_of)
    summary = run(scenario(plan="tp", quant="w8a8", layers=1))
    first = summary["first_failure"]
    assert (first["module"], first["port"], first["rank"]) == ("model.layers.0.self_attn.o_proj", "output", 0)


def test_faults_of_weights_need_float_weights():
    with pytest.raises(UsageError, match="faults of weights change float values"):
        run(scenario(fault="shard-of-another-rank"))


# --- ledger and reality -----------------------------------------------------------------------------------------------


def _held(prepared: Prepared, context: RankContext) -> dict[str, int]:
    """Bytes of the tensors that a rank's executor fetched, by their last name (and whole ones of layer windows)."""
    part = prepared.schedule[0][prepared.mesh.index("dp", context.rank)]
    _, executor = _value_run(part, context.rank, _common(part, context, TraceWriter(None, {})), {})
    with torch.no_grad():
        executor.run()
    owned = {name for name, layout in executor.weight_bytes if "owner" in str(layout)}
    held: dict[str, int] = {}
    for (name, layout), size in executor.weight_bytes.items():
        module, _, leaf = name.rpartition(".")
        quantised = f"{module}.weight_scale" in part.weights
        key = leaf if leaf != "weight" or quantised else "float"
        if name in owned and "owner" not in str(layout):
            key = "window"
        held[key] = held.get(key, 0) + size
    return held


CATEGORIES = {
    "weight_scale": ("weight_scale",), "weight_offset": ("weight_offset",), "full_layout_copy": ("window",),
    "activation_scale": ("input_scale", "input_offset"), "quant_bias": ("quant_bias", "deq_scale", "scale_bias"),
}  # fmt: skip
_FLOAT = ("float", "bias", "inv_freq", "e_score_correction_bias")


def ledger_equals_ranks(model: str, plan: str, quant: str, tp: int = 4, dp: int = 1) -> None:
    given = scenario(model, plan, quant, tp=tp, dp=dp)
    with single_thread():
        prepared = prepare(given)
        found = World(prepared.mesh, timeout=30).run(_held, prepared)
    settings = Settings(
        prepared.config, prepared.rank_graph.plan, prepared.mesh, load_scheme(quant), load_accounting("emulator"),
        (quant, "emulator"), given.torch_dtype,
    )  # fmt: skip
    for rank, held in enumerate(found):
        counted = build_ledger(replace(settings, rank=rank)).by("category")
        expected = {c: sum(held.get(leaf, 0) for leaf in leaves) for c, leaves in CATEGORIES.items()}
        plain = sum(held.get(leaf, 0) for leaf in _FLOAT)
        if quant == "none":
            expected["checkpoint_weight"] = plain
        else:
            expected |= {"float_exception": plain, "checkpoint_weight": held["weight"]}
        assert {c: b for c, b in expected.items() if b} == counted, (model, plan, quant, rank)
        assert sum(held.values()) == sum(counted.values())


@pytest.mark.parametrize(
    ("model", "plan", "quant"),
    [
        ("glm-5.1-mini", "dsa_cp_engine_a", "w8a8"), ("deepseek-v3.2-mini", "tp", "w8a8_w4a8_moe"),
        ("glm-5.1-mini", "dsa_cp_engine_a", "none"),
    ],
)  # fmt: skip
def test_the_ledger_is_what_ranks_hold(model, plan, quant):
    ledger_equals_ranks(model, plan, quant)


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("quant", ["none", *SCHEMES])
@pytest.mark.parametrize("plan", PLANS)
def test_the_ledger_is_what_ranks_hold_everywhere(model, plan, quant):
    ledger_equals_ranks(model, plan, quant)
    ledger_equals_ranks(model, plan, quant, tp=2, dp=2)
