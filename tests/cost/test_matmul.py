"""Costs of matrix products on a toy die, worked out by hand."""

import pytest

from tests.cost.toy import GIGA, US, cost


def test_matmul_flops_bytes_and_each_term() -> None:
    sizes = {"m": 128, "k": 512, "n": 256}
    flops, moved = 2 * 128 * 512 * 256, 2 * (128 * 512 + 512 * 256 + 128 * 256)
    found = cost("matmul", sizes, {"launch": 7})
    assert (found.flops, found.bytes, found.seconds, found.bound) == (flops, moved, pytest.approx(7 * US), "launch")
    assert cost("matmul", sizes, {"cube": 2}).seconds == pytest.approx(2 * flops / 1e12)
    assert cost("matmul", sizes, {"memory": 3}).seconds == pytest.approx(3 * moved / GIGA)
    # one tile of 128 x 256 on two cores: half of them start, half of the only wave is idle
    assert cost("matmul", sizes, {"fill": 10}).seconds == pytest.approx(5 * US)
    assert cost("matmul", sizes, {"tail": 1}).seconds == pytest.approx(flops / 1e12)
    assert cost("matmul", sizes | {"n": 512}, {"tail": 1}).seconds == 0  # two tiles fill the wave


def test_cube_and_memory_overlap_in_part() -> None:
    sizes = {"m": 128, "k": 512, "n": 256}
    cube = cost("matmul", sizes, {"cube": 1}).seconds
    memory = cost("matmul", sizes, {"memory": 1}).seconds
    both = cost("matmul", sizes, {"cube": 1, "memory": 1})
    assert both.seconds == pytest.approx((cube**1.5 + memory**1.5) ** (2 / 3))
    assert both.bound == "memory"
    assert cost("matmul", sizes, {"cube": 100, "memory": 1}).bound == "cube"


def test_matmul_by_dtype_and_batch() -> None:
    sizes = {"m": 32, "k": 64, "n": 32, "batch": 3}
    found = cost("matmul", sizes, {"cube": 1}, "int8")
    assert found.flops == 3 * 2 * 32 * 64 * 32
    assert found.bytes == 3 * (32 * 64 + 64 * 32 + 2 * 32 * 32)
    assert found.seconds == pytest.approx(found.flops / 2e12)
    wide = cost("matmul", sizes, {"cube": 1}, "a16w8")  # 8-bit weights, 16-bit peak
    assert wide.bytes == 3 * (2 * 32 * 64 + 64 * 32 + 2 * 32 * 32)
    assert wide.seconds == pytest.approx(found.flops / 1e12)


def test_tiles_load_their_operands_again() -> None:
    # 300 x 300 is 3 x 2 tiles of 128 x 256 on 2 cores: 3 full waves; each tile loads 128 rows and 256 columns of
    # k = 64 bf16 elements, a core 128 bytes a cycle
    found = cost("matmul", {"m": 300, "k": 64, "n": 300}, {"reload": 1})
    assert found.seconds == pytest.approx(3 * (128 + 256) * 64 * 2 / (128 * 1e9))
    # small products load no more than they have; one tile is a wave as long as two
    one = cost("matmul", {"m": 5, "k": 64, "n": 32}, {"reload": 1})
    assert one.seconds == pytest.approx((5 + 32) * 64 * 2 / (128 * 1e9))
    # beside memory and cube, not after them
    both = cost("matmul", {"m": 300, "k": 64, "n": 300}, {"reload": 1, "memory": 1})
    memory = 2 * (2 * 300 * 64 + 300 * 300) / GIGA
    assert both.seconds == pytest.approx((found.seconds**1.5 + memory**1.5) ** (2 / 3))


@pytest.mark.parametrize(
    ("m", "k", "n", "turned"),
    [
        (32, 128, 128, 0),  # 128 bf16 elements are 256 bytes
        (32, 136, 128, 32 * 136),  # rows of the left operand are off the grid
        (32, 128, 136, 128 * 136),  # rows of the right operand
        (32, 136, 136, 32 * 136 + 136 * 136),
        (1, 136, 128, 0),  # a single row starts on the grid
        (16, 128, 136, 0),  # few rows stream the right operand as it is
    ],
)
def test_operands_off_the_grid_are_turned(m: int, k: int, n: int, turned: int) -> None:
    found = cost("matmul", {"m": m, "k": k, "n": n, "batch": 3}, {"turn": 1})
    assert found.seconds == pytest.approx(3 * 2 * 2 * turned / GIGA)  # written and read again


def test_weights_in_blocks_are_not_turned() -> None:
    sizes = {"m": 32, "k": 130, "n": 130}
    left, right = 2 * 2 * 32 * 130 / GIGA, 2 * 2 * 130 * 130 / GIGA
    assert cost("matmul", sizes, {"turn": 1}).seconds == pytest.approx(left + right)
    assert cost("matmul", sizes | {"blocked": True}, {"turn": 1}).seconds == pytest.approx(left)


def test_kernels_that_take_blocks_turn_plain_weights_of_any_width() -> None:
    sizes = {"rows": (3, 0, 5), "k": 256, "n": 256}
    assert cost("grouped_matmul", sizes, {"turn": 1}, "int8").seconds == 0  # on the grid, few rows
    found = cost("grouped_matmul", sizes | {"relayout": True}, {"turn": 1}, "int8")
    assert found.seconds == pytest.approx(2 * 2 * 256 * 256 / GIGA)  # of the two experts that have rows


def test_int8_sums_pass_through_memory_unless_the_cube_scales_them() -> None:
    sizes = {"m": 32, "k": 64, "n": 32}
    assert cost("matmul", sizes, {"dequant": 1}, "int8").seconds == pytest.approx(32 * 32 * 8 / GIGA)
    assert cost("matmul", sizes | {"dequant": "cube"}, {"dequant": 1}, "int8").seconds == 0
    assert cost("matmul", sizes, {"dequant": 1}).seconds == 0  # bf16


@pytest.mark.parametrize(("m", "k", "n", "off"), [(4, 16, 16, 0), (4, 17, 16, 1), (1, 17, 16, 0), (4, 16, 17, 1)])
def test_misaligned_rows(m: int, k: int, n: int, off: int) -> None:
    # 16 bf16 elements are 32 bytes; a single row of the left operand starts aligned whatever its length
    ideal = 2 * m * k * n / 1e12 + 2 * (m * k + k * n + m * n) / GIGA
    assert cost("matmul", {"m": m, "k": k, "n": n}, {"misaligned": 1}).seconds == pytest.approx(off * ideal)


def test_grouped_matmul_counts_real_rows_and_skips_idle_experts() -> None:
    found = cost("grouped_matmul", {"rows": (3, 0, 5), "k": 64, "n": 32}, {"cube": 1})
    assert found.flops == 2 * 8 * 64 * 32
    assert found.bytes == 2 * (8 * 64 + 2 * 64 * 32 + 8 * 32)  # two weights, not three
    assert cost("grouped_matmul", {"rows": (0, 0), "k": 64, "n": 32}, {"cube": 1, "memory": 1}).seconds == 0


def test_fused_products_add_up() -> None:
    parts = ((2, 64, 32, 1), (2, 32, 64, 4))
    found = cost("fused_matmuls", {"parts": parts}, {"cube": 1})
    assert found.flops == 2 * 2 * 64 * 32 + 4 * 2 * 2 * 32 * 64
