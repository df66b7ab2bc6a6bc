"""Lookup in small databases of TensorCast's layout: what is measured, what lies between rows, and what is neither."""

import csv
import math
import re
from pathlib import Path

import pytest

from emulator.cost.database import Database
from emulator.cost.kernel import Cost, Kernel
from emulator.cost.pricing import Pricer
from emulator.errors import UsageError

TIME = "Profiling Average Duration(us)"
COLUMNS = ["OP State", "Accelerator Core", "Input Shapes", "Input Data Types", "Input Formats", "Output Shapes",
           "Output Data Types", "Output Formats", "Average Duration(us)", TIME]  # fmt: skip
RUNTIME = ["Runtime topk", "Runtime actual_seq_lengths_values", "Runtime actual_seq_lengths_kv_values"]


def write(path: Path, rows: list[dict], columns: list[str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(rows)


def call(inputs: str, types: str, outputs: str, us: float | str, **more: object) -> dict:
    return {"Input Shapes": inputs, "Input Data Types": types, "Output Shapes": outputs, TIME: us, **more}


def matmul(m: int, k: int, n: int, dtype: str = "bfloat16", name: str = "MatMulV2", **more: int) -> Kernel:
    return Kernel("matmul", {"m": m, "k": k, "n": n, **more}, dtype, name)


@pytest.fixture
def stack(tmp_path: Path) -> Path:
    """A stack version's folder with matmul times at m = 16, 64 and 256."""
    rows = [
        call("16,512;512,128", "DT_BF16;DT_BF16", "16,128", 10),
        call("64,512;512,128", "DT_BF16;DT_BF16", "64,128", 20),
        call("256,512;8,32,16,16", "DT_BF16;DT_BF16", "256,128", 80),  # weight in fractal blocks
        call("64,512;512,128", "FLOAT16;FLOAT16", "64,128", 5),
        call("64,512;512,999", "DT_BF16;DT_BF16", "64,999", ""),  # was not measured
    ]
    write(tmp_path / "A3" / "cann8" / "MatMulV2.csv", rows, COLUMNS)
    return tmp_path / "A3" / "cann8"


def us(found: tuple[float, str] | None) -> tuple[float, str] | None:
    return None if found is None else (pytest.approx(found[0] * 1e6), found[1])


def test_the_same_sizes_are_measured(stack):
    base = Database(stack)
    assert us(base.lookup(matmul(64, 512, 128))) == (20, "measured")
    assert us(base.lookup(matmul(256, 512, 128))) == (80, "measured")
    assert us(base.lookup(matmul(64, 512, 128, "float16"))) == (5, "measured")


def test_between_two_rows_time_is_a_power_of_the_size(stack):
    # 16 -> 64 doubles the time, so 32, half way on a logarithmic scale, takes 10 * sqrt(2)
    assert us(Database(stack).lookup(matmul(32, 512, 128))) == (10 * math.sqrt(2), "interpolated")
    # 64 -> 256 takes the time times 4 for the size times 4: 128 takes 40. The row at 16 is further away
    assert us(Database(stack).lookup(matmul(128, 512, 128))) == (40, "interpolated")


@pytest.mark.parametrize(
    "kernel",
    [
        matmul(8, 512, 128),  # below the smallest
        matmul(512, 512, 128),  # above the largest
        matmul(32, 512, 130),  # differs in two sizes
        matmul(64, 512, 999),  # its row was not measured
        matmul(64, 512, 128, "int8"),  # another dtype
        matmul(64, 512, 128, name="MatMulV3"),  # no such file
        matmul(64, 512, 128, batch=2),
    ],
)
def test_nothing_is_extrapolated(stack, kernel):
    assert Database(stack).lookup(kernel) is None


def test_equal_rows_are_averaged(tmp_path):
    row = call("64,512;512,128", "DT_BF16;DT_BF16", "64,128", 20)
    write(tmp_path / "MatMulV2.csv", [row, {**row, TIME: 30}], COLUMNS)
    assert us(Database(tmp_path).lookup(matmul(64, 512, 128))) == (25, "measured")


def test_of_two_sizes_with_neighbours_the_closer_ones_count(tmp_path):
    times = {(16, 512): 10, (256, 512): 90, (64, 256): 30, (64, 1024): 40}
    rows = [call(f"{m},{k};{k},128", "DT_BF16;DT_BF16", f"{m},128", t) for (m, k), t in times.items()]
    write(tmp_path / "MatMulV2.csv", rows, COLUMNS)
    # along m the neighbours are 16 times apart, along k 4 times: sqrt(30 * 40)
    assert us(Database(tmp_path).lookup(matmul(64, 512, 128))) == (math.sqrt(1200), "interpolated")


def test_a_microbenchmarks_time_counts_where_there_is_no_other(tmp_path):
    row = call("64,512;512,128", "DT_BF16;DT_BF16", "64,128", "", **{"Average Duration(us)": 17})
    write(tmp_path / "MatMulV2.csv", [row], COLUMNS)
    assert us(Database(tmp_path).lookup(matmul(64, 512, 128))) == (17, "measured")


def vector(family: str, rows: int, width: int, name: str, dtype: str = "bfloat16") -> Kernel:
    return Kernel(family, {"rows": rows, "width": width}, dtype, name)


GROUPED = Kernel("grouped_matmul", {"rows": (64, 64), "k": 20, "n": 40}, "int8", "GroupedMatmul")


@pytest.mark.parametrize(
    ("kernel", "inputs", "types", "outputs"),
    [
        (matmul(256, 192, 512, name="BatchMatMulV2", batch=64), "64,256,192;64,192,512", "BF16", "64,256,512"),
        (matmul(256, 512, 128, name="TransposeBatchMatMul", batch=64), "64,256,512;64,512,128", "BF16", "256,64,128"),
        (matmul(256, 64, 96, "int8", "QuantBatchMatmulV3"), "256,64;3,4,16,32;96", "INT8;INT8;FLOAT", "256,96"),
        (GROUPED, "128,20;2,20,40", "INT8", "128,40"),
        (vector("rope", 9, 1024, "InterleaveRope"), "9,16,1,64;9,1,1,64", "BF16", "9,16,1,64"),
        (vector("swiglu", 9, 4096, "SwiGlu"), "9,4096", "BF16", "9,2048"),
        (vector("scatter", 9, 128, "ScatterNdUpdate"), "4096,128;9,1;9,128", "BF16", "4096,128"),
        (vector("add_rms_norm", 9, 6144, "AddRmsNormBias"), "9,6144;9,6144;6144;", "BF16", "9,6144;9,1;9,6144"),
        (vector("gating_topk", 9, 256, "MoeGatingTopK", "float32"), "9,256;256", "FLOAT", "9,8"),
        (vector("routing", 72, 6144, "MoeInitRoutingV2"), "9,6144;9,8", "BF16", "72,6144"),
    ],
)
def test_each_kernel_type_is_read_by_its_own_shapes(tmp_path, kernel, inputs, types, outputs):
    write(tmp_path / f"{kernel.name}.csv", [call(inputs, types, outputs, 33)], COLUMNS)
    assert us(Database(tmp_path).lookup(kernel)) == (33, "measured")


def sparse(queries: tuple[int, ...], keys: tuple[int, ...], dtype: str = "bfloat16") -> Kernel:
    sizes = {"queries": queries, "keys": keys, "heads": 64, "topk": 2048, "qk": 576, "v": 512}
    return Kernel("sparse_attention", sizes, dtype, "SparseFlashAttention")


def sparse_row(tokens: int, queries: str, keys: str, time: float, dtype: str = "DT_BF16") -> dict:
    inputs = f"{tokens},64,512;512,16,1,512;512,16,1,512;{tokens},1,2048;;1;1;{tokens},64,64;512,16,1,64"
    return call(inputs, f"{dtype};{dtype}", f"{tokens},64,512", time,
                **dict(zip(RUNTIME, ("2048", queries, keys))))  # fmt: skip


def test_sparse_attention_is_looked_up_by_the_lengths_of_its_requests(tmp_path):
    rows = [
        sparse_row(256, "256", "4096", 600),
        sparse_row(256, "256", "16384", 1200),
        sparse_row(3, "1;2;3", "4096;4096;5000", 60),  # a running sum: three requests of one token
    ]
    write(tmp_path / "SparseFlashAttention.csv", rows, COLUMNS + RUNTIME)
    base = Database(tmp_path)
    assert us(base.lookup(sparse((256,), (4096,)))) == (600, "measured")
    assert us(base.lookup(sparse((1, 1, 1), (4096, 5000, 4096)))) == (60, "measured")  # in any order
    assert us(base.lookup(sparse((256,), (8192,)))) == (600 * math.sqrt(2), "interpolated")
    assert us(base.lookup(sparse((1, 1, 1), (4000, 4096, 5096)))) == (60, "interpolated")  # the same mean keys
    assert base.lookup(sparse((128, 128), (4096, 4096))) is None


def test_a_quantised_attention_kernel_is_never_chosen(tmp_path):
    write(tmp_path / "SparseFlashAttention.csv", [sparse_row(256, "256", "4096", 1, "INT8")], COLUMNS + RUNTIME)
    assert Database(tmp_path).lookup(sparse((256,), (4096,))) is None


def test_the_indexer(tmp_path):
    row = call("256,64,128;512,16,1,128;256,64", "BF16", "256,1,2048", 90,
               **dict(zip(RUNTIME, ("2048", "[256]", "[4096]"))))  # fmt: skip
    write(tmp_path / "LightningIndexer.csv", [row], COLUMNS + RUNTIME)
    sizes = {"queries": (256,), "keys": (4096,), "heads": 64, "dim": 128, "topk": 2048}
    assert us(Database(tmp_path).lookup(Kernel("indexer", sizes, "bfloat16", "LightningIndexer"))) == (90, "measured")


def test_rows_of_uneven_experts_are_no_hit(tmp_path):
    write(tmp_path / "GroupedMatmul.csv", [call("128,20;2,20,40", "INT8", "128,40", 33)], COLUMNS)
    kernel = Kernel("grouped_matmul", {"rows": (100, 28), "k": 20, "n": 40}, "int8", "GroupedMatmul")
    assert us(Database(tmp_path).lookup(kernel)) == (33, "interpolated")


def hccl(folder: Path, rows: list[tuple], file: str = "hcom_allGather_") -> None:
    columns = ["message_bytes", "num_devices", "dtype", "topology_tier", "Duration(us)", "bandwidth_gbps"]
    write(folder / "hccl" / "2.0" / f"{file}.csv", [dict(zip(columns, row)) for row in rows], columns)


def collective(op: str, size: int, name: str, ranks: int = 16, **more: int) -> Kernel:
    return Kernel("collective", {"op": op, "ranks": tuple(range(ranks)), "bytes": size, **more}, "bfloat16", name)


def test_collectives_stand_beside_the_stack_version(stack):
    hccl(stack.parent, [(1 << 20, 16, "bf16", "node", 80, 1), (1 << 22, 16, "bf16", "node", 320, 1)])
    base = Database(stack)
    gather = "hcom_allGather_"
    assert us(base.lookup(collective("all_gather", 1 << 20, gather))) == (80, "measured")
    assert us(base.lookup(collective("all_gather", 1 << 21, gather))) == (160, "interpolated")
    assert base.lookup(collective("all_gather", 1 << 20, gather, ranks=8)) is None


def test_an_all_to_all_message_holds_what_a_rank_keeps(stack):
    hccl(stack.parent, [(1 << 20, 16, "bf16", "node", 80, 1)], "hcom_alltoall_")
    sent = (1 << 20) // 16 * 15
    kernel = collective("all_to_all", sent, "hcom_alltoall_", received=sent)
    assert us(Database(stack).lookup(kernel)) == (80, "measured")


def test_a_group_size_measured_on_several_tiers_is_not_looked_up(stack):
    hccl(stack.parent, [(1 << 20, 16, "bf16", "node", 80, 1), (1 << 20, 16, "bf16", "pod", 200, 1)])
    assert Database(stack).lookup(collective("all_gather", 1 << 20, "hcom_allGather_")) is None


def test_a_devices_folder_with_one_stack_version(stack):
    assert Database(stack.parent).folder == stack
    write(stack.parent / "cann9" / "MatMulV2.csv", [], COLUMNS)
    with pytest.raises(UsageError, match=r"found cann8, cann9"):
        Database(stack.parent)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("version https://git-lfs.github.com/spec/v1\noid sha256:1\n", "a Git LFS pointer"),
        ("Input Shapes,Output Shapes\n", "no column 'Input Data Types'"),
        (f"Input Shapes,Input Data Types,Output Shapes,{TIME}\n5,BF16,7,1\n", "line 2: not a row of matmul"),
        (f'Input Shapes,Input Data Types,Output Shapes,{TIME}\n"5,3;3,4",BF16,"5,4",-1\n', "a time of -1 us"),
    ],
)
def test_files_that_cannot_be_read(tmp_path, text, says):
    (tmp_path / "MatMulV2.csv").write_text(text)
    with pytest.raises(UsageError, match=re.escape(says)):
        Database(tmp_path).lookup(matmul(5, 3, 4))


def test_a_missing_folder(tmp_path):
    with pytest.raises(UsageError, match="no such folder"):
        Database(tmp_path / "nowhere")


def test_the_label_travels_with_the_price(stack):
    class Named:
        name = "stand-in"

    analytic = Cost(flops=7.0, bytes=9.0, seconds=1.0, bound="cube")
    price = Pricer(Named(), Database(stack), lambda kernel, device: analytic)  # type: ignore[arg-type]
    found = [price(matmul(m, 512, 128))[1] for m in (64, 32, 8)]
    assert [c.source for c in found] == ["measured", "interpolated", "analytic"]
    assert found[0] == Cost(7.0, 9.0, pytest.approx(20e-6), "cube", "measured")
    assert found[2] == analytic
