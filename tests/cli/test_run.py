"""The command line: exit codes, one clear line for mistakes, and --json."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from emulator.cli import app

MINI = Path(__file__).parent.parent.parent / "profiles" / "models" / "glm-5.1-mini" / "config.json"


def _run(*args: str):
    return CliRunner().invoke(app, list(args))


def _summary(tmp_path: Path, *args: str) -> dict:
    result = _run("run", "glm-5.1-mini", "--layers", "3", "--tokens", "13", "--out", str(tmp_path), "--json", *args)
    assert result.exit_code in (0, 1), result.output
    return json.loads(result.stdout)


def test_json_is_the_only_thing_on_stdout(tmp_path):
    summary = _summary(tmp_path / "out")
    assert summary["verdict"] == "pass"
    assert {"checks", "first_failure", "collectives", "boundaries", "max_abs_error", "max_rel_error", "wall_s"} <= set(
        summary
    )
    assert set(summary["peak_rss_mb"]) == {"total", "per_rank"}
    assert set(summary["collectives"][0]) == {
        "group", "op", "dim", "module", "input_shape", "output_shape", "count", "bytes_per_rank",
    }  # fmt: skip
    assert {"layer", "module", "layout", "shape"} <= set(summary["boundaries"][0])
    assert json.loads((tmp_path / "out" / "summary.json").read_text()) == summary
    assert sorted(p.name for p in (tmp_path / "out").glob("rank_*")) == [f"rank_{r}.jsonl" for r in range(4)]


def test_people_see_a_table_and_a_verdict(tmp_path):
    result = _run("run", "glm-5.1-mini", "--layers", "3", "--tokens", "13", "--out", str(tmp_path))
    assert result.exit_code == 0
    for text in ("self_attn.o_proj", "local-token", "[4, 24, 26]", "all_gather", "verdict: pass"):
        assert text in result.stdout


def test_a_failed_check_exits_1_and_names_the_boundary(tmp_path):
    result = _run(
        "run", "glm-5.1-mini", "--layers", "3", "--tokens", "13", "--out", str(tmp_path),
        "--variant", "shared_experts=allreduce_local", "--no-static-check",
    )  # fmt: skip
    assert result.exit_code == 1
    assert "model.layers.2.mlp.shared_experts.down_proj" in result.stdout
    assert "verdict: fail" in result.stdout


def test_check_reads_the_traces_of_a_run(tmp_path):
    _summary(tmp_path)
    assert _run("check", str(tmp_path), "--contract", "dsa_cp_prefill").exit_code == 0
    other = _run("check", str(tmp_path), "--contract", "tp_prefill", "--json")
    assert other.exit_code == 1
    assert json.loads(other.stdout)["verdict"] == "fail"


def test_traces_of_an_earlier_run_do_not_linger(tmp_path):
    _summary(tmp_path, "--tp", "6")
    _summary(tmp_path, "--tp", "2")
    assert len(list(tmp_path.glob("rank_*.jsonl"))) == 2


def _cut_config(folder: Path) -> list[str]:
    folder.mkdir()
    (folder / "config.json").write_text(MINI.read_text()[:300])
    return [str(folder)]


def _no_structure(folder: Path) -> list[str]:
    folder.mkdir()
    config = json.loads(MINI.read_text())
    del config["q_lora_rank"]
    (folder / "config.json").write_text(json.dumps(config))
    return [str(folder)]


def _unknown_module(folder: Path) -> list[str]:
    folder.mkdir()
    row = '[modules]\n"model.layers.*.self_attn.oproj" = { input = "local-token" }\n'
    (folder / "mine.toml").write_text('description = "typo"\nextends = "sp"\n' + row)
    return ["glm-5.1-mini", "--plan", str(folder / "mine.toml")]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda folder: ["nosuch"], ["nosuch", "glm-5.1-mini"]),
        (lambda folder: ["glm-5.1-mini", "--plan", "tp", "--tp", "5"], ["tp 5", "24 heads", "q_b_proj"]),
        (_cut_config, ["config.json", "not valid JSON"]),
        (_no_structure, ["no MLA structure", "q_lora_rank"]),
        (_unknown_module, ["model.layers.*.self_attn.oproj"]),
        (lambda folder: ["glm-5.1-mini", "--tokens", "0"], ["tokens", "greater than 0"]),
        (lambda folder: ["glm-5.1-mini", "--variant", "embedding=blue"], ["blue", "row", "replicated"]),
        (lambda folder: ["glm-5.1-mini", "--variant", "nonsense"], ["key=value"]),
        (lambda folder: ["glm-5.1-mini", "--weights", str(folder)], ["model.safetensors"]),
        (lambda folder: ["glm-5.1-mini", "--dp", "2", "--requests", "3"], ["step 0", "dp is 2"]),
        (lambda folder: ["glm-5.1-mini", "--requests", "3:x"], ["3:x", "q:context"]),
        (lambda folder: ["glm-5.1-mini", "--requests", "3", "--requests", "1:5"], ["context 5", "3 tokens"]),
        (lambda folder: ["glm-5.1-mini", "--variant", "shared_experts=allreduce_local"],
         ["model.layers.2.mlp.shared_experts.gate_proj", "local-token", "allowed"]),
    ],
)  # fmt: skip
def test_bad_input_is_one_clear_line(make, words, tmp_path):
    result = _run("run", *make(tmp_path / "made"), "--out", str(tmp_path / "out"))
    assert result.exit_code == 2
    assert result.stdout == ""
    lines = result.stderr.strip().splitlines()
    layouts = lines[0].startswith("error: static check")  # every broken rule has its line
    assert len(lines) == (3 if layouts else 1), lines
    assert lines[0].startswith("error: ")
    for word in words:
        assert word in result.stderr


def test_plan_show_and_profiles():
    shown = _run("plan", "show", "dsa_cp", "--variant", "embedding=replicated")
    assert shown.exit_code == 0
    assert "self_attn.o_proj" in shown.stdout
    assert "embedding=replicated" in shown.stdout
    listed = _run("profiles").stdout
    for name in ("glm-5.1-mini", "deepseek-v3.2", "dsa_cp", "tp_prefill"):
        assert name in listed


def test_a_failing_rank_exits_3_and_keeps_the_trace(tmp_path, monkeypatch):
    import emulator.jobs.rank as rank_module

    honest = rank_module.local_shard

    def failing(weight, layout, mesh, rank):
        if rank == 2 and weight.shape == (144, 264):  # the first dense down_proj
            raise RuntimeError("broken memory")
        return honest(weight, layout, mesh, rank)

    monkeypatch.setattr(rank_module, "local_shard", failing)
    result = _run("run", "glm-5.1-mini", "--tokens", "13", "--out", str(tmp_path))
    assert result.exit_code == 3
    assert "rank 2: RuntimeError: broken memory" in result.stderr
    assert "model.layers.0.mlp" in result.stderr
    assert len((tmp_path / "rank_2.jsonl").read_text().splitlines()) > 10


def test_torchrun_does_the_same_job(tmp_path):
    args = ["-m", "emulator", "run", "glm-5.1-mini", "--layers", "3", "--tokens", "13", "--json"]
    launched = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", *args, "--out", str(tmp_path / "a")],
        capture_output=True, text=True, timeout=120, cwd=tmp_path,
    )  # fmt: skip
    assert launched.returncode == 0, launched.stderr
    theirs, ours = json.loads(launched.stdout), _summary(tmp_path / "b", "--tp", "2")
    varying = {"wall_s", "peak_rss_mb", "out_dir"}
    assert {k: v for k, v in theirs.items() if k not in varying} == {k: v for k, v in ours.items() if k not in varying}


def test_inject_names_the_node_and_shrinks(tmp_path):
    result = _run(
        "inject", "all-reduce-twice", "glm-5.1-mini", "--tokens", "13", "--layers", "3", "--shrink", "--json",
        "--out", str(tmp_path / "out"),
    )  # fmt: skip
    assert result.exit_code == 1
    summary = json.loads(result.stdout)
    assert summary["culprit"]["kind"] == "reduced_twice"
    assert "all_reduce" in summary["culprit"]["op"]
    shrunk = summary["shrunk"]
    assert shrunk["sizes"]["tp"] == 2
    assert 'fault = "all-reduce-twice"' in Path(shrunk["scenario"]).read_text()
    again = _run("run", shrunk["scenario"], "--json", "--out", str(tmp_path / "again"))
    assert again.exit_code == 1
    assert json.loads(again.stdout)["culprit"]["kind"] == "reduced_twice"


def test_a_users_pass_from_a_file(tmp_path):
    (tmp_path / "mine.py").write_text(
        """
