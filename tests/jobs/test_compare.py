"""Several plans side by side: the same values, and worked numbers of work, communication and memory."""

import json

import pytest
from typer.testing import CliRunner

from emulator.cli import app
from emulator.errors import UsageError
from emulator.jobs.compare import compare
from emulator.scenario import load_scenario


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    """glm-5.1-mini, tp 4, 16 tokens: hidden 144, KV row 88, 24 heads of 26 values, 2 dense and 1 MoE layer."""
    scenario = load_scenario("glm-5.1-mini", {"tokens": 16, "layers": 3})
    return compare(scenario, ["tp", "dsa_cp", "dsa_cp_engine"], tmp_path_factory.mktemp("compare"))


def _plan(result: dict, name: str) -> dict:
    return next(p for p in result["plans"] if p["plan"] == name)


def test_all_plans_hold_against_one_reference(result):
    assert result["verdict"] == "pass"
    assert [p["plan"] for p in result["plans"]] == ["tp", "dsa_cp", "dsa_cp_engine"]
    for plan in result["plans"]:
        assert [r["rank"] for r in plan["ranks"]] == [0, 1, 2, 3]
        assert all(r["checked"] > 50 and r["failures"] == 0 and r["max_rel_error"] < 1e-9 for r in plan["ranks"])


def test_calls_and_bytes_of_a_rank(result):
    sent, calls = (
        _plan(result, "dsa_cp_engine")["ranks"][1]["sent"],
        _plan(result, "dsa_cp_engine")["ranks"][1]["calls"],
    )
    # KV row and o_proj weight a layer, tokens of 2 dense MLPs and of lm_head, logits
    assert calls["tp all_gather"] == 3 + 3 + 2 + 1 + 1
    rows, weights, tokens = 3 * 4 * 88, 3 * 144 * 624 // 4, (2 + 1) * 4 * 144
    assert sent["all_gather"] == 3 * 8 * (rows + weights + tokens + 16 * 312 // 4)
    # embedding and 2 dense MLPs: all but what a rank keeps of [16, 144]
    assert calls["tp reduce_scatter"] == 3
    assert sent["reduce_scatter"] == 3 * 8 * 12 * 144


def test_o_proj_weights_and_work(result):
    """o_proj [144, 624]: a quarter under tp and in the engine's storage, whole under dsa_cp."""
    tp, dsa_cp, engine = (_plan(result, p)["ranks"][0] for p in ("tp", "dsa_cp", "dsa_cp_engine"))
    assert dsa_cp["weight_bytes"] - engine["weight_bytes"] == 3 * 8 * 144 * 624 * 3 // 4
    # dsa_cp attends for every token with all heads on every rank, the engine for its own 4 of 16
    assert engine["flops"] < tp["flops"] < dsa_cp["flops"]
    assert dsa_cp["peak_at"].startswith("mla_sparse_attention of model.layers.")


def test_variants_go_to_the_plans_that_have_them(tmp_path):
    scenario = load_scenario("glm-5.1-mini", {"tokens": 5, "layers": 1, "variants": {"attention": "replicated"}})
    found = compare(scenario, ["tp", "sp"], tmp_path)
    assert [p["variants"].get("attention") for p in found["plans"]] == ["replicated", None]
    with pytest.raises(UsageError, match="no plan of sp has a variant 'attention'"):
        compare(scenario, ["sp"], tmp_path)


def test_command(tmp_path):
    arguments = ["compare", "glm-5.1-mini", "--tokens", "5", "--layers", "1", "--plans", "tp,sp"]
    shown = CliRunner().invoke(app, [*arguments, "--out", str(tmp_path)])
    assert shown.exit_code == 0
    assert "plan sp: pass" in shown.output
    assert (tmp_path / "sp" / "rank_3.jsonl").exists()
    found = json.loads(CliRunner().invoke(app, [*arguments, "--json"]).output)
    assert [p["verdict"] for p in found["plans"]] == ["pass", "pass"]
    assert shown.stderr == ""
    twice = CliRunner().invoke(app, ["compare", "glm-5.1-mini", "--plans", "tp,tp"])
    assert (twice.exit_code, twice.stderr) == (2, "error: --plans: tp is named twice\n")
