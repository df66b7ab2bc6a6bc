"""No false alarms: random sound scenarios pass every check."""

import os

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from emulator.jobs.job import run
from emulator.scenario import load_scenario

PASS = "emulator.passes.library:sequence_parallel_pass"


@st.composite
def scenarios(draw) -> tuple[str, dict]:
    """A model and what to change of its scenario. Sizes are those that plans can split: heads, widths and experts of
    the minis divide by 24."""
    tp = draw(st.sampled_from([1, 2, 3, 4, 4, 6, 8]))
    plan = draw(st.sampled_from(["tp", "sp", "dsa_cp"]))
    variants = {
        "embedding": draw(st.sampled_from(["row", "replicated"])),
        "shared_experts": draw(st.sampled_from(["replicated", "gather_scatter"])),
        "dense_mlp": draw(st.sampled_from(["gather_scatter", "replicated"])),
    }
    fields: dict = {}
    if plan == "tp" and draw(st.booleans()):
        variants["attention"] = draw(st.sampled_from(["sharded", "replicated"]))
        fields["passes"] = [PASS]
        fields["contract"] = "dsa_cp_prefill" if variants["attention"] == "replicated" else "sp_prefill"
    sizes = {
        "index_topk": draw(st.sampled_from([4, 32])),
        "moe_intermediate_size": draw(st.sampled_from([24, 120])),
        "kv_lora_rank": draw(st.sampled_from([12, 44])),
    }
    fields |= {
        "plan": plan, "variants": variants, "tokens": draw(st.integers(1, 40)), "layers": draw(st.integers(1, 4)),
        "parallel": {"tp": tp, "ep": draw(st.sampled_from([e for e in (1, tp) if tp % e == 0]))},
        "dtype": draw(st.sampled_from(["float64", "float32", "bfloat16"])), "seed": draw(st.integers(0, 10**6)),
        "latent_norm_eps": draw(st.sampled_from(["hf", "config"])), "model_sizes": sizes,
    }  # fmt: skip
    return draw(st.sampled_from(["glm-5.1-mini", "deepseek-v3.2-mini"])), fields


def _holds(case: tuple[str, dict]) -> None:
    model, fields = case
    summary = run(load_scenario(model, fields))
    assert summary["verdict"] == "pass", (case, summary["checks"], summary["first_failure"], summary["culprit"])
    assert summary["culprit"] is None


_SETTINGS = {"deadline": None, "suppress_health_check": list(HealthCheck), "database": None}


@given(scenarios())
@settings(max_examples=12, derandomize=True, **_SETTINGS)
def test_some_random_healthy_scenarios(case):
    _holds(case)


@pytest.mark.slow
@given(scenarios())
@settings(max_examples=int(os.environ.get("EMULATOR_HEALTHY", "1000")), **_SETTINGS)
def test_1000_random_healthy_scenarios(case):
    _holds(case)
