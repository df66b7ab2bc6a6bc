"""Rows compared by value: which rows of a reference the rows of a tensor are, and spans of row numbers for people.

Rows are indices of dim 0, in spans "24..48" without the end.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_MAX_SPANS = 4
# (rtol, atol) by dtype, as torch.testing.assert_close has them
_TOLERANCES = {
    torch.float16: (1e-3, 1e-5),
    torch.bfloat16: (1.6e-2, 1e-5),
    torch.float32: (1.3e-6, 1e-5),
    torch.float64: (1e-7, 1e-7),
}


@dataclass(frozen=True)
class Tolerance:
    """Values are close when |found - expected| <= atol + rtol * |expected|; NaN is close to NaN."""

    rtol: float
    atol: float

    @classmethod
    def of(cls, rtol: float | None, atol: float | None, *tensors: Tensor) -> "Tolerance":
        """What is given; the rest by the least precise dtype of the tensors (exact for whole numbers)."""
        usual = max(_TOLERANCES.get(t.dtype, (0.0, 0.0)) for t in tensors)
        return cls(usual[0] if rtol is None else rtol, usual[1] if atol is None else atol)

    def close(self, found: Tensor, expected: Tensor) -> Tensor:
        """Element by element."""
        common = torch.promote_types(found.dtype, expected.dtype)
        return torch.isclose(found.to(common), expected.to(common), self.rtol, self.atol, equal_nan=True)

    def same(self, found: Tensor, expected: Tensor) -> bool:
        return found.shape == expected.shape and bool(self.close(found, expected).all())

    def close_rows(self, found: Tensor, expected: Tensor) -> Tensor:
        return self.close(found, expected).reshape(len(found), math.prod(found.shape[1:])).all(-1)


def locate(found: Tensor, reference: Tensor, start: int, tolerance: Tolerance) -> list[int | None]:
    """Which row of the reference each found row is, by value; None for a row that is none of them.

    Of equal rows the expected one (found row i is start + i) is taken, then the one after the row before, then any.
    """
    rows, pool = found.reshape(len(found), -1).double(), reference.reshape(len(reference), -1).double()
    # one number a row narrows the search; a fixed, uneven weighting tells permuted features apart
    weights = torch.cos(torch.arange(pool.shape[1], dtype=torch.float64) * 1.7)
    prints, print_pool = rows @ weights, pool @ weights
    at: list[int | None] = []
    for i, row in enumerate(rows):
        follows = [start + i] if start + i < len(pool) else []
        if at and at[-1] is not None and at[-1] + 1 < len(pool):
            follows.append(at[-1] + 1)
        nearest = int((print_pool - prints[i]).abs().nan_to_num(torch.inf).argmin())
        at.append(next((j for j in (*follows, nearest) if tolerance.close(row, pool[j]).all()), None))
    return at


def spans(rows: Sequence[int | None]) -> str:
    """[3, 4, 5, 9] as "3..6, 9"."""
    found: list[list[int]] = []
    for row in rows:
        assert row is not None
        if found and found[-1][1] == row:
            found[-1][1] = row + 1
        else:
            found.append([row, row + 1])
    texts = [f"{a}..{b}" if b > a + 1 else str(a) for a, b in found]
    return ", ".join(texts[:_MAX_SPANS]) + (f" and {len(texts) - _MAX_SPANS} more" if len(texts) > _MAX_SPANS else "")
