"""The tensors of kernels, and that `emulator price` reads the same work out of them."""

import json
from collections import defaultdict
from pathlib import Path

from typer.testing import CliRunner

from emulator import cli
from emulator.cost.kernel import Kernel, Slice
from emulator.export.kernel_tensors import kernel_tensors
from emulator.export.mindstudio import write_mindstudio
from emulator.export.run import find_target, load_run

from .timelines import ATTENTION, LINEAR, cost, record, tensor


def shapes(kernel: Kernel, *others: Kernel) -> tuple[list, list]:
    op = record(1, "op", "m", [tensor([7, 9]), tensor([9])], [tensor([7, 9])])
    piece = Slice(0, "compute", 0.0, 1.0, 0.0, op, 0, tuple((k, cost(1)) for k in (kernel, *others)))
    inputs, outputs = kernel_tensors(piece, kernel, BF16)
    return [(t["shape"], t["dtype"]) for t in inputs], [(t["shape"], t["dtype"]) for t in outputs]


ROWS = Kernel("rope", {"rows": 14, "width": 4})
BF16 = "bfloat16"


def test_kernels_of_an_op_have_shapes_of_their_own() -> None:
    matmul = Kernel("matmul", {"m": 7, "k": 9, "n": 5, "batch": 1}, "int8")
    assert shapes(matmul) == ([([7, 9], "int8"), ([9, 5], "int8")], [([7, 5], BF16)])
    assert shapes(ROWS, matmul) == ([([14, 4], BF16)], [([14, 4], BF16)])
    indexer = Kernel("indexer", {"queries": (3, 4), "keys": (10, 4), "heads": 2, "dim": 8, "topk": 6})
    assert shapes(indexer) == ([([7, 2, 8], BF16), ([14, 1, 8], BF16), ([7, 2], BF16)], [([7, 1, 6], "int32")])
    sparse = Kernel(
        "sparse_attention", {"queries": (3, 4), "keys": (10, 4), "heads": 2, "topk": 6, "qk": 576, "v": 512}
    )
    inputs, outputs = shapes(sparse)
    assert [shape for shape, _ in inputs] == [
        [7, 2, 512],
        [14, 1, 512],
        [14, 1, 512],
        [7, 1, 6],
        [7, 2, 64],
        [14, 1, 64],
    ]
    assert outputs == [([7, 2, 512], BF16)]


def test_an_op_that_is_one_kernel_shows_its_own() -> None:
    assert shapes(Kernel("rms_norm", {"rows": 7, "width": 9})) == ([([7, 9], BF16), ([9], BF16)], [([7, 9], BF16)])
    assert shapes(ROWS) == ([([14, 4], BF16)], [([14, 4], BF16)])  # but for rope, which turns a part of each row
    piece = Slice(0, "compute", 0.0, 1.0, 0.0, LINEAR, 0)
    assert kernel_tensors(piece, None, "float64") == (LINEAR["inputs"], LINEAR["outputs"])


def test_dtypes_are_those_of_the_price() -> None:
    op = record(1, "op", "m", [tensor([7, 9], dtype="float64"), tensor([7], dtype="int64")], [tensor([7, 9])])
    kernel = Kernel("rms_norm", {"rows": 7, "width": 9})
    piece = Slice(0, "compute", 0.0, 1.0, 0.0, op, 0, ((kernel, cost(1)),))
    assert [t["dtype"] for t in kernel_tensors(piece, kernel, "float64")[0]] == [BF16, "int64"]
    assert [t["dtype"] for t in kernel_tensors(piece, None, "float64")[0]] == ["float64", "int64"]


def test_other_families_show_the_op() -> None:
    kernel = Kernel("dense_attention", {})
    piece = Slice(0, "compute", 0.0, 1.0, 0.0, ATTENTION, 0, ((kernel, cost(1)), (ROWS, cost(1))))
    assert kernel_tensors(piece, kernel, BF16) == (
        [{"shape": [8, 6], "dtype": BF16}], [{"shape": [8, 2, 3], "dtype": BF16}],
    )  # fmt: skip


def test_the_pricer_reads_the_same_work_out_of_them(traced: Path, tmp_path: Path) -> None:
    """A run, exported and read back as a profile: the kernels that shapes alone describe cost what they cost."""
    folder = write_mindstudio(load_run(traced, find_target("910C_752T")), tmp_path)[1]
    csv = folder / "ASCEND_PROFILER_OUTPUT" / "kernel_details.csv"
    result = CliRunner().invoke(cli.app, ["price", str(csv), "--device", "910C_752T", "--json"])
    errors = defaultdict(list)
    for row in json.loads(result.stdout)["rows"]:
        if row["measured_us"]:  # experts without a row take no time
            errors[row["family"]].append(abs(row["error_pct"]))
    for family in ("matmul.16bit", "grouped_matmul.16bit", "rms_norm", "add_rms_norm", "rope", "layer_norm"):
        assert errors[family], family
        assert max(errors[family]) < 0.1, family  # times are rounded to nanoseconds
