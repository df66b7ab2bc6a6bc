"""The command `memory`: its JSON, its tables, comparisons, descriptions, and mistakes."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from emulator.cli import app
from emulator.model.config import load_config
from emulator.model.program import build_program
from emulator.model.quant_description import checkpoint_names

MINI = Path(__file__).parent.parent.parent / "profiles" / "models" / "glm-5.1-mini" / "config.json"
SMALL = ("glm-5.1-mini", "--dtype", "bfloat16", "--ep", "4")


def _run(*args: str):
    return CliRunner().invoke(app, ["memory", *args])


def _json(*args: str) -> dict:
    result = _run(*args, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_json_of_the_rfcs_38_gib():
    found = _json("glm-5.1", "--plan", "dsa_cp", "--dp", "2", "--ep", "32", "--quant", "w8a8", "--rules", "tensorcast")
    assert found["total_bytes"] == found["peak_load_bytes"] == 40875282432
    assert found["components"]["o_proj"] == 78 * 6144 * 16384
    assert found["categories"]["cache"] == 202752 * 64 * 2 * 2
    assert found["parallel"] == {"dp": 2, "tp": 16, "ep": 32}
    assert sum(found["components"].values()) == sum(found["categories"].values()) == 40875282432


def test_tensors_are_listed_on_demand():
    assert "tensors" not in _json(*SMALL)
    found = _json(*SMALL, "--rules", "engine", "--quant", "w8a8_dynamic", "--tensors")
    assert sum(t["bytes"] for t in found["tensors"]) == found["total_bytes"]
    assert len(found["tensors"]) == found["num_tensors"]
    derived = [t for t in found["tensors"] if t["category"] == "derived"]
    assert derived[0]["replaces"] == "model.layers.0.self_attn.kv_b_proj.weight"
    assert "model.layers.0.self_attn.kv_b_proj.weight" in {t["name"] for t in found["freed_tensors"]}
    told = _run(*SMALL, "--tensors").stdout
    assert "model.layers.0.self_attn.kv_b_proj.weight [1104, 44] bfloat16 97152 B replicated" in told
    assert "(freed)" in told


def test_people_see_components_and_the_peak():
    result = _run(*SMALL, "--group-by", "category")
    assert result.exit_code == 0
    for text in ("checkpoint_weight", "derived", "total", "peak while loading", "plan dsa_cp", "rules engine"):
        assert text in result.stdout


def test_phase_is_part_of_the_decision():
    # dsa_cp's decode steps run under plan decode: q_b_proj [24 * 28 / 4, 56] instead of the whole one
    whole, cut = (_json(*SMALL, "--phase", phase)["components"]["q_b_proj"] for phase in ("prefill", "decode"))
    assert (whole, cut) == (5 * 672 * 56 * 2, 5 * 168 * 56 * 2)


def test_options_add_bytes():
    plain = _json(*SMALL)
    mtp = _json(*SMALL, "--mtp")
    assert mtp["components"]["mtp"] == mtp["total_bytes"] - plain["total_bytes"] > 0
    assert _json(*SMALL, "--nz")["total_bytes"] > plain["total_bytes"]


def test_two_settings_are_compared():
    args = (*SMALL, "--plan", "tp", "--rules", "tensorcast-old", "--quant", "w8a8", "--variant", "embedding=replicated")
    found = _json(*args, "--compare", "tensorcast", "--compare", "plan=dsa_cp", "--compare", "variant.embedding=row")
    assert (found["first"]["plan"], found["second"]["plan"]) == ("tp", "dsa_cp")
    assert (found["first"]["rules"], found["second"]["rules"]) == ("tensorcast-old", "tensorcast")
    assert (found["first"]["variants"]["embedding"], found["second"]["variants"]["embedding"]) == ("replicated", "row")
    rows = {row["name"]: row for row in found["difference"]["rows"]}
    assert rows["embed_tokens"]["delta_bytes"] == -312 * 144 * 2 * 3 // 4
    assert sum(row["delta_bytes"] for row in rows.values()) == found["difference"]["delta_bytes"]
    kept = _json(*args, "--variant", "attention=replicated", "--compare", "plan=dsa_cp")["second"]["variants"]
    assert kept["embedding"] == "replicated"  # which dsa_cp offers, too, as it does not attention
    assert "attention" not in kept
    told = _run(*args, "--compare", "tp=2", "--compare", "ep=2").stdout
    assert "o_proj: self_attn.o_proj.weight: 5 x [144, 156] int8 tp:shard(1) -> 5 x [144, 312] int8 tp:shard(1)" in told
    told = _run(*args, "--compare", "engine", "--group-by", "category").stdout
    assert "derived: self_attn.kv_b_proj.W_UV: none -> 5 x [6, 44, 26] bfloat16 tp:shard(0)" in told
    assert "-> 5 x [156, 144] int8 tp:shard(0)" not in told  # transposed, at no cost
    # 5 linears of attention, 3 of dense MLPs, 3 of shared experts and 2 of routed ones: 8 are shown
    assert "weight_scale: ... and 5 more tensors" in told


def _with_description(folder: Path, *missing: str) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(MINI.read_text())
    types = {}
    for name, parameter in build_program(load_config("glm-5.1-mini")).parameters.items():
        for part in checkpoint_names(name, tuple(parameter.shape)) if name.endswith(".weight") else ():
            quantised = parameter.dim() > 1 and ("o_proj" in name or ".experts." in name)
            types[part] = "W8A8_DYNAMIC" if quantised and part not in missing else "FLOAT"
    path = folder / "quant_model_description.json"
    path.write_text(json.dumps(types))
    return path


def test_a_description_beside_the_config_wins_over_the_scheme(tmp_path):
    path = _with_description(tmp_path / "model")
    args = ("--plan", "tp", "--rules", "engine", "--quant", "w8a8", "--dtype", "bfloat16", "--tp", "4", "--ep", "4")
    found = _json(str(path.parent), *args)
    assert found["description"] == str(path)
    assert found["components"]["o_proj"] == 5 * (144 * 156 + 144 * (2 + 2 + 4))  # dynamic, not the scheme's static
    assert found["components"]["q_a_proj"] == 5 * 56 * 144 * 2  # float, though the scheme quantises it
    assert _json("glm-5.1-mini", *args, "--description", str(path))["total_bytes"] == found["total_bytes"]


def test_a_description_that_disagrees_is_an_error(tmp_path):
    path = _with_description(tmp_path / "model", "model.layers.3.mlp.experts.7.up_proj.weight")
    result = _run(str(path.parent))
    assert result.exit_code == 2
    assert result.stderr.startswith("error: ")
    assert "model.layers.3.mlp.experts.7.up_proj.weight is FLOAT, but" in result.stderr


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (("--quant", "w8"), "unknown quantisation scheme 'w8'"),
        (("--rules", "engin"), "unknown accounting rules 'engin'"),
        (("--phase", "training"), "phase 'training': expected prefill or decode"),
        (("--group-by", "module"), "--group-by module: expected component, category, layer"),
        (("--compare", "tokens=3"), "--compare tokens=: expected one of plan, rules"),
        (("--compare", "tp=two"), "--compare tp=two: expected a whole number"),
        (("--variant", "embedding"), "--variant embedding: expected key=value"),
        (("--tp", "5"), "tp 5 does not divide"),
        (("--rank", "4"), "rank 4: the mesh has ranks 0 to 3"),
        (("--description", "nowhere.json"), "nowhere.json: not readable as JSON"),
    ],
)
def test_mistakes_are_one_clear_line(args, told):
    result = _run("glm-5.1-mini", *args)
    assert result.exit_code == 2
    assert told in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
