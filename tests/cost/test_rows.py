"""Rows of measured files become kernels: every layout of parameters, and reasons where they say too little."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from emulator.cost.kernel import Kernel
from emulator.cost.rows import Row, read_rows
from emulator.errors import UsageError

COLUMNS = ["id", "device", "op", "params", "measured_us", "tflops", "gbps", "source", "confidence", "notes"]


def measured(tmp_path: Path, *rows: dict[str, Any]) -> list[Row]:
    path = tmp_path / "rows.csv"
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        for number, row in enumerate(rows):
            params = row.pop("params", {})
            text = params if isinstance(params, str) else json.dumps(params)
            writer.writerow({"id": f"r{number}", "device": "A3", "measured_us": "10", "params": text, **row})
    return read_rows(path)


def one(tmp_path: Path, op: str, **params: Any) -> Row:
    return measured(tmp_path, {"op": op, "params": params})[0]


NAMED = [
    ("matmul", {"M": 4, "K": 8, "N": 16, "dtype": "bf16"}, Kernel("matmul", {"m": 4, "k": 8, "n": 16}, "bfloat16")),
    ("quant_matmul", {"M": 4, "K": 8, "N": 16, "dtype": "int8", "out": "bf16", "weight": "NZ"},
     Kernel("matmul", {"m": 4, "k": 8, "n": 16, "blocked": True}, "int8")),
    ("quant_matmul", {"M": 4, "K": 8, "N": 16, "dtype": "int8", "out": "fp16", "weight": "ND"},
     Kernel("matmul", {"m": 4, "k": 8, "n": 16, "dequant": "cube"}, "int8")),
    ("batch_matmul", {"batch": 3, "M": 4, "K": 8, "N": 16, "dtype": "fp16"},
     Kernel("matmul", {"m": 4, "k": 8, "n": 16, "batch": 3}, "float16")),
    ("gemm_util", {"groups": 2, "M": 4, "N": 16, "K": 8, "dtype": "int8"},
     Kernel("grouped_matmul", {"rows": (4, 4), "k": 8, "n": 16}, "int8")),
    ("rms_norm", {"shape": [2, 3, 16], "dtype": "bf16"}, Kernel("rms_norm", {"rows": 6, "width": 16}, "bfloat16")),
    ("interleave_rope", {"shape": [5, 16, 64], "dtype": "bf16"},
     Kernel("rope", {"rows": 5, "width": 1024}, "bfloat16")),
    ("all_gather", {"ranks": 4, "bytes_in_per_rank": 100, "dtype": "bf16"},
     Kernel("collective", {"op": "all_gather", "ranks": (0, 1, 2, 3), "bytes": 100}, "bfloat16")),
    ("reduce_scatter", {"ranks": 2, "bytes_out_per_rank": 100, "dtype": "bf16"},
     Kernel("collective", {"op": "reduce_scatter", "ranks": (0, 1), "bytes": 100}, "bfloat16")),
    ("moe_dispatch", {"ep": 8, "tokens_per_rank": 9, "topk": 2, "hidden": 64, "dtype": "int8", "bytes_per_token": 70},
     Kernel("moe_dispatch", {"tokens": 9, "hidden": 64, "topk": 2, "ranks": 8, "experts": 256, "row_bytes": 70},
            "int8")),
    ("moe_combine", {"ep": 8, "tokens_per_rank_derived": 9, "topk": 2, "hidden": 64, "mode": "normal", "dtype": "bf16"},
     Kernel("moe_combine", {"tokens": 9, "hidden": 64, "topk": 2, "ranks": 8, "experts": 256}, "bfloat16", "normal")),
    ("sfa", {"B": 2, "Sq": 1, "Nq": 8, "Dk": 576, "Dv": 512, "topk": 64, "kv_len": 99, "dtype": "bf16",
             "impl": "AscendC"},
     Kernel("sparse_attention", {"queries": (1, 1), "keys": (99, 99), "causal": True, "heads": 8, "topk": 64, "qk": 576,
                                 "v": 512}, "bfloat16")),
    ("lightning_indexer", {"B": 1, "S1": 5, "S2": 9, "N": 4, "D": 128, "topk": None, "dtype": "fp16", "causal": False,
                           "impl": "TileLang fused"},
     Kernel("indexer", {"queries": (5,), "keys": (9,), "causal": False, "heads": 4, "dim": 128, "topk": 2048},
            "float16", "TileLang")),
    ("lightning_indexer", {"row": "R3", "S1": 7, "kv_len": None, "model": "GLM-5.x heads"},
     Kernel("indexer", {"queries": (7,), "keys": (7,), "causal": True, "heads": 32, "dim": 128, "topk": 2048},
            "bfloat16")),
    ("mla_decode", {"B": 2, "Sq": 1, "Nq": 4, "Skv_approx": "4096+", "Dlat": 512, "Drope": 64, "dtype": "bf16"},
     Kernel("dense_attention", {"queries": (1, 1), "keys": (4096, 4096), "causal": True, "heads": 4, "qk": 576,
                                "v": 512}, "bfloat16")),
    ("topk", {"rows": 3, "cols": 50, "k": 8, "impl": "x"}, Kernel("topk", {"rows": 3, "width": 50, "k": 8}, "float32")),
]  # fmt: skip


@pytest.mark.parametrize(("op", "params", "kernel"), NAMED)
def test_named_sizes(tmp_path: Path, op: str, params: dict[str, Any], kernel: Kernel) -> None:
    row = one(tmp_path, op, **params)
    assert row.why == ""
    assert row.kernels == (kernel,)
    assert row.seconds == pytest.approx(1e-5)


@pytest.mark.parametrize(
    ("op", "params", "family"),
    [
        ("AllGather", {"ranks": 4, "bytes_in_per_rank": 8}, "collective"),
        ("MatMulV2", {"M": 1, "K": 2, "N": 3, "dtype": "bf16"}, "matmul"),
        ("scatter_nd_update", {"shape": [4, 128], "dtype": "bf16"}, "scatter"),
        ("RmsNorm", {"shape": [4, 128], "dtype": "bf16"}, "rms_norm"),
    ],
)
def test_other_spellings_and_kernel_types(tmp_path: Path, op: str, params: dict[str, Any], family: str) -> None:
    row = one(tmp_path, op, **params)
    assert row.why == ""
    assert [k.family for k in row.kernels] == [family]


def test_attention_over_sequences_of_an_average_length(tmp_path: Path) -> None:
    row = one(tmp_path, "gqa_prefill", T=10, n_seq=3, avg_seq=4, Nq=4, Nkv=1, D=128, causal=True, dtype="bf16")
    assert row.kernels[0].sizes["queries"] == (4, 4, 2)
    assert row.kernels[0].sizes["kv_heads"] == 1


SHAPED = [
    ("matmul_bench", [[4, 8], [8, 16]], ["float16"] * 2, {}, "matmul", {"m": 4, "k": 8, "n": 16, "batch": 1}),
    ("quant_matmul", [[3, 4, 8], [3, 8, 16], [16]], ["int8", "int8", "float32"], {"output_dtype": "bfloat16"}, "matmul",
     {"m": 4, "k": 8, "n": 16, "batch": 3}),
    ("quant_matmul", [[4, 8], [8, 16], [16], None, None], ["int8", "int8"], {"output_dtype": "float16"}, "matmul",
     {"m": 4, "k": 8, "n": 16, "batch": 1, "dequant": "cube"}),
    ("quant_matmul", [[4, 8], [8, 16], [16], None, [4]], ["int8", "int8"], {"output_dtype": "float16"}, "matmul",
     {"m": 4, "k": 8, "n": 16, "batch": 1}),
    ("grouped_matmul", [[9, 8], [3, 16, 8]], ["bfloat16"] * 2, {"group_list": [2, 2, 9], "transpose_weight": True},
     "grouped_matmul", {"rows": (2, 0, 7), "k": 8, "n": 16}),
    ("quant_matmul", [[4, 64], [2, 4, 16, 16]], ["int8"] * 2, {}, "matmul",
     {"m": 4, "k": 64, "n": 32, "batch": 1, "blocked": True}),
    ("grouped_matmul_swiglu_quant", [[9, 64], [3, 64, 32]], ["int8"] * 2, {"group_list": [2, 2, 9]}, "grouped_matmul",
     {"rows": (2, 0, 7), "k": 64, "n": 32, "relayout": True}),
    ("grouped_matmul_swiglu_quant", [[9, 64], [3, 1, 4, 16, 32]], ["int8"] * 2, {"group_list": [2, 2, 9]},
     "grouped_matmul", {"rows": (2, 0, 7), "k": 64, "n": 32, "blocked": True}),
    ("dynamic_quant", [[2, 3, 5]], ["bfloat16"], {}, "dynamic_quant", {"rows": 6, "width": 5}),
    ("mla", [[2, 3, 8, 512], [2, 3, 8, 64], [2, 9, 1, 512], [2, 9, 1, 64], [2, 9, 1, 512]], ["float16"] * 5,
     {"inputLayout": "BSND", "is_causal": True}, "dense_attention",
     {"queries": (3, 3), "keys": (9, 9), "heads": 8, "qk": 576, "v": 512, "causal": True}),
    ("mla", [[2, 8, 3, 512], [2, 8, 3, 64], [2, 1, 9, 512], [2, 1, 9, 64], [2, 1, 9, 512]], ["float16"] * 5,
     {"inputLayout": "BNSD", "is_causal": False}, "dense_attention",
     {"queries": (3, 3), "keys": (9, 9), "heads": 8, "qk": 576, "v": 512, "causal": False}),
    ("fa_bench", [[2, 3, 8, 128], [2, 9, 8, 128], [2, 9, 8, 128]], ["float16"] * 3, {}, "dense_attention",
     {"queries": (3, 3), "keys": (9, 9), "heads": 8, "qk": 128, "v": 128, "causal": False, "kv_heads": 8}),
    ("sparse_flash_attention", [[1, 3, 8, 512], [1, 99, 1, 512], [1, 99, 1, 512], [1, 3, 1, 16]],
     ["float16", "float16", "float16", "int32"], {"inputLayout": "BSND", "is_causal": True}, "sparse_attention",
     {"queries": (3,), "keys": (99,), "causal": True, "heads": 8, "topk": 16, "qk": 512, "v": 512}),
    ("moe_re_routing", [[64, 32], [4, 4], [64]], ["int8"], {}, "routing", {"rows": 64, "width": 32}),
    ("moe_finalize_routing", [[64, 32], [64], [16, 32], [16, 32], [8, 32], [16, 4], [16, 4]], ["float16"], {},
     "unpermute", {"rows": 64, "width": 32, "moved": (64 + 8 + 16 * 3) * 32 * 2}),
    ("swi_glu", [[6, 64]], ["float16"], {"dim": -1}, "swiglu", {"rows": 6, "width": 64}),
]  # fmt: skip


@pytest.mark.parametrize(("op", "shapes", "dtypes", "attrs", "family", "sizes"), SHAPED)
def test_input_shapes(
    tmp_path: Path, op: str, shapes: list, dtypes: list, attrs: dict, family: str, sizes: dict[str, Any]
) -> None:
    row = one(tmp_path, op, case=1, input_shape=shapes, dtype=dtypes, attrs=attrs)
    assert row.why == ""
    assert [(k.family, dict(k.sizes)) for k in row.kernels] == [(family, sizes)]


@pytest.mark.parametrize(
    ("rotations", "cache", "name"),
    [
        ([2, 4, 3, 64], "float16", "per_head"),
        ([2, 4, 3, 64], "int8", "per_head_int8"),
        ([2, 4, 1, 64], "float16", "per_head_shared"),  # 8 rotations for 24 rows
        ([2, 4, 1, 64], "int8", "per_head_int8_shared"),
    ],
)
def test_caches_by_head_take_paths_of_their_own(tmp_path: Path, rotations: list[int], cache: str, name: str) -> None:
    shapes = [[2, 4, 3, 192], [192], rotations, rotations, [6], [5, 8, 4, 192], [5, 8, 4, 128], *[None] * 4,
              [2, 4, 3, 128]]  # fmt: skip
    dtypes = [*["float16"] * 4, "int64", cache, cache, *[None] * 4, "float16"]
    found = one(tmp_path, "kv_rms_norm_rope_cache_v2", input_shape=shapes, dtype=dtypes).kernels[0]
    assert (found.family, found.name) == ("kv_norm_rope_cache", name)
    read = 24 * 192 + 2 * rotations[2] * 8 * 64 + 24 * 128  # rows, sines and cosines, values
    written = (24 * 192 + 24 * 128) * (1 if cache == "int8" else 2)
    assert found.sizes == {"rows": 24, "width": 192, "moved": 2 * read + written}


def test_a_routing_of_some_experts_is_as_large_as_its_output(tmp_path: Path) -> None:
    shapes = {"input_shape": [[9, 64], [9, 8]], "dtype": ["bfloat16", "int32"]}
    assert one(tmp_path, "moe_init_routing", **shapes).kernels[0].sizes == {"rows": 72, "width": 64}
    silent = one(tmp_path, "ai_infra_moe_init_routing_v3", **shapes)
    assert silent.kernels == ()
    assert "neither its output nor the range of experts" in silent.why
    path = tmp_path / "details.csv"
    path.write_text(f'{PROFILE["op_summary"]}\n0,a,AiInfraMoeInitRoutingV3,5,"9,64;9,8",BF16;INT32,"20,64"\n')
    assert read_rows(path)[0].kernels[0].sizes == {"rows": 20, "width": 64}


def test_a_swiglu_along_another_dim_may_cut_its_halves_first(tmp_path: Path) -> None:
    def families(shape: list[int]) -> list[str]:
        row = one(tmp_path, "swi_glu", input_shape=shape, dtype=["float16"], attrs={"dim": 0})
        return [k.family for k in row.kernels]

    assert families([[6, 64]]) == ["swiglu"]
    assert families([[6, 63]]) == ["copy", "swiglu"]


def test_rates_and_settings(tmp_path: Path) -> None:
    params = {"M": 4, "K": 8, "N": 16, "dtype": "bf16"}
    base = {"op": "matmul", "params": params, "measured_us": ""}
    rows = measured(
        tmp_path,
        {**base, "tflops": "2", "source": "cann-bench 1"},
        {**base, "gbps": "3", "notes": "HCCL microbench"},
        {**base, "source": "serving"},
    )
    assert [(r.seconds, r.rate, r.rate_of) for r in rows] == [
        (None, 2e12, "flops"),
        (None, 3e9, "bytes"),
        (None, None, None),
    ]
    assert [r.setting for r in rows] == ["benchmark", "benchmark", "model"]
    assert all(r.kernels for r in rows)  # a row without a measured time is still predicted


NO_KERNEL = [
    ("warp_drive", {}, "no op family for 'warp_drive'"),
    ("layer_decode", {"batch_per_npu": 96}, "several kernels together"),
    ("matmul", {"M": 4, "K": 8}, "does not state N"),
    ("rms_norm", {"shape": None}, "no shape"),
    ("lightning_indexer", {"S1": None, "kv_len": None, "model": "GLM-5.x heads"}, "does not state Sq or S1"),
    ("p2p_bulk", {"dir": "RH2D", "bytes": 8}, "a copy with the host"),
    ("grouped_matmul", {"input_shape": [[9, 8], [8, 16]], "dtype": ["float16"] * 2}, "has no expert dim"),
    ("sparse_flash_attention", {"input_shape": [[1, 3, 8, 512]], "dtype": ["float16"]}, "no int32 input"),
    ("matmul_bench", {"input_shape": "broken", "dtype": None}, "sizes are not readable"),
]


@pytest.mark.parametrize(("op", "params", "why"), NO_KERNEL)
def test_rows_that_say_too_little_say_why(tmp_path: Path, op: str, params: dict[str, Any], why: str) -> None:
    row = one(tmp_path, op, **params)
    assert row.kernels == ()
    assert why in row.why


def test_params_that_are_no_json(tmp_path: Path) -> None:
    broken, listed = measured(tmp_path, {"op": "matmul", "params": "{M:4"}, {"op": "matmul", "params": "[1]"})
    assert "not JSON" in broken.why
    assert "not a JSON object" in listed.why


PROFILE = {
    "kernel_details": "Device_id,Name,Type,Duration(us),Input Shapes,Input Data Types,Output Shapes",
    "op_summary": "Device_id,Op Name,OP Type,Task Duration(us),Input Shapes,Input Data Types,Output Shapes",
}


@pytest.mark.parametrize("layout", PROFILE)
def test_a_profilers_table_is_known_by_its_columns(tmp_path: Path, layout: str) -> None:
    lines = [
        PROFILE[layout],
        '0,mm,MatMulV2,12.5,"4,8;8,16",DT_BF16;DT_BF16,"4,16"',
        '0,q,QuantBatchMatmulV3,20,"4,64;1,4,16,32;32;;4",INT8;INT8;FLOAT;;FLOAT,"4,32"',  # the weight lies in NZ
        '0,n,AddRmsNormBias,5,"4,64;4,64;64",DT_BF16;DT_BF16;DT_BF16,"4,64"',
        '0,s,SparseFlashAttention,9,"3,8,512;9,128,1,512;9,128,1,512;3,1,16",DT_BF16;DT_BF16;DT_BF16;INT32,"3,8,512"',
        '0,h,hcom_allGather_,30,"","",""',
        '0,z,MatMulV2,0,"4,8;8,16",DT_BF16;DT_BF16,"4,16"',
        '0,z,MatMulV2,4,"4,a;8,16",DT_BF16;DT_BF16,"4,16"',
    ]
    path = tmp_path / "anything.csv"
    path.write_text("\n".join(lines))
    rows = read_rows(path)
    assert [(r.kernels[0].family, r.seconds) for r in rows[:4]] == [
        ("matmul", pytest.approx(12.5e-6)), ("matmul", pytest.approx(20e-6)), ("add_rms_norm", pytest.approx(5e-6)),
        ("sparse_attention", pytest.approx(9e-6)),
    ]  # fmt: skip
    assert dict(rows[1].kernels[0].sizes) == {"m": 4, "k": 64, "n": 32, "batch": 1, "blocked": True}
    assert rows[1].kernels[0].dtype == "int8"
    sizes = rows[3].kernels[0].sizes
    assert (sizes["queries"], sizes["heads"], sizes["topk"], sizes["qk"]) == ((3,), 8, 16, 576)
    assert rows[4].why == "hcom_allGather_: its shapes do not say how many ranks exchange, nor how much"
    assert rows[5].why == "no duration"
    assert "not a shape list" in rows[6].why
    assert all(r.device == "" and r.setting == "model" for r in rows)


def test_files_that_are_neither(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("a,b\n1,2\n")
    with pytest.raises(UsageError, match=r"has neither op and params columns .* it has a, b"):
        read_rows(path)
    with pytest.raises(UsageError, match="No such file"):
        read_rows(tmp_path / "none.csv")
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError, match="not readable as CSV"):
        read_rows(path)
    path.write_text("")
    with pytest.raises(UsageError, match="it has none"):
        read_rows(path)
