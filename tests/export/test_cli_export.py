"""`emulator export` and `emulator report`."""

import json
import shutil
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from emulator import cli
from emulator.cli import export as cli_export
from emulator.errors import RankError

app = typer.Typer()
cli_export.register(app)


def invoke(*args: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, [str(arg) for arg in args])
    return result.exit_code, result.stdout, result.stderr


@pytest.mark.parametrize(
    ("form", "made"),
    [
        ("perfetto", "out.json"),
        ("mindstudio", "out.json/rank3_glm-5-1-mini_ascend_pt/ASCEND_PROFILER_OUTPUT/kernel_details.csv"),
        ("chakra", "out.json/glm-5.1-mini.3.et"),
    ],
)
def test_each_format_is_written_where_asked(traced: Path, tmp_path: Path, form: str, made: str) -> None:
    code, out, err = invoke("export", traced, "--format", form, "--device", "910C_752T", "--out", tmp_path / "out.json")
    assert (code, err) == (0, "")
    assert out == f"{tmp_path / 'out.json'}\n"
    assert (tmp_path / made).stat().st_size > 1000


def test_options_of_the_replay_reach_the_file(traced: Path, tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    code, _, _ = invoke("export", traced, "--format", "perfetto", "--device", "910B3", "--overlap", "--out", path)
    assert code == 0
    about = json.loads(path.read_text())["metadata"]
    assert (about["device"], about["replay"]["overlap"]) == ("910B3", True)


def test_a_page_is_written(traced: Path, tmp_path: Path) -> None:
    code, out, _ = invoke("report", traced, "--out", tmp_path / "a.html")
    assert (code, out) == (0, f"{tmp_path / 'a.html'}\n")
    assert "No times: no device was given" in (tmp_path / "a.html").read_text()


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("export", "nowhere", "--format", "perfetto"), "error: nowhere: no trace here"),
        (("report", "nowhere"), "error: nowhere: no trace here"),
        (("report", "nowhere", "--device", "pear"), "error: unknown device 'pear'"),
        (("report", "nowhere", "--quant", "w8a8"), "error: options of the replay need a device"),
        (("export", "nowhere", "--format", "pdf"), "pdf"),
    ],
)
def test_bad_input_is_one_line_and_code_2(args: tuple[str, ...], says: str) -> None:
    code, out, err = invoke(*args)
    assert (code, out) == (2, "")
    assert says in err


def test_run_with_report_writes_the_page(tmp_path: Path) -> None:
    args = ("run", "glm-5.1-mini", "--tp", 2, "--tokens", 5, "--layers", 1, "--mode", "shape", "--out", tmp_path)
    result = CliRunner().invoke(cli.app, [*map(str, args), "--report", "--device", "910C_752T"])
    assert result.exit_code == 0
    assert f"report in {tmp_path / 'report.html'}\n" in result.stdout
    assert "predicted for Ascend 910C" in (tmp_path / "report.html").read_text()


def test_a_run_whose_rank_died_has_a_page_too(traced: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def dies(scenario: object, folder: Path, update: object) -> None:
        for path in traced.glob("rank_*.jsonl"):
            shutil.copy(path, folder)
        raise RankError("rank 1 died")

    monkeypatch.setattr(cli.run.job, "run", dies)
    args = ["run", "glm-5.1-mini", "--tp", "2", "--out", str(tmp_path), "--json"]
    result = CliRunner().invoke(cli.app, [*args, "--report"])
    assert (result.exit_code, result.stdout) == (3, "")
    assert '"verdict":"unfinished"' in (tmp_path / "report.html").read_text()
    (tmp_path / "report.html").unlink()
    assert CliRunner().invoke(cli.app, args).exit_code == 3
    assert not (tmp_path / "report.html").exists()
