"""The ways to o_proj of vLLM-Ascend: weight gather, all_to_all, layer-sharded broadcast, whole weight; which one when,
and that all give the same values."""

import json

import pytest

from emulator import profiles
from emulator.errors import LayoutError
from emulator.jobs.job import run
from emulator.scenario import load_scenario, parse_requests

BATCHES = {"prefill": "6,3", "decode": "1:20,2:9,1:33", "mixed": "1:20,6,1:7"}
GATHER, EXCHANGE = {"all_gather"}, {"all_to_all", "reduce_scatter"}


def _summary(plan: str, requests: str, model: str = "glm-5.1-mini", **more) -> dict:
    given = {"plan": plan, "layers": 2, "step": [parse_requests(requests).model_dump()], **more}
    summary = run(load_scenario(model, given))
    assert summary["verdict"] == "pass", (summary["checks"], summary["first_failure"], summary["culprit"])
    assert summary["max_rel_error"] < 1e-9
    return summary


def _calls(summary: dict) -> dict[str, int]:
    """op -> calls of o_proj and q_b_proj, all layers."""
    found: dict[str, int] = {}
    for call in summary["collectives"]:
        if call["module"].endswith(("self_attn.o_proj", "self_attn.q_b_proj")):
            found[call["op"]] = found.get(call["op"], 0) + call["count"]
    return found


@pytest.mark.parametrize("state", BATCHES)
@pytest.mark.parametrize("role", ["none", "producer", "consumer", "both"])
def test_roles_and_states(role, state):
    """Era A: layer sharding for a producer only; tp shards, gathered or exchanged by state, without a role and with
    both; the state is that of the whole batch, whatever rows a rank holds."""
    calls = _calls(_summary("dsa_cp_engine_a", BATCHES[state], variants={"kv_role": role}))
    if role == "producer":
        assert calls == {"broadcast": 2 * 2}  # q_b_proj and o_proj of 2 layers
    elif role == "consumer":
        assert calls == {}
    else:
        assert set(calls) == (EXCHANGE if state == "decode" else GATHER)


@pytest.mark.parametrize(
    ("role", "state", "ops"),
    [("producer", "prefill", GATHER), ("producer", "decode", EXCHANGE), ("consumer", "mixed", set())],
)
def test_roles_of_era_b(role, state, ops):
    assert set(_calls(_summary("dsa_cp_engine", BATCHES[state], variants={"kv_role": role}))) == ops


def test_all_to_all_serves_prefill_too():
    """9 prefill tokens over 4 ranks: one all_to_all and one reduce_scatter a layer more, the weight gather 0 instead of
    1, and the same local rows (3 a rank, the last all padding)."""
    gathered, exchanged = (_summary(plan, "9") for plan in ("dsa_cp_engine", "dsa_cp_engine_decode"))
    assert _calls(gathered) == {"all_gather": 2}
    assert _calls(exchanged) == {"all_to_all": 2, "reduce_scatter": 2}
    local = [
        [b["shape"] for b in s["boundaries"] if b["module"].endswith("o_proj") and b["port"] == "output"]
        for s in (gathered, exchanged)
    ]
    assert local[0] == local[1] == [[3, 144]] * 2


def test_a_role_that_takes_neither_path_is_refused(tmp_path):
    """Rows with all heads against a tp shard: K 624 meets K 156 (16384 meets 4096 in GLM-5)."""
    path = tmp_path / "neither.toml"
    row = '{ input = "local-token", weight = "shard(1)", use = "stored", start = "", output = "local-token" }'
    path.write_text(
        f'description = "x"\nextends = "dsa_cp_engine"\n[modules]\n"model.layers.*.self_attn.o_proj" = {row}\n'
    )
    with pytest.raises(
        LayoutError, match=r"model\.layers\.0\.self_attn\.o_proj: linear found local-token x shard\(1\)"
    ):
        run(load_scenario("glm-5.1-mini", {"plan": str(path), "layers": 2, "tokens": 9}))


@pytest.mark.parametrize("plan", ["dsa_cp_engine", "dsa_cp_engine_a", "dsa_cp_engine_c", "dsa_cp_engine_decode", "tp"])
def test_a_bias_counts_once_on_every_path(plan, tmp_path):
    """Added on every rank where the weight is whole, as one rank's share where a sum completes the product."""
    config = json.loads((profiles.find("models", "glm-5.1-mini") / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "attention_bias": True}))
    _summary(plan, "9", str(tmp_path))
