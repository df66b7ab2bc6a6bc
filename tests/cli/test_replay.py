"""`emulator replay`, and `run --device`: exit codes, one clear line for mistakes, and what is printed."""

import json
import math
from pathlib import Path

import pytest
from typer.testing import CliRunner

from emulator.cli import app


def call(*args: str):
    return CliRunner().invoke(app, list(args))


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Traces of a priced run under dsa_cp."""
    out = tmp_path_factory.mktemp("run")
    args = ["--plan", "dsa_cp", "--layers", "4", "--tokens", "30", "--mode", "shape", "--device", "A3", "--json"]
    result = call("run", "glm-5.1-mini", *args, "--out", str(out))
    assert result.exit_code == 0, result.output
    (out / "stdout").write_text(result.stdout)
    return out


def replayed(folder: Path, *args: str) -> dict:
    result = call("replay", str(folder), "--device", "910C_752T", "--json", *args)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_a_run_on_a_device_has_a_cost(folder):
    summary = json.loads((folder / "stdout").read_text())
    assert json.loads((folder / "summary.json").read_text()) == summary
    own = replayed(folder)
    for timed in (summary["cost"], own):
        assert timed.pop("read_s") > 0 < timed.pop("replay_s")
    assert summary["cost"] == own
    assert own["device"] == "910C_752T"
    (step,) = own["steps"]
    assert step["rows"]["indexer"] == {"boundary": "full-token", "priced": "local tokens"}
    assert step["rows"]["attention"] == {"boundary": "full-token", "priced": "full tokens"}
    for rank in step["ranks"]:
        assert math.isclose(rank["busy"] + rank["wait"] + rank["idle"], step["seconds"], rel_tol=1e-12)


def test_the_options_change_what_is_priced(folder):
    def kernels(*args: str) -> dict:
        return replayed(folder, *args)["steps"][0]["kernels"]

    assert "QuantBatchMatmulV3" not in kernels()
    assert {"QuantBatchMatmulV3", "AscendQuantV2", "DynamicQuant"} <= set(kernels("--quant", "w8a8"))
    split = replayed(folder, "--split-attention")["steps"][0]
    assert split["rows"]["attention"] == {"boundary": "full-token", "priced": "local tokens"}
    assert split["seconds"] < replayed(folder)["steps"][0]["seconds"]


def test_measured_times_are_used_and_labelled(folder, tmp_path):
    (tmp_path / "RmsNorm.csv").write_text(
        "Input Shapes,Input Data Types,Output Shapes,Profiling Average Duration(us)\n"
        '"30,56;56",DT_BF16;DT_BF16,"30,56",1000\n'
    )
    step = replayed(folder, "--database", str(tmp_path))["steps"][0]
    module = next(m for m in step["modules"] if m["module"] == "model.layers.*.self_attn.q_a_layernorm")
    assert module["sources"] == {"measured": pytest.approx(4 * 4 * 1000e-6)}  # 4 layers on 4 ranks
    assert step["sources"]["measured"] == pytest.approx(16e-3)
    assert step["sources"]["analytic"] > 0


def test_the_readable_form(folder):
    result = call("replay", str(folder), "--device", "A3")
    assert result.exit_code == 0
    assert "priced on 910C_752T, weights 16-bit, gathers blocking" in result.stdout
    assert "indexer top-k side: full-token at the graph's boundary, priced on local tokens" in result.stdout
    assert "layers.*.self_attn.attn" in result.stdout


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--device", "H100"], "unknown device 'H100'"),
        (["--device", "A3", "--quant", "w2a2"], "unknown quantisation scheme 'w2a2'"),
        (["--device", "A3", "--step", "4"], "step 4: the trace has 0"),
        (["--device", "A3", "--database", "/nowhere"], "database /nowhere: no such folder"),
        (["--device", "A3", "--kernels", "nope"], "unknown kernel 'nope'"),
    ],
)
def test_mistakes_are_one_line_and_exit_2(folder, args, says):
    result = call("replay", str(folder), *args)
    assert result.exit_code == 2
    assert says in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


def test_an_unknown_device_is_told_before_anything_runs(tmp_path):
    result = call("run", "glm-5.1-mini", "--device", "H100", "--out", str(tmp_path / "out"))
    assert (result.exit_code, "unknown device 'H100'" in result.stderr) == (2, True)
    assert not (tmp_path / "out").exists()


def test_a_broken_trace_exits_2_with_the_place(folder, tmp_path):
    for path in folder.glob("rank_*.jsonl"):
        lines = path.read_text().splitlines()
        if path.stem == "rank_2":
            at = next(i for i, line in enumerate(lines) if '"op": "all_gather"' in line)
            record = json.loads(lines[at])
            record["outputs"][0]["shape"][0] += 1
            lines[at] = json.dumps(record)
        (tmp_path / path.name).write_text("\n".join(lines) + "\n")
    result = call("replay", str(tmp_path), "--device", "A3")
    assert result.exit_code == 2
    assert result.stderr.startswith(
        f"error: rank 2, record {record['seq']}: all_gather of {record['module']}: output ["
    )


@pytest.mark.slow
def test_the_whole_model_on_16_ranks_in_under_5_seconds(tmp_path):
    args = ["--plan", "dsa_cp_engine", "--mode", "shape", "--tp", "16", "--tokens", "4096", "--device", "A3", "--json"]
    result = call("run", "glm-5.1", *args, "--out", str(tmp_path))
    cost = json.loads(result.stdout)["cost"]
    assert len(cost["steps"][0]["ranks"]) == 16
    assert len({layer["layer"] for layer in cost["steps"][0]["layers"]}) == 78 + 1
    assert cost["replay_s"] < 5


def test_a_trace_that_ends_inside_a_step_is_said_to(folder, tmp_path):
    """All ranks stop at their first norm; nothing is left for which a rank would wait."""
    assert replayed(folder)["steps"][0]["finished"] is True
    for path in sorted(folder.glob("rank_*.jsonl")):
        lines = path.read_text().splitlines(keepends=True)
        end = next(n for n, line in enumerate(lines) if '"op": "rms_norm"' in line)
        (tmp_path / path.name).write_text("".join(lines[: end + 1]))
    assert replayed(tmp_path)["steps"][0]["finished"] is False
    assert "unfinished: a trace ends inside this step" in call("replay", str(tmp_path), "--device", "A3").stdout
