"""Op costs on a toy die with round numbers, worked out by hand."""

import numpy as np
import pytest

from emulator.cost.indexer import topk_cycles
from emulator.cost.kernel import Cost, Kernel
from emulator.cost.price import price
from emulator.cost.work import Unpriceable
from tests.cost.toy import GIGA, US, cost, toy


def test_sparse_attention_runs_in_waves_of_tokens() -> None:
    sizes = {"queries": (3,), "keys": (100,), "heads": 4, "topk": 10, "qk": 6, "v": 5}
    # all three tokens see more than 10 keys; 3 tasks on 2 cores are 2 waves of 10 entries at half the rate
    gather = 2 * 10 * (6 * 2) / (GIGA / 2)
    cube = 2 * 10 * (2 * 4 * 11) / (1e12 / 2)
    found = cost("sparse_attention", sizes, {"gather": 1, "cube": 1})
    assert found.seconds == pytest.approx(gather)
    assert found.bound == "memory"
    assert found.flops == 3 * 10 * 2 * 4 * 11
    assert found.bytes == 3 * 10 * 12 + 3 * 4 * 11 * 2
    busy = cost("sparse_attention", sizes, {"gather": 1, "cube": 1000})
    assert (busy.seconds, busy.bound) == (pytest.approx(1000 * cube), "cube")


def test_sparse_attention_rows_below_topk_cost_less() -> None:
    # causal prefill of 4 tokens: they see 1, 2, 3, 4 keys and use at most 3: waves (1, 2) and (3, 3)
    sizes = {"queries": (4,), "keys": (4,), "heads": 1, "topk": 3, "qk": 6, "v": 5}
    found = cost("sparse_attention", sizes, {"gather": 1})
    assert found.seconds == pytest.approx((2 + 3) * 12 / (GIGA / 2))
    assert found.flops == (1 + 2 + 3 + 3) * 2 * 11
    later = cost("sparse_attention", sizes | {"keys": (40,)}, {"gather": 1})  # a later chunk of the same request
    assert later.flops == 4 * 3 * 2 * 11


def test_dense_attention_counts_the_causal_triangle() -> None:
    sizes = {"queries": (2, 3), "keys": (2, 7), "heads": 4, "qk": 6, "v": 5}
    found = cost("dense_attention", sizes, {"launch": 1})
    pairs = (1 + 2) + (5 + 6 + 7)
    assert found.flops == pairs * 2 * 4 * 11
    assert found.bytes == 2 * (5 * 4 * 11 + 9 * 6)  # latent rows once, width 6
    assert cost("dense_attention", sizes | {"causal": False}, {}).flops == (2 * 2 + 3 * 7) * 2 * 4 * 11
    apart = cost("dense_attention", sizes | {"kv_heads": 2}, {})
    assert apart.bytes == 2 * (5 * 4 * 11 + 9 * 2 * 11)


def test_dense_attention_computes_whole_blocks_and_rereads_keys() -> None:
    sizes = {"queries": (2,), "keys": (130,), "heads": 1, "qk": 6, "v": 5}
    # the rows see 129 and 130 keys: rounded up to blocks of 128 that is 256, but no more than there are
    assert cost("dense_attention", sizes, {"cube": 1}).seconds == pytest.approx(2 * 130 * 2 * 11 / 1e12)
    # 512 heads: each token is two tasks of 256 rows, and each reads what its token sees
    many = cost("dense_attention", sizes | {"heads": 512}, {"gather": 1})
    assert many.seconds == pytest.approx(2 * (129 + 130) * 12 / GIGA)


