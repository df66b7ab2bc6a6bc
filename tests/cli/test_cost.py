"""emulator price and emulator calibrate, as a user calls them."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from emulator.cli import app
from emulator.cost.device import load_device
from emulator.cost.kernel import Kernel
from emulator.cost.price import price

COLUMNS = ["id", "device", "op", "params", "measured_us", "tflops", "gbps", "source", "confidence", "notes"]
MATMUL = {"M": 256, "K": 2048, "N": 4096, "dtype": "int8"}


def rows_file(tmp_path: Path, *rows: tuple[str, str, str, dict[str, Any], str]) -> str:
    path = tmp_path / "rows.csv"
    with open(path, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        for name, device, op, params, micros in rows:
            writer.writerow([name, device, op, json.dumps(params), micros, "", "", "a source", "", ""])
    return str(path)


def run(*args: str) -> Any:
    return CliRunner().invoke(app, list(args))


@pytest.fixture
def sample(tmp_path: Path) -> str:
    return rows_file(
        tmp_path,
        ("r1", "A3", "quant_matmul", MATMUL, "100"),
        ("r2", "910B2", "quant_matmul", MATMUL, "40"),
        ("r3", "A3", "layer_decode", {"batch_per_npu": 96}, "874"),
        ("r4", "910Z", "rms_norm", {"shape": [8, 4096], "dtype": "bf16"}, "9"),
        ("r5", "A3", "rms_norm", {"shape": [8, 4096], "dtype": "bf16"}, ""),
    )


def expected(device: str) -> float:
    return price(Kernel("matmul", {"m": 256, "k": 2048, "n": 4096}, "int8"), load_device(device)).seconds * 1e6


def test_price_as_json(sample: str) -> None:
    result = run("price", sample, "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert (found["priced"], found["total"]) == (3, 5)
    first, second, third = found["rows"]
    assert (first["id"], first["profile"], first["measured_us"]) == ("r1", "910C_752T", 100)
    assert first["predicted_us"] == pytest.approx(expected("910C_752T"), abs=0.001)
    assert first["error_pct"] == pytest.approx(expected("910C_752T") - 100, abs=0.01)
    assert first["flops"] == 2 * 256 * 2048 * 4096
    assert first["fitted_rows"] > 0
    assert (second["id"], second["profile"]) == ("r2", "910B2")
    assert second["predicted_us"] == pytest.approx(expected("910B2"), abs=0.001)
    assert (third["id"], third["measured_us"], third["error_pct"]) == ("r5", None, None)
    reasons = {u["id"]: u["why"] for u in found["unpriceable"]}
    assert set(reasons) == {"r3", "r4"}
    assert "several kernels together" in reasons["r3"]
    assert reasons["r4"] == "'910Z' is no device with a profile: give --device"
    kind = next(k for k in found["kinds"] if k["kind"] == "matmul int8")
    errors = [abs(expected("910C_752T") / 100 - 1), abs(expected("910B2") / 40 - 1)]
    assert kind["rows"] == 2
    assert kind["mape"] == pytest.approx(50 * sum(errors))


def test_price_prints_rows_errors_and_what_has_no_price(sample: str) -> None:
    result = run("price", sample)
    assert result.exit_code == 0
    for text in ("r1", "quant_matmul", f"{expected('910B2'):.2f}", "matmul.int8 on 910C_752T", "MAPE"):
        assert text in result.stdout
    assert "2 of 5 rows have no price:" in result.stdout
    assert "r3 layer_decode (A3): several kernels together" in result.stdout


def test_device_is_for_rows_that_name_none(sample: str) -> None:
    found = json.loads(run("price", sample, "--device", "910B4", "--json").stdout)
    assert [(r["id"], r["profile"]) for r in found["rows"]] == [
        ("r1", "910C_752T"), ("r2", "910B2"), ("r4", "910B4"), ("r5", "910C_752T"),
    ]  # fmt: skip


def test_a_profilers_table(tmp_path: Path) -> None:
    path = tmp_path / "any_name.csv"
    path.write_text(
        "Device_id,Name,Type,Duration(us),Input Shapes,Input Data Types,Output Shapes\n"
        '0,a,QuantBatchMatmulV3,50,"256,2048;2048,4096",INT8;INT8,"256,4096"\n'
        '0,b,hcom_allReduce_,50,"","",""\n'
    )
    without = json.loads(run("price", str(path), "--json").stdout)
    assert without["priced"] == 0
    assert without["unpriceable"][0]["why"] == "the row names no device: give --device"
    found = json.loads(run("price", str(path), "--device", "A3", "--json").stdout)
    assert found["rows"][0]["predicted_us"] == pytest.approx(expected("910C_752T"), abs=0.001)
    assert [u["op"] for u in found["unpriceable"]] == ["hcom_allReduce_"]


def test_calibrate_writes_a_profile_that_prices_its_rows(tmp_path: Path) -> None:
    sizes = [(8, 1024, 4096), (64, 2048, 2048), (256, 2048, 4096), (1024, 4096, 4096), (4096, 4096, 8192)]
    rows = [
        (f"r{n}", "910B4", "quant_matmul", {"M": m, "K": k, "N": n2, "dtype": "int8"}, repr(50 + m / 4))
        for n, (m, k, n2) in enumerate(sizes)
    ]
    path = rows_file(tmp_path, *rows, ("x", "A3", "quant_matmul", MATMUL, "9"), ("y", "910B4", "layer_decode", {}, "9"))
    out = tmp_path / "mine.toml"
    before = json.loads(run("price", path, "--json").stdout)["families"]
    result = run("calibrate", path, "--device", "910B4", "--out", str(out), "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert [f["key"] for f in found["families"]] == ["matmul.int8"]
    assert found["families"][0]["in_sample"]["rows"] == 5
    assert found["families"][0]["left_out"]["rows"] == 5
    assert found["families"][0]["held_out"]["rows"] == 5
    assert found["unused"] == [{"id": "y", "op": "layer_decode", "why": found["unused"][0]["why"]}]
    assert found["other_devices"] == {"A3": 1}
    profile = load_device(str(out))
    assert profile.coefficients["matmul.int8"].source == "fitted to 5 rows of: a source"
    after = json.loads(run("price", path, "--device", str(out), "--json").stdout)["families"]
    mine = next(f for f in after if f["profile"] == "mine")
    assert mine["mape"] == pytest.approx(found["families"][0]["in_sample"]["mape"], abs=0.1)
    assert mine["mape"] < next(f for f in before if f["profile"] == "910B4")["mape"]
    printed = run("calibrate", path, "--device", "910B4").stdout
    assert "matmul.int8" in printed
    assert "not used: y layer_decode" in printed
    assert "1 rows are of other devices: A3" in printed


def test_rows_of_which_none_can_be_used_say_why(tmp_path: Path) -> None:
    path = rows_file(tmp_path, ("n", "A3", "quant_matmul", MATMUL, "-5"))
    result = run("calibrate", path, "--device", "A3")
    assert result.exit_code == 2
    assert result.stderr.endswith("none of the 1 rows of 910C_752T can be used: no measured time\n")


@pytest.mark.parametrize(
    ("args", "why"),
    [
        (("price", "{none}"), "No such file"),
        (("price", "{rows}", "--device", "nope"), "unknown device 'nope'"),
        (("calibrate", "{rows}", "--device", "910B3"), "no row is of 910B3"),
        (("calibrate", "{rows}", "--device", "910B2", "--out", "{none}/x/y.toml"), "cannot be written"),
    ],
)
def test_mistakes_are_one_clear_line(tmp_path: Path, sample: str, args: tuple[str, ...], why: str) -> None:
    result = run(*(a.format(rows=sample, none=tmp_path / "none.csv") for a in args))
    assert result.exit_code == 2
    assert why in result.stderr
    assert result.stderr.startswith("error: ")
    assert len(result.stderr.strip().splitlines()) == 1
    assert result.stdout == ""
