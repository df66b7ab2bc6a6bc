"""Products whose rows do not depend on how many rows stand beside them.

A GEMM library picks its blocking by the number of rows, so a row's last bits change with it; and torch's vectorised
loops work out the last elements of a tensor by another exp. In float64, the dtype of verification, products run on
tiles of a fixed number of rows, and filler stands behind the elements: a rank's rows then equal the reference's bit for
bit wherever no sum is re-ordered. Other dtypes run as one product.
"""

from collections.abc import Callable

import torch
from torch import Tensor

TILE = 16
_FILLER = 64  # more than one unrolled vector step of any CPU


def row_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x W^T (+ b): x [T, I], weight [O, I], bias [O] -> [T, O]."""
    if x.dtype != torch.float64 or x.dim() != 2:
        return torch.nn.functional.linear(x, weight, bias)
    return in_tiles(lambda tile: torch.nn.functional.linear(tile, weight, bias), x)


def in_tiles(function: Callable[..., Tensor], *rows: Tensor) -> Tensor:
    """function of the rows [T, ...], called on TILE rows at a time; the last tile is filled up with zeros."""
    count = rows[0].shape[0]
    fill = -count % TILE
    filled = [torch.cat([r, r.new_zeros((fill, *r.shape[1:]))]) if fill else r for r in rows]
    tiles = [function(*parts) for parts in zip(*(r.split(TILE) for r in filled))]
    if not tiles:
        return function(*(r.new_zeros((TILE, *r.shape[1:])) for r in rows))[:0]
    return torch.cat(tiles)[:count]


def each_element(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """function (exp, sigmoid, cos, ...) of every element of x, whatever stands beside it."""
    if x.dtype != torch.float64:
        return function(x)
    filled = torch.cat([x.reshape(-1), x.new_zeros(_FILLER)])
    return function(filled)[: x.numel()].view(x.shape)
