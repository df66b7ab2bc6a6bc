"""The multi-token-prediction layer on ranks: values, contracts and caches on the plans."""

import pytest

from emulator.jobs.job import run
from emulator.scenario import load_scenario, parse_requests
from emulator.trace.record import read_trace, trace_files
from emulator.verify.contract import Contract, check_folder, load_contract

PLANS = ("tp", "sp", "dsa_cp", "dsa_cp_engine")
OTHERS = ("dsa_cp_engine_a", "dsa_cp_engine_c", "sglang_in_seq", "sglang_round_robin", "vllm_sharded",
          "xllm_flashcomm1")  # fmt: skip
MODELS = ("glm-5.1-mini", "deepseek-v3.2-mini")
DECODE = ["13", "2:13", "1:15"]
WORKLOADS = {"ragged": ["5,3:10,1:100"], "fewer tokens than ranks": ["3"], "decode": DECODE}


def _run(plan, model="glm-5.1-mini", tp=4, steps=("5,3:10,1:100",), out=None, **more):
    batches = [parse_requests(s).model_dump() for s in steps]
    given = {"plan": plan, "parallel": {"tp": tp}, "step": batches, "layers": 3, "mtp": True, **more}
    return run(load_scenario(model, given), out)


def _assert_right(summary):
    assert summary["verdict"] == "pass", (summary["checks"], summary["first_failure"], summary["culprit"])
    assert summary["max_rel_error"] < 1e-9
    assert any(c["name"].startswith("contract") for c in summary["checks"])
    head = [b for b in summary["boundaries"] if b["module"] == "model.layers.3.shared_head.head"]
    assert {b["shape"][1] for b in head if b["port"] == "output"} == {312}  # logits of the whole vocabulary


@pytest.mark.parametrize("plan", PLANS)
def test_ragged_requests_and_decode_steps(plan):
    _assert_right(_run(plan, steps=["5,3:10,1:100", "1:5,2:13,1:101"]))


@pytest.mark.parametrize("plan", PLANS)
def test_fewer_tokens_than_ranks(plan):
    summary = _run(plan, "deepseek-v3.2-mini", steps=["3"])
    assert summary["verdict"] == "pass", (summary["checks"], summary["first_failure"])


@pytest.mark.slow
@pytest.mark.parametrize("plan", [*PLANS, *OTHERS])
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("workload", WORKLOADS)
def test_all_workloads(workload, tp, model, plan):
    summary = _run(plan, model, tp, WORKLOADS[workload])
    assert summary["verdict"] == "pass", (summary["checks"], summary["first_failure"])
    assert summary["max_rel_error"] < 1e-9


def test_the_contract_counts_its_calls_and_names_no_other(tmp_path):
    """Beside the model's calls: one reduce_scatter of the embedding, one gather of rows and one of logits."""
    _run("dsa_cp", steps=["13"], out=tmp_path)
    traces = [read_trace(path) for path in trace_files(tmp_path)]
    contract = load_contract("dsa_cp_prefill")
    assert check_folder(contract, traces)["verdict"] == "pass"
    without = [r for r in contract.collective if r.per != "mtp_layer"]
    unnamed = check_folder(Contract(description="", collective=without), traces)["breaches"]
    assert sorted(b["module"] for b in unnamed if b["rank"] == 0) == [
        "model.layers.3.embed_tokens", "model.layers.3.shared_head.head", "model.layers.3.shared_head.head",
    ]  # fmt: skip


def test_a_run_without_it_does_not_meet_its_contract(tmp_path):
    _run("dsa_cp", steps=["13"], mtp=False, out=tmp_path)
    traces = [read_trace(path) for path in trace_files(tmp_path)]
    contract = load_contract("dsa_cp_prefill")
    assert check_folder(contract, traces)["verdict"] == "pass"
    for _, records in traces:
        for record in records:
            if record["kind"] == "step":
                record["symbols"]["mtp_layers"] = 1
    missing = {b["module"] for b in check_folder(contract, traces)["breaches"]}
    assert {"model.layers.*.embed_tokens", "model.layers.*.eh_proj", "model.layers.*.shared_head.head"} <= missing