def test_indexer_scores_and_topk() -> None:
    sizes = {"queries": (5,), "keys": (9,), "heads": 2, "dim": 8, "topk": 64}
    # rows see 5..9 keys; tasks of 4 rows and of 1 row run in one wave on 2 cores. The first
    # computes more, the second reads more: 9 keys
    scores, read = 5 + 6 + 7 + 8, 9
    found = cost("indexer", sizes, {"cube": 1})
    assert found.flops == (5 + 6 + 7 + 8 + 9) * 2 * 2 * 8
    assert found.seconds == pytest.approx(scores * 2 * 2 * 8 / (1e12 / 2))
    assert cost("indexer", sizes, {"memory": 1}).seconds == pytest.approx(read * 8 * 2 / (GIGA / 2))
    # 9 keys or fewer are all among the top 64: nothing to pick. Of the top 4 every row of 5 and more has to
    assert cost("indexer", sizes, {"topk": 1}).seconds == 0
    few = sizes | {"topk": 4}  # log2(4) < 5: no merges; (1.36 v + 3.32 * 4) / 2 cycles, two vector cores a cube core
    cycles = sum((1.36 * v + 3.32 * 4) / 2 for v in (5, 6, 7, 8))
    picking = cost("indexer", few, {"topk": 1}).seconds
    assert picking == pytest.approx(cycles / 2 / 1e9)
    # picking goes on beside scoring and reading: the longest counts
    reading = read * 8 * 2 / (GIGA / 2)
    assert cost("indexer", few, {"memory": 1, "topk": 1}).seconds == pytest.approx(max(reading, picking))
    assert cost("indexer", few, {"memory": 1, "topk": 100}).seconds == pytest.approx(100 * picking)


def test_topk_alone() -> None:
    found = cost("topk", {"rows": 5, "width": 100, "k": 32}, {"topk": 1}, "float32")
    assert found.seconds == pytest.approx(2 * (136 + 3.32 * 32) / 2 / 1e9)  # 5 rows on 4 vector cores: 2 waves
    assert topk_cycles(np.array([0.0, 32.0]), 32).tolist() == [0.0, 0.0]
    assert topk_cycles(np.array([100.0]), 64).tolist() == [(136 + 3.32 * 64 + 50) / 2]  # log2(64) - 5 = 1: 50 merges


VECTOR_BYTES = [
    ("rms_norm", 2 * 2 * 60),
    ("add_rms_norm", 4 * 2 * 60),
    ("add_rms_norm_quant", 3 * 2 * 60 + 60 + 6 * 4),
    ("dynamic_quant", 2 * 60 + 60 + 6 * 4),
    ("static_quant", 2 * 60 + 60),
    ("swiglu", 2 * 60 + 2 * 30),
    ("swiglu_quant", 2 * 60 + 30 + 6 * 4),
    ("rope", 2 * 2 * 60),
    ("elementwise", 3 * 2 * 60),
    ("gating_topk", 2 * 60),
]


@pytest.mark.parametrize(("family", "moved"), VECTOR_BYTES)
def test_vector_ops_move_what_they_read_and_write(family: str, moved: int) -> None:
    found = cost(family, {"rows": 6, "width": 10}, {"memory": 2})
    assert found.bytes == moved
    assert found.seconds == pytest.approx(2 * moved / GIGA)


def test_vector_ops_fill_the_cores_and_spill_from_l2() -> None:
    assert cost("rms_norm", {"rows": 1, "width": 10}, {"fill": 8}).seconds == pytest.approx(2 * US)  # 1 of 4 cores
    assert cost("rms_norm", {"rows": 40, "width": 10}, {"fill": 8}).seconds == pytest.approx(8 * US)
    assert cost("rms_norm", {"rows": 40, "width": 10}, {"row": 1}).seconds == pytest.approx(10 * US)
    assert cost("rms_norm", {"rows": 40, "width": 10}, {"miss": 1}).seconds == pytest.approx(600 / GIGA)  # 1600 bytes
    assert cost("rms_norm", {"rows": 4, "width": 10}, {"miss": 1}).seconds == 0
    assert cost("copy", {"rows": 4, "width": 10, "moved": 77}, {"memory": 1}).bytes == 77


