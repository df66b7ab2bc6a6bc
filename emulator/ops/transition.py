"""The transition ops: the only places where ranks talk, and the local cuts that go with them.

axis names the mesh axis and size its length. The communicating ones and `slice` depend on the rank, so the runtime
executes them with its mesh; their kernels here only carry shapes.
"""

from typing import Literal

import torch
from torch import Tensor

from emulator.ops.registry import LIBRARY

Order = Literal["contiguous", "zigzag", "round_robin"]

COLLECTIVES = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "all_to_all_rows", "broadcast")
LOCAL_CUTS = ("slice", "slice_rows", "local_query_lens", "local_kv_lens")  # depend on the rank, send nothing
# wait: where the value of a collective that started earlier is needed. regroup: full rows taken as those of an ep group
# of the same ranks. local_block_table: block tables beside local lengths
TRANSITIONS = (*COLLECTIVES, *LOCAL_CUTS, "pad", "unpad", "wait", "local_block_table", "regroup")


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


def windows_of(order: str, parts: int, per: int, index: int) -> list[tuple[int, int]]:
    """[start, stop) of every run of consecutive rows of rank `index` of `parts`, which holds `per` rows in all."""
    if order == "contiguous":
        return [(index * per, (index + 1) * per)]
    if order == "round_robin":
        return [(row, row + 1) for row in range(index, parts * per, parts)]
    assert order == "zigzag", order
    block = per // 2
    return [(b * block, (b + 1) * block) for b in (index, 2 * parts - 1 - index)]


def rank_order(order: str, parts: int, length: int) -> Tensor:
    """The row that stands at each place when the rows of all ranks are joined: int64 [length]."""
    runs = [w for index in range(parts) for w in windows_of(order, parts, length // parts, index)]
    return torch.cat([torch.arange(start, stop) for start, stop in runs])


def window_lengths(query_lens: Tensor, kv_lens: Tensor, windows: list[tuple[int, int]]) -> tuple[Tensor, Tensor]:
    """(query, key) lengths of every request on each window in turn: [windows * requests]."""
    found = [local_lengths(query_lens, kv_lens, start, stop) for start, stop in windows]
    return torch.cat([rows for rows, _ in found]), torch.cat([keys for _, keys in found])


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


def _pad(x: Tensor, dim: int, length: int, order: str = "contiguous", parts: int = 1) -> Tensor:
    padded = pad_rows(x, dim, length)
    return padded if order == "contiguous" else padded.index_select(dim, rank_order(order, parts, length))


def _unpad(x: Tensor, dim: int, length: int, order: str = "contiguous", parts: int = 1) -> Tensor:
    if order != "contiguous":
        x = x.index_select(dim, rank_order(order, parts, x.shape[dim]).argsort())
    return x.narrow(dim, 0, length).clone()


def _resized(x: Tensor, dim: int, length: int, order: str = "contiguous", parts: int = 1) -> Tensor:
    return x.new_empty((*x.shape[:dim], length, *x.shape[dim + 1 :]))


def _windows_fake(x: Tensor, order: str, per: int) -> Tensor:
    count = {"contiguous": 1, "zigzag": 2, "round_robin": per}[order]
    return x.new_empty((x.shape[0] * count, *x.shape[1:]))


def _block_table(block_table: Tensor, order: str, per: int) -> Tensor:
    """The table once for each window of a rank: block_table [requests, blocks] -> [windows * requests, blocks]."""
    return block_table.repeat(len(windows_of(order, 1, per, 0)), 1)


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
    "broadcast(Tensor x, str axis, int size, int owner, int rows) -> Tensor",
    lambda x, axis, size, owner, rows: x.new_empty((rows, *x.shape[1:])),
)
_register(
    "regroup(Tensor x, str axis, int size) -> Tensor",
    lambda x, axis, size: torch.empty_like(x), lambda x, axis, size: x.clone(),
)  # fmt: skip
_register("wait(Tensor x) -> Tensor", torch.empty_like, torch.clone)
_register(
    "local_query_lens(Tensor query_lens, str axis, int size, int per, str order) -> Tensor",
    lambda query_lens, axis, size, per, order: _windows_fake(query_lens, order, per),
)
_register(
    "local_kv_lens(Tensor kv_lens, Tensor query_lens, str axis, int size, int per, str order) -> Tensor",
    lambda kv_lens, query_lens, axis, size, per, order: _windows_fake(kv_lens, order, per),
)
_register("local_block_table(Tensor block_table, str order, int per) -> Tensor", _windows_fake, _block_table)
# pad brings full rows to the ranks' order and length, unpad back to the tokens as they are
_register("pad(Tensor x, int dim, int length, str order='contiguous', int parts=1) -> Tensor", _resized, _pad)
_register("unpad(Tensor x, int dim, int length, str order='contiguous', int parts=1) -> Tensor", _resized, _unpad)
