"""The transition ops: the only places where ranks talk, and the local cuts that go with them.

axis names the mesh axis and size its length. The communicating ones and `slice` depend on the rank, so the runtime
executes them with its mesh; their kernels here only carry shapes.
"""

import torch
from torch import Tensor

from emulator.ops.registry import LIBRARY

COLLECTIVES = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "all_to_all_rows")
TRANSITIONS = (*COLLECTIVES, "slice", "slice_rows", "pad", "unpad")


def _needs_world(*args, **kwargs):
    raise RuntimeError("transition ops run on the ranks of a World")


def _scaled(x: Tensor, dim: int, up: int = 1, down: int = 1) -> Tensor:
    shape = list(x.shape)
    assert shape[dim] * up % down == 0, f"dim {dim} of {shape} does not divide by {down}"
    shape[dim] = shape[dim] * up // down
    return x.new_empty(shape)


def _all_to_all_fake(x: Tensor, axis: str, size: int, split_dim: int, concat_dim: int) -> Tensor:
    return _scaled(_scaled(x, split_dim, down=size), concat_dim, up=size)


def pad_rows(x: Tensor, dim: int, length: int) -> Tensor:
    """x grown to `length` along dim; the new rows hold NaN (floats), -1 (integers) or False: seen if they leak."""
    shape = list(x.shape)
    shape[dim] = length - shape[dim]
    fill = float("nan") if x.is_floating_point() else False if x.dtype == torch.bool else -1
    return torch.cat([x, x.new_full(shape, fill)], dim)


def _unpad(x: Tensor, dim: int, length: int) -> Tensor:
    return x.narrow(dim, 0, length).clone()


def _register(schema: str, fake, kernel=_needs_world) -> None:
    name = schema.split("(")[0]
    LIBRARY.define(schema)
    LIBRARY.impl(name, kernel, "CPU")
    torch.library.register_fake(f"emulator::{name}", fake, lib=LIBRARY)


_register("all_reduce(Tensor x, str axis, int size) -> Tensor", lambda x, axis, size: torch.empty_like(x))
_register(
    "reduce_scatter(Tensor x, str axis, int size, int dim) -> Tensor",
    lambda x, axis, size, dim: _scaled(x, dim, down=size),
)
_register(
    "all_gather(Tensor x, str axis, int size, int dim) -> Tensor",
    lambda x, axis, size, dim: _scaled(x, dim, up=size),
)
_register("all_to_all(Tensor x, str axis, int size, int split_dim, int concat_dim) -> Tensor", _all_to_all_fake)
_register(
    "all_to_all_rows(Tensor rows, Tensor send_counts, Tensor recv_counts, str axis, int size) -> Tensor",
    lambda rows, send_counts, recv_counts, axis, size: torch.empty_like(rows),
)
_register(
    "slice(Tensor x, str axis, int size, int dim) -> Tensor", lambda x, axis, size, dim: _scaled(x, dim, down=size)
)
_register(
    "slice_rows(Tensor rows, Tensor counts, str axis, int size) -> Tensor",
    lambda rows, counts, axis, size: torch.empty_like(rows),
)
_register("pad(Tensor x, int dim, int length) -> Tensor", pad_rows, pad_rows)
_register("unpad(Tensor x, int dim, int length) -> Tensor", _unpad, _unpad)