@pytest.mark.parametrize(
    ("rows", "width", "dtype", "padded"),
    [
        (6, 16, "bfloat16", 0),
        (6, 17, "bfloat16", 1),
        (1, 17, "bfloat16", 0),
        (6, 8, "float32", 0),
        (6, 9, "float32", 1),
    ],
)
def test_vector_rows_off_the_grid_are_padded(rows: int, width: int, dtype: str, padded: int) -> None:
    found = cost("rms_norm", {"rows": rows, "width": width}, {"padding": 1}, dtype)
    assert found.bytes == 2 * rows * width * (4 if dtype == "float32" else 2)
    assert found.seconds == pytest.approx(padded * found.bytes / GIGA)


def collective(op: str, ranks: tuple[int, ...], size: int, values: dict[str, float], **more: int) -> Cost:
    return cost("collective", {"op": op, "ranks": ranks, "bytes": size, **more}, values)


@pytest.mark.parametrize(
    ("op", "factor"), [("all_gather", 3), ("reduce_scatter", 3), ("all_reduce", 1.5), ("broadcast", 1)]
)
def test_collectives_send_what_optimal_algorithms_do(op: str, factor: float) -> None:
    found = collective(op, (0, 1, 2, 3), 4000, {"wire": 1, "wire_reduce": 2})
    slower = 2 if op in ("reduce_scatter", "all_reduce") else 1
    assert found.bytes == factor * 4000
    assert found.seconds == pytest.approx(slower * factor * 4000 / 2e9)  # the node's level
    assert found.bound == "communication"
    assert collective(op, (5,), 4000, {"wire": 1, "wire_reduce": 1}).seconds == 0  # alone


def test_uneven_all_to_all_takes_the_larger_direction() -> None:
    assert collective("all_to_all", (0, 1), 100, {"wire": 1}).seconds == pytest.approx(100 / 4e9)
    assert collective("all_to_all", (0, 1), 100, {"wire": 1}, received=700).seconds == pytest.approx(700 / 4e9)
    assert collective("all_to_all", (0, 1), 100, {"wire": 1}, received=7).seconds == pytest.approx(100 / 4e9)


@pytest.mark.parametrize(
    ("ranks", "rate"), [((0, 1), 4e9), ((1, 2), 2e9), ((6, 7), 4e9), ((0, 7), 2e9), ((7, 8), 1e9), ((100, 900), 1e9)]
)
def test_a_group_runs_on_the_link_level_that_it_spans(ranks: tuple[int, ...], rate: float) -> None:
    assert collective("all_gather", ranks, 1000, {"wire": 1}).seconds == pytest.approx(1000 / rate)


def test_the_protocol_switches_above_half_a_mebibyte_per_rank() -> None:
    limit, ranks = 512 * 1024, tuple(range(4))
    assert collective("all_gather", ranks, limit, {"switch": 5}).seconds == 0
    assert collective("all_gather", ranks, limit + 1, {"switch": 5}).seconds == pytest.approx(15 * US)
    assert collective("all_reduce", ranks, 4 * limit, {"switch": 5}).seconds == 0  # a quarter at a time
    assert collective("all_reduce", ranks, 4 * limit + 4, {"switch": 5}).seconds == pytest.approx(15 * US)
    assert collective("all_gather", tuple(range(8)), 1, {"launch": 3, "wide": 9}).seconds == pytest.approx(3 * US)
    assert collective("all_gather", tuple(range(9)), 1, {"launch": 3, "wide": 9}).seconds == pytest.approx(12 * US)


def test_a_send_is_latency_and_wire() -> None:
    found = collective("send", (0, 9), 2000, {"latency": 1, "wire": 1, "launch": 50})
    assert found.seconds == pytest.approx(5e-6 + 2000 / 1e9)


def test_dispatch_sends_all_but_the_rows_that_stay() -> None:
    sizes = {"tokens": 10, "hidden": 100, "topk": 2, "ranks": 4, "experts": 8}
    found = cost("moe_dispatch", sizes, {"wire": 1}, "int8")
    assert found.bytes == 10 * 2 * (100 + 4) * 3 / 4
    assert found.seconds == pytest.approx(found.bytes / 2e9)
    assert cost("moe_combine", sizes, {"wire": 1}).bytes == 10 * 2 * 200 * 3 / 4
    assert cost("moe_combine", sizes | {"row_bytes": 7}, {}).bytes == 10 * 2 * 7 * 3 / 4
    assert cost("moe_dispatch", sizes, {"latency": 1}).seconds == pytest.approx(2 * 2e-6)  # log2 of 4 ranks
    assert cost("moe_dispatch", sizes, {"spread": 1}, "int8").seconds == pytest.approx(2 * 1560 / 2e9)


