"""Dense MLA, a model without an indexer: plans tp and sp on ranks and by shape; no DSA context parallelism."""

import itertools

import pytest
import torch

from emulator.errors import UsageError
from emulator.jobs.job import run
from emulator.jobs.prepare import prepare
from emulator.layout.placement import Tokens
from emulator.layout.plan import load_plan
from emulator.model.config import load_config
from emulator.scenario import load_scenario
from emulator.verify.contract import symbols_of

from .test_batches import MOE, WORKLOADS, _holds, _scenario

MINI, PLANS = "deepseek-v3-mini", ("tp", "sp")
# every workload once, with every plan and every way to the experts in turn
CASES = [(w, PLANS[i % 2], MOE[i % 3]) for i, w in enumerate(WORKLOADS)]


@pytest.mark.parametrize(("workload", "plan", "moe"), CASES)
def test_workloads(workload, plan, moe):
    _holds(run(_scenario(workload, plan, moe, MINI)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("workload", "plan", "moe"), sorted(set(itertools.product(WORKLOADS, PLANS, MOE)) - set(CASES))
)
def test_all_workloads(workload, plan, moe):
    _holds(run(_scenario(workload, plan, moe, MINI)))


def _prefill(plan, tp, tokens, **more):
    return load_scenario(MINI, {"plan": plan, "parallel": {"tp": tp}, "tokens": tokens, "layers": 3, **more})


@pytest.mark.parametrize(("plan", "tp", "tokens"), [("sp", 1, 16), ("tp", 2, 97), ("sp", 4, 1), ("sp", 8, 3)])
def test_prefill_equals_the_reference(plan, tp, tokens):
    summary = run(_prefill(plan, tp, tokens))
    _passes(summary)


def _passes(summary):
    assert summary["verdict"] == "pass", (summary["checks"], summary["first_failure"])
    assert summary["max_rel_error"] < 1e-9


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [1, 3, 16, 97])
@pytest.mark.parametrize("tp", [1, 2, 4, 8])
@pytest.mark.parametrize("plan", PLANS)
def test_prefill_matrix(plan, tp, tokens):
    _passes(run(_prefill(plan, tp, tokens, layers=None)))


@pytest.mark.slow
@pytest.mark.parametrize(
    "variants", [{"shared_experts": "gather_scatter", "embedding": "replicated"}, {"dense_mlp": "replicated"}]
)
@pytest.mark.parametrize("plan", PLANS)
def test_variants(plan, variants):
    _passes(run(_prefill(plan, 3, 16, variants=variants)))


def test_lower_precision_stays_within_measured_tolerance():
    summary = run(_prefill("tp", 4, 97, dtype="bfloat16"))
    assert summary["verdict"] == "pass", summary["checks"]
    assert summary["max_error_in_eps"] < 200


