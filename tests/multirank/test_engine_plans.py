"""The engine's layouts: local queries with gathered KV, in two eras, prefill and decode; the values of every plan."""

import pytest

from emulator.jobs.job import run
from emulator.layout.windows import GlobalBatch, local_batch
from emulator.scenario import load_scenario, parse_requests

from .test_batches import NINE_DECODES, WORKLOADS

PLANS = ("dsa_cp_engine", "dsa_cp_engine_c")
OTHERS = ("dsa_cp_engine_a", "sglang_in_seq", "sglang_round_robin", "vllm_sharded", "xllm_flashcomm1")


def _summary(workload: str, plan: str, model: str = "glm-5.1-mini", **more) -> dict:
    tp, dp, steps = WORKLOADS[workload]
    batches = [parse_requests(s).model_dump() for s in steps]
    given = {"plan": plan, "parallel": {"tp": tp, "dp": dp}, "step": batches, "layers": 3, **more}
    summary = run(load_scenario(model, given))
    assert summary["verdict"] == "pass", (summary["checks"], summary["first_failure"], summary["culprit"])
    assert summary["max_rel_error"] < 1e-9
    return summary


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("workload", WORKLOADS)
def test_workloads(workload, plan):
    summary = _summary(workload, plan)
    names = {c["name"] for c in summary["checks"]}
    era = "engine_c" if plan.endswith("_c") else "engine_ab"
    phases = {"decode" if s["phase"] == "decode" else "prefill" for s in summary["steps"]}
    assert {f"contract {era}_{phase}" for phase in phases} <= names


@pytest.mark.parametrize("plan", OTHERS)
@pytest.mark.parametrize("workload", ["ragged", "fewer tokens than ranks"])
def test_layouts_of_other_engines(workload, plan):
    """Era A's layer-sharded weights, SGLang's token orders, vLLM's and xLLM's sequence parallelism."""
    _summary(workload, plan)


@pytest.mark.parametrize("plan", ["dsa_cp", "dsa_cp_engine", "sglang_in_seq"])
@pytest.mark.parametrize("workload", ["ragged", "more keys than top-k"])
def test_where_no_sum_is_reordered_values_and_caches_are_the_references_bits(workload, plan):
    summary = _summary(workload, plan, variants={"dense_mlp": "replicated"})
    assert summary["max_abs_error"] == 0.0
    (caches,) = [c["detail"] for c in summary["checks"] if c["name"] == "caches"]
    assert "24 of 24 cache values bit-equal to the reference" in caches  # 3 layers, latent and index keys, 4 ranks


@pytest.mark.slow
@pytest.mark.parametrize("model", ["glm-5.1-mini", "deepseek-v3.2-mini"])
@pytest.mark.parametrize("plan", [*PLANS, *OTHERS])
@pytest.mark.parametrize("tp", [2, 4, 8])
@pytest.mark.parametrize("workload", [w for w, (_, dp, _) in WORKLOADS.items() if dp == 1])
def test_all_workloads(workload, plan, tp, model):
    _summary(workload, plan, model, parallel={"tp": tp})


def test_shared_indexers_read_local_ids():
    given = {"plan": "dsa_cp_engine", "tokens": 13, "model_sizes": {"index_topk_freq": 3}}
    summary = run(load_scenario("glm-5.1-mini", given))
    assert summary["verdict"] == "pass", (summary["checks"], summary["first_failure"])
    ids = [b for b in summary["boundaries"] if b["module"] == "model.layers.3.self_attn" and b["shape"] == [4, 32]]
    assert [b["layout"] for b in ids] == ["local-token"]  # those of layer 1, in its layout


def _calls(summary: dict) -> dict:
    keep = ("self_attn", "self_attn.cache", "self_attn.o_proj")
    found = {}
    for c in summary["collectives"]:
        module = c["module"].removeprefix("model.layers.*.")
        if module in keep:
            found[module, c["op"]] = (c["input_shape"], c["output_shape"], c["count"])
    return found


@pytest.mark.parametrize("plan", ["dsa_cp_engine_c", pytest.param("dsa_cp_engine", marks=pytest.mark.slow)])
def test_full_size_calls_of_an_attention_layer(plan):
    """GLM-5.1, 4096 tokens, tp 16: rows of 704 gathered, o_proj [6144, 16384] gathered from shards of 1024 columns."""
    summary = run(load_scenario("glm-5.1", {"plan": plan, "layers": 4}))
    assert summary["verdict"] == "pass", summary["checks"]
    expected = {
        ("self_attn.cache", "all_gather"): ([256, 704], [4096, 704], 4),
        ("self_attn.o_proj", "all_gather"): ([6144, 1024], [6144, 16384], 4),
    }
    if plan == "dsa_cp_engine_c":  # cuts the full hidden states; the output gather has o_proj's module, too
        expected["self_attn", "slice"] = ([4096, 6144], [256, 6144], 4)
        expected["self_attn.o_proj", "all_gather"] = ([256, 6144], [4096, 6144], 4)
    assert _calls(summary) == expected


@pytest.mark.parametrize(
    ("plan", "last"),
    [
        ("dsa_cp_engine", ("reduce_scatter", [12, 144], [3, 144])),
        ("dsa_cp_engine_c", ("all_reduce", [9, 144], [9, 144])),
    ],
)
def test_decode_changes_tokens_and_heads(plan, last):
    calls = _calls(_summary("nine decodes", plan))
    assert calls["self_attn.o_proj", "all_to_all"] == ([3, 24, 26], [12, 6, 26], 3)
    assert calls["self_attn.o_proj", last[0]] == (*last[1:], 3)
    assert ("self_attn.o_proj", "all_gather") not in calls


def test_local_lengths_are_the_engines():
    """The op's lengths against the windows' worked rules, on the batches of engine_layouts and more ranks than rows."""
    import torch

    from emulator.ops.transition import local_lengths

    for text, parts in (("5,3:10,1:100", 4), ("6:1024,7", 4), (NINE_DECODES, 4), ("3", 8), ("2:18,2:18,2:18", 4)):
        [requests] = parse_requests(text).by_dp_rank()
        real = sum(r.query for r in requests)
        batch = GlobalBatch(tuple(requests), tuple(range(real)), -(-real // parts) * parts)
        per = batch.rows // parts
        q, kv = (torch.tensor(x) for x in (batch.query_lens, batch.kv_lens))
        for index in range(parts):
            found = local_lengths(q, kv, index * per, (index + 1) * per)
            local = local_batch(batch, parts=parts, index=index)
            assert [f.tolist() for f in found] == [list(local.query_lens), list(local.kv_lens)]