def test_coefficients_by_the_most_specific_name() -> None:
    names = ("matmul", "matmul.int8", "matmul.Special", "vector", "matmul.int8@benchmark")
    device = toy(**{name: {"launch": float(number)} for number, name in enumerate(names, 1)})
    sizes = {"m": 1, "k": 1, "n": 1}

    def micros(kernel: Kernel, benchmark: bool = False) -> float:
        return price(kernel, device, benchmark=benchmark).seconds / US

    assert micros(Kernel("matmul", sizes)) == pytest.approx(1)
    assert micros(Kernel("matmul", sizes, "int8")) == pytest.approx(2)
    assert micros(Kernel("matmul", sizes, "int8", "Special")) == pytest.approx(3)
    assert micros(Kernel("matmul", sizes, "int8"), benchmark=True) == pytest.approx(5)
    assert micros(Kernel("matmul", sizes), benchmark=True) == pytest.approx(1)
    assert micros(Kernel("grouped_matmul", {"rows": (1,), "k": 1, "n": 1}, "int8")) == pytest.approx(2)
    assert micros(Kernel("rope", {"rows": 1, "width": 1})) == pytest.approx(4)


def test_large_batches_are_exchanged_by_the_normal_kernels() -> None:
    device = toy(**{"moe_dispatch": {"launch": 1}, "moe_dispatch.normal": {"launch": 2}})

    def micros(tokens: int, name: str = "") -> float:
        sizes = {"tokens": tokens, "hidden": 8, "topk": 2, "ranks": 4, "experts": 8}
        return price(Kernel("moe_dispatch", sizes, "int8", name), device).seconds / US

    assert micros(512) == pytest.approx(1)
    assert micros(513, "MoeDistributeDispatchV2") == pytest.approx(2)
    assert micros(8, "normal") == pytest.approx(2)


BAD = [
    (Kernel("warp", {}), "unknown family 'warp'"),
    (Kernel("matmul", {"m": 1, "k": 2}), "size 'n' is missing"),
    (Kernel("matmul", {"m": -1, "k": 2, "n": 2}), "size 'm' must be a number from 0 up, not -1"),
    (Kernel("matmul", {"m": 1, "k": 2, "n": 2}, "float32"), "states no cube peak"),
    (Kernel("matmul", {"m": 1, "k": 2, "n": 2}, "int4"), "no matrix product of this dtype"),
    (Kernel("rms_norm", {"rows": 1, "width": 2}, "complex64"), "unknown dtype"),
    (Kernel("grouped_matmul", {"rows": 3, "k": 2, "n": 2}), "size 'rows' must be a list"),
    (Kernel("indexer", {"queries": (1,), "keys": (1, 2), "heads": 1, "dim": 1, "topk": 1}), "1 query lengths but 2"),
    (Kernel("collective", {"op": "scatter", "ranks": (0, 1), "bytes": 1}), "unknown collective 'scatter'"),
    (Kernel("collective", {"op": "all_gather", "ranks": (0, 0), "bytes": 1}), "lists a rank twice"),
    (Kernel("topk", {"rows": 1, "width": 1, "k": 1}), "toy has no coefficients for topk"),
]


@pytest.mark.parametrize(("kernel", "why"), BAD)
def test_what_cannot_be_priced_says_why(kernel: Kernel, why: str) -> None:
    families = ("matmul", "grouped_matmul", "vector", "indexer", "collective")
    device = toy(**{name: {"launch": 1.0} for name in families})
    with pytest.raises(Unpriceable, match=why) as raised:
        price(kernel, device)
    assert raised.value.kernel is kernel
    assert "\n" not in str(raised.value)
