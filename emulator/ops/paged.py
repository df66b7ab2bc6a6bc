"""Helpers that translate packed rows and request-local positions into rows of a paged cache."""

import torch
from torch import Tensor


def request_rows(query_lens: Tensor, kv_lens: Tensor) -> list[tuple[int, int, int, int]]:
    """Rows owned by each request of a packed batch, as plain ints.

    query_lens, kv_lens: [num_requests]. Returns (row_start, num_rows, kv_len, request_index) for every request
    that has at least one row.
    """
    spans: list[tuple[int, int, int, int]] = []
    start = 0
    for request, (rows, kv_len) in enumerate(zip(query_lens.tolist(), kv_lens.tolist(), strict=True)):
        if rows > 0:
            spans.append((start, rows, kv_len, request))
            start += rows
    return spans


def row_limits(query_lens: Tensor, kv_lens: Tensor) -> tuple[Tensor, Tensor]:
    """Owning request and number of visible keys of every packed row: (request_t, visible_t), both int64 [rows].

    Right-aligned causal rule: local row j of q rows over L keys sees keys 0 .. L - q + j, so L - q + j + 1 of them
    (0 when that is negative).
    """
    query_lens, kv_lens = query_lens.long(), kv_lens.long()
    request_t = torch.arange(query_lens.numel()).repeat_interleave(query_lens)
    row_t = torch.arange(request_t.numel())
    visible_t = row_t + 1 + (kv_lens - query_lens.cumsum(0))[request_t]
    return request_t, visible_t.clamp_(min=0)


def physical_rows(block_table_row: Tensor, kv_len: int, block_size: int) -> Tensor:
    """Cache rows that hold positions 0 .. kv_len - 1 of one request: int64 [kv_len].

    Only the blocks those positions use are read from the table, so entries past them may be anything.
    """
    num_blocks = -(-kv_len // block_size)
    first_B1 = block_table_row[:num_blocks].long().unsqueeze(1) * block_size
    return (first_B1 + torch.arange(block_size)).reshape(-1)[:kv_len]
