"""One held tensor, its stored bytes, and what exists at one time while weights are loaded and processed."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch

_NZ_ROWS, _NZ_ROW_BYTES = 16, 32  # a fractal block of Ascend's NZ format: 16 rows of 32 bytes


@dataclass(frozen=True)
class Held:
    """A tensor on one rank. shape, bytes: of the rank's part. layer: None outside of layers. placement: a plan's words.
    rule: what put it there. replaces: the tensor in whose place it stands."""

    name: str
    module: str
    component: str
    layer: int | None
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    placement: str
    category: str
    rule: str
    replaces: str | None = None


@dataclass(frozen=True)
class Unit:
    """Tensors that are processed together. always: from the load on; loading: until the last one that replaces them
    exists; made: by processing, in order."""

    always: tuple[Held, ...] = ()
    loading: tuple[Held, ...] = ()
    made: tuple[Held, ...] = ()

    @property
    def at_load(self) -> tuple[Held, ...]:
        return (*self.loading, *self.always)


def stored_bytes(shape: tuple[int, ...], dtype: torch.dtype, *, nz: bool = False) -> int:
    """Bytes of a tensor. nz: its last two dims are rounded up to blocks of 16 rows x 32 bytes (16 values of bf16, 32 of
    int8; CANN's FRACTAL_NZ). float32 and float64 have no NZ form and are not rounded; int32 is packed 4-bit values."""
    size, dims = dtype.itemsize, list(shape)
    if nz and len(dims) >= 2 and dtype in (torch.int8, torch.int32, torch.bfloat16, torch.float16):
        for i, block in ((-2, _NZ_ROWS), (-1, _NZ_ROW_BYTES // size)):
            dims[i] = -(-dims[i] // block) * block
    total = size
    for d in dims:
        total *= d
    return total


def peak_bytes(units: Iterable[Unit]) -> int:
    """The most bytes that exist at one time: everything is loaded first, then unit after unit makes its tensors, in
    order, and frees a loaded one once all that replace it are there (vLLM's process_weights_after_loading)."""
    units = list(units)
    now = sum(t.bytes for u in units for t in u.at_load)
    peak = now
    for unit in units:
        loaded = {t.name: t.bytes for t in unit.loading}
        for i, made in enumerate(unit.made):
            now += made.bytes
            peak = max(peak, now)
            if made.replaces and not any(later.replaces == made.replaces for later in unit.made[i + 1 :]):
                now -= loaded.pop(made.replaces, 0)
        now -= sum(loaded.values())  # what nothing replaces is gone, too
    assert now == sum(t.bytes for u in units for t in (*u.always, *u.made))
    return peak
