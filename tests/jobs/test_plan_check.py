"""Plans against contracts without ranks: every contract accepts its own plan and names where others part from it."""

import json

import pytest
from typer.testing import CliRunner

from emulator import profiles
from emulator.cli import app
from emulator.errors import UsageError
from emulator.jobs.plan_check import check_plan, rank_records
from emulator.jobs.prepare import prepare
from emulator.layout.plan import load_plan
from emulator.scenario import RequestSpec, Scenario, StepSpec
from emulator.verify.contract import check_trace, load_contract

PLANS = profiles.names("plans")
# plans that a contract describes beside the one that names it: the same layout reached by another table
ALSO = {
    "decode": {"tp"},
    "sp_prefill": {"vllm_sharded"},
    # era A without layer sharding is era B
    "engine_a_prefill": {"dsa_cp_engine", "dsa_cp_engine_a_decode"},
    "engine_a_decode": {"dsa_cp_engine_decode", "dsa_cp_engine_a"},
}


def _scenario(plan: str, **more) -> Scenario:
    return Scenario(model="glm-5.1-mini", plan=plan, step=[StepSpec(requests=[RequestSpec(q=13)])], layers=4, **more)


@pytest.fixture(scope="module")
def runs():
    """Plan -> (part, records of rank 0)."""
    parts = {plan: prepare(_scenario(plan, mode="shape"), graph_only=True) for plan in PLANS}
    return {plan: (part, rank_records(part)) for plan, part in parts.items()}


@pytest.mark.parametrize("contract", profiles.names("contracts"))
def test_a_contract_accepts_its_own_plan_and_rejects_the_others(contract, runs):
    loaded, accepted, at_boundary = load_contract(contract), set(), 0
    for plan, (part, records) in runs.items():
        breaches = check_trace(loaded, records, part.symbols, part.rank_graph.plan.variants)
        if breaches:
            at_boundary += any(b.port != "inside" for b in breaches)
        else:
            accepted.add(plan)
    own = {plan for plan in PLANS if load_plan(plan).contract == contract}
    assert own
    assert accepted == own | ALSO.get(contract, set())
    assert at_boundary >= 3  # rejected, with a boundary to name


FULL, LOCAL = "full-token [13, 144]", "local-token [4, 144]"


@pytest.mark.parametrize(
    ("plan", "contract", "first"),
    [
        ("dsa_cp", "engine_ab_prefill", f"input of model.layers.0.self_attn is {FULL}; the contract: {LOCAL}"),
        ("dsa_cp_engine", "dsa_cp_prefill", f"input of model.layers.0.self_attn is {LOCAL}; the contract: {FULL}"),
        (
            "dsa_cp_engine_c", "engine_ab_prefill",
            f"input of model.layers.0.input_layernorm is {FULL}; the contract: {LOCAL}",
        ),
        (
            "sp", "dsa_cp_prefill",
            "output of model.layers.0.self_attn.attn is shard(1) [13, 6, 26]; the contract: full-token [13, 24, 26]",
        ),
        (
            "sglang_in_seq", "sglang_round_robin_prefill",
            "is local-token(zigzag) [4, 144]; the contract: local-token(round_robin) [4, 144]",
        ),
        (
            "xllm_flashcomm1", "vllm_sharded_prefill",
            f"input of model.layers.0.mlp.gate_proj is {FULL}; the contract: {LOCAL}",
        ),
    ],
)  # fmt: skip
def test_the_first_differing_boundary_is_named(plan, contract, first):
    result = check_plan(_scenario(plan), contract)
    assert result["verdict"] == "fail"
    assert first in result["first_boundary"]


def test_layers_that_differ_alike_are_one_difference():
    result = check_plan(_scenario("dsa_cp_engine"), "dsa_cp_prefill")
    found = [d for d in result["differences"] if d["module"].endswith("self_attn") and d["port"] == "input"]
    assert found[0]["layers"] == [0, 1, 2, 3]


def test_eras_a_and_b_part_in_their_collectives():
    result = check_plan(_scenario("dsa_cp_engine_a"), "engine_ab_prefill")
    assert result["first_boundary"] is None
    assert "broadcast on tp in model.layers.1.self_attn" in result["differences"][0]["detail"]


def test_a_plan_without_contract_is_refused(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text('description = "x"\nextends = "sp"\ncontract = ""\n')
    with pytest.raises(UsageError, match="names no contract: say which with --contract"):
        check_plan(_scenario(str(path)))


def test_command():
    good = CliRunner().invoke(app, ["plan", "check", "dsa_cp_engine", "--tp", "2", "--json"])
    assert good.exit_code == 0
    assert json.loads(good.output)["contract"] == "engine_ab_prefill"
    bad = CliRunner().invoke(app, ["plan", "check", "tp", "--contract", "dsa_cp_prefill"])
    assert bad.exit_code == 1
    assert "first differing boundary: input of model.layers.0.input_layernorm is full-token [13, 144]" in bad.output
    unknown = CliRunner().invoke(app, ["plan", "check", "tp", "--contract", "nothing"])
    assert unknown.exit_code == 2


@pytest.mark.parametrize(
    ("arguments", "says"),
    [(("--tokens", "-3"), "tokens = -3"), (("--tp", "0"), "parallel.tp = 0"), (("--dp", "0"), "parallel.dp = 0")],
)
def test_sizes_out_of_range_are_one_line(arguments, says):
    found = CliRunner().invoke(app, ["plan", "check", "dsa_cp", *arguments])
    assert found.exit_code == 2
    assert found.stderr == f"error: plan check: {says}: input should be greater than 0\n"