import operator
import torch
from torch import fx
from emulator.passes.library import sequence_parallel_pass

def gathers_output_1(gm):
    gm = sequence_parallel_pass(gm)
    for node in list(gm.graph.nodes):
        if node.target is operator.getitem and node.args[1] == 1 and "post_attention" in node.meta["module"]:
            with gm.graph.inserting_after(node):
                full = gm.graph.call_function(torch.ops.emulator.all_gather, (node, "tp", 4, 0))
            node.replace_all_uses_with(full, delete_user_cb=lambda user: user is not full)
    return gm
"""
    )
    args = [
        "run",
        "glm-5.1-mini",
        "--plan",
        "tp",
        "--variant",
        "attention=replicated",
        "--tokens",
        "16",
        "--layers",
        "3",
    ]
    result = _run(*args, "--pass", f"{tmp_path}/mine.py:gathers_output_1", "--shrink", "--out", str(tmp_path / "out"))
    assert result.exit_code == 2
    for words in ("3 broken rules", "model.layers.1.input_layernorm: add_rms_norm2", "full-token (all_gather"):
        assert words in result.stderr
    assert "still     static check: add_rms_norm2 of model.layers.*.input_layernorm" in result.stdout
    assert (tmp_path / "out" / "shrunk.toml").read_text().count("mine.py:gathers_output_1") == 1


def test_mtp_adds_a_layer_with_its_own_embedding_and_head(tmp_path: Path) -> None:
    args = ["run", "glm-5.1-mini", "--layers", "1", "--tokens", "5", "--mtp", "--json", "--out", str(tmp_path)]
    result = CliRunner().invoke(app, args)
    assert result.exit_code == 0
    summary = json.loads(result.stdout)
    heads = [b["shape"] for b in summary["boundaries"] if b["module"].endswith(("lm_head", "shared_head.head"))]
    assert heads.count([5, 312]) == 2  # logits of the model and of the draft, gathered over the vocabulary
    gathers = {c["module"] for c in summary["collectives"] if c["op"] == "reduce_scatter" and "embed" in c["module"]}
    assert gathers == {"model.embed_tokens", "model.layers.*.embed_tokens"}
