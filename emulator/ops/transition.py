"""The transition ops: the only places where ranks talk, and the local cuts that go with them.

axis names the mesh axis and size its length. The communicating ones and `slice` depend on the rank, so the runtime
executes them with its mesh; their kernels here only carry shapes.
"""

import torch
from torch import Tensor

from emulator.ops.registry import LIBRARY

COLLECTIVES = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "all_to_all_rows")
LOCAL_CUTS = ("slice", "slice_rows", "local_query_lens", "local_kv_lens")  # depend on the rank, send nothing
TRANSITIONS = (*COLLECTIVES, *LOCAL_CUTS, "pad", "unpad")


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


def local_lengths(query_lens: Tensor, kv_lens: Tensor, start: int, stop: int) -> tuple[Tensor, Tensor]:
    """(query, key) lengths of every request on the rows [start, stop) of the packed batch.

    A request with rows [s, e) and L keys has n = min(e, stop) - max(s, start) rows here, and key length
    max(L - (e - min(e, stop)), 0) if n > 0, else 0: its own rows on later ranks are taken off its keys, so that
    right-aligned causal masking stays exact (vLLM-Ascend, attention/context_parallel/sfa_cp).
    """
    ends = query_lens.cumsum(0)
    last = ends.clamp(max=stop)
    rows = (last - (ends - query_lens).clamp(min=start)).clamp(min=0)
    keys = (kv_lens - (ends - last)).clamp(min=0)
    return rows, torch.where(rows > 0, keys, 0)


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
_register(
    "local_query_lens(Tensor query_lens, str axis, int size, int per) -> Tensor",
    lambda query_lens, axis, size, per: torch.empty_like(query_lens),
)
_register(
    "local_kv_lens(Tensor kv_lens, Tensor query_lens, str axis, int size, int per) -> Tensor",
    lambda kv_lens, query_lens, axis, size, per: torch.empty_like(kv_lens),
)
_register("pad(Tensor x, int dim, int length) -> Tensor", pad_rows, pad_rows)
_register("unpad(Tensor x, int dim, int length) -> Tensor", _unpad, _unpad)
