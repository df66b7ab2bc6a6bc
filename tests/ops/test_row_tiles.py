"""A row's bits do not depend on the rows beside it, in float64."""

import pytest
import torch

from emulator.ops.row_tiles import TILE, each_element, in_tiles, row_linear

WINDOWS = [(0, 1), (0, 3), (5, 9), (3, 16), (7, 40), (13, 14), (1, 61)]


def _randn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(len(shape)))


@pytest.mark.parametrize(("features", "out"), [(144, 56), (624, 144), (7168, 40), (56, 672)])
def test_a_window_of_rows_gives_the_same_bits(features, out):
    x, weight = _randn(61, features), _randn(out, features)
    whole = row_linear(x, weight)
    torch.testing.assert_close(whole, x @ weight.t())
    assert all(torch.equal(row_linear(x[a:b], weight), whole[a:b]) for a, b in WINDOWS)


def test_tiles_are_filled_with_zeros_and_cut_again():
    seen = []

    def double(rows: torch.Tensor) -> torch.Tensor:
        seen.append(tuple(rows.shape))
        return rows * 2

    rows = _randn(TILE + 3, 2)
    assert torch.equal(in_tiles(double, rows), rows * 2)
    assert seen == [(TILE, 2)] * 2
    assert in_tiles(double, rows[:0]).shape == (0, 2)


def test_bias_and_other_dtypes():
    x, weight, bias = _randn(5, 8), _randn(3, 8), _randn(3)
    torch.testing.assert_close(row_linear(x, weight, bias), x @ weight.t() + bias)
    assert torch.equal(row_linear(x.float(), weight.float()), torch.nn.functional.linear(x.float(), weight.float()))


@pytest.mark.parametrize("function", [torch.sigmoid, torch.cos, torch.sin, torch.nn.functional.silu])
def test_an_element_does_not_depend_on_where_it_stands(function):
    x = _randn(13, 23)
    whole = each_element(function, x)
    torch.testing.assert_close(whole, function(x))
    assert all(torch.equal(each_element(function, x[i : i + 1]), whole[i : i + 1]) for i in range(13))