def test_heads_are_sharded_and_nothing_of_an_indexer_is_there():
    summary = run(_prefill("sp", 4, 13))
    _passes(summary)
    assert [c["name"] for c in summary["checks"] if c["name"].startswith("contract")] == ["contract sp_prefill"]

    def at(module, port):
        return [(b["layout"], b["shape"]) for b in summary["boundaries"] if b["module"] == module and b["port"] == port]

    for layer in range(3):
        attention = f"model.layers.{layer}.self_attn"
        assert at(attention, "input") == [("full-token", [13, 192])]
        assert at(f"{attention}.attn", "output") == [("shard(1)", [13, 24 // 4, 22])]
    assert not [b for b in summary["boundaries"] if "indexer" in b["module"]]


def test_contract_symbols_count_no_indexer():
    symbols = symbols_of(load_config(MINI), Tokens(13, 4), {"tp": 4, "ep": 4, "dp": 1})
    assert (symbols["indexer_layers"], symbols["shared_layers"], symbols["layers"]) == (0, 0, 5)
    assert symbols["kv"] == 56 + 14  # latent and rope, no index key


def test_chunks_and_decodes_equal_one_prefill():
    chunked = prepare(_scenario("chunks then decodes", "sp", "all_to_all", MINI))
    whole = prepare(load_scenario(MINI, {"plan": "sp", "tokens": 22, "layers": 3}))

    def logits(part):
        return next(value for value in part.reference.values() if value.shape[1:] == (360,))

    assert torch.equal(torch.cat([p.batch.input_ids for p in chunked.parts]), whole.batch.input_ids)
    found, expected = torch.cat([logits(p) for p in chunked.parts]), logits(whole)
    assert found.shape == (22, 360)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-9 * float(expected.abs().max()))


# --- no DSA context parallelism without the structure ----------------------------------------------------------------


@pytest.mark.parametrize("plan", ["dsa_cp", "dsa_cp_engine", "dsa_cp_engine_decode", "dsa_cp_engine_c"])
@pytest.mark.parametrize("mode", ["real", "shape"])
def test_dsa_context_parallelism_is_refused(plan, mode):
    with pytest.raises(UsageError) as error:
        run(load_scenario(MINI, {"plan": plan, "mode": mode}))
    line = str(error.value)
    assert "\n" not in line
    assert line.startswith(f"plan {plan} is DSA context parallelism, but model {MINI} has no indexer")
    assert "--plan sp or tp" in line


def test_a_plan_inherits_what_it_needs(tmp_path):
    own = tmp_path / "own.toml"
    own.write_text('description = "mine"\nextends = "dsa_cp_engine"\n')
    assert load_plan(str(own)).needs == "dsa"
    assert [load_plan(name).needs for name in ("tp", "sp", "decode")] == [None] * 3


# --- faults ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "operand"), [("kv-length-of-next-step", "kv_lens"), ("block-table-stale-on-one-rank", "block_table")]
)
def test_wrong_lengths_are_found_at_the_dense_op(fault, operand):
    # its derived weights are shards of heads: they are right, and not to be blamed
    summary = run(_prefill("sp", 2, 13, fault=fault, static_check=False))
    culprit = summary["culprit"]
    assert (culprit["op"], culprit["kind"]) == ("multihead_latent_attention", "wrong_metadata")
    assert f"`{operand}`" in culprit["text"]


@pytest.mark.parametrize("fault", ["topk-ids-local", "topk-minus-one-read-as-index", "bias-added-tp-times"])
def test_a_fault_of_the_indexer_does_not_apply(fault):
    with pytest.raises(UsageError, match=r"the graph has (0|none), so the fault does not apply"):
        run(_prefill("sp", 2, 13, fault=fault, static_check=False))


# --- by shape ---------------------------------------------------------------------------------------------------------


def _counts(summary):
    totals = {}
    for c in summary["collectives"]:
        key = (c["group"], c["op"], c["dim"])
        totals[key] = totals.get(key, 0) + c["count"]
    return totals


def _expected_counts(plan, layers, moe):
    """Embedding, every o_proj and every dense MLP make one sum; logits are gathered once."""
    common = {("tp", "all_gather", 1): 1, ("ep", "all_to_all", None): 2 * moe}
    sums = 1 + layers + (layers - moe)
    if plan == "tp":  # MoE runs on a cut of the tokens that is gathered back
        return {**common, ("tp", "all_reduce", None): sums, ("tp", "slice", 0): moe, ("tp", "all_gather", 0): moe}
    return {**common, ("tp", "reduce_scatter", 0): sums, ("tp", "all_gather", 0): sums}


@pytest.mark.parametrize(
    ("model", "plan", "tp", "layers", "dense", "heads"),
    [
        (MINI, "sp", 4, 3, 2, [97, 6, 22]),
        pytest.param("deepseek-v3", "sp", 16, 61, 3, [4096, 8, 128], marks=pytest.mark.slow),
        pytest.param("deepseek-v3", "tp", 16, 61, 3, [4096, 8, 128], marks=pytest.mark.slow),
    ],
)
def test_runs_by_shape(model, plan, tp, layers, dense, heads):
    given = {"plan": plan, "mode": "shape", "tokens": heads[0], "parallel": {"tp": tp}, "layers": layers}
    summary = run(load_scenario(model, given))
    assert summary["verdict"] == "pass", summary["checks"]
    assert f"contract {plan}_prefill" in [c["name"] for c in summary["checks"]]
    assert _counts(summary) == _expected_counts(plan, layers, layers - dense)
    module = f"model.layers.{layers - 1}.self_attn.o_proj"
    assert next(b["shape"] for b in summary["boundaries"] if b["module"] == module) == heads
