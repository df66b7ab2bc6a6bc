"""Top-k key selection of the sparse-attention indexer over a paged key cache, in bounded memory.

Shape suffixes: T packed rows, I indexer heads (IH), D indexer head dim (ID), S cache slots, K chosen keys;
C rows of one chunk, P key positions of one request, t keys of one tile.
"""

import torch
from torch import Tensor

from emulator.ops.paged import physical_rows, request_rows

# Rows of the scoring GEMM are (query, head) pairs. Fewer than ~1000 leave the GEMM starved.
_GEMM_ROWS = 1024
_MAX_QUERIES = 64
# Bound on the [C * I, t] logits, which are walked three times (GEMM, relu, weighted sum).
_TILE_BYTES = 4 << 20


def topk_ids(
    q_TID: Tensor,
    weights_TI: Tensor,
    cache_SD: Tensor,
    query_lens: Tensor,
    kv_lens: Tensor,
    block_table: Tensor,
    *,
    block_size: int,
    topk: int,
) -> Tensor:
    """Positions of the `topk` best-scoring visible keys of every row.

    score[s, t] = sum_h weights[s, h] * relu(q[s, h] . k[t] * D**-0.5), the "lightning indexer" of DeepSeek-V3.2
    (and GLM-5), computed in float32 or in q's dtype if that is wider.

    q_TID [T, I, D] with rope applied; weights_TI [T, I], any sign; cache_SD [slots, D]; query_lens, kv_lens
    [num_requests]; block_table [num_requests, max_blocks]. Local row j of a request with q rows and L keys sees
    keys 0 .. L - q + j.

    Returns int32 [T, topk]: distinct positions within the row's request in no particular order, then -1 for
    columns that have no key. Rows after the last request are all -1. A row that sees at most `topk` keys takes
    all of them, ascending, without scoring.
    """
    ids_TK = torch.full((q_TID.shape[0], topk), -1, dtype=torch.int32)
    column_K = torch.arange(topk, dtype=torch.int32)
    for start, rows, kv_len, request in request_rows(query_lens, kv_lens):
        context = kv_len - rows
        unscored = min(rows, max(0, topk - context))  # visible counts grow by one per row
        visible_C1 = torch.arange(context + 1, context + 1 + unscored).unsqueeze(1)
        ids_TK[start : start + unscored] = torch.where(column_K < visible_C1, column_K, -1)
        if unscored < rows:
            slots_P = physical_rows(block_table[request], kv_len, block_size)
            scored = slice(start + unscored, start + rows)
            _score_rows(q_TID[scored], weights_TI[scored], cache_SD, slots_P, ids_TK[scored])
    return ids_TK


def _score_rows(q_TID: Tensor, weights_TI: Tensor, cache_SD: Tensor, slots_P: Tensor, ids_TK: Tensor) -> None:
    """Fill ids_TK for the last T rows of a request, each of which sees more than K keys."""
    T, I, D = q_TID.shape  # noqa: E741
    P, K = slots_P.numel(), ids_TK.shape[1]
    dtype = torch.promote_types(q_TID.dtype, torch.float32)
    chunk = min(T, _MAX_QUERIES, max(1, _GEMM_ROWS // I))
    tile = min(P, max(64, _TILE_BYTES // (chunk * I * dtype.itemsize)))
    logits_buffer = torch.empty(chunk * I * tile, dtype=dtype)
    score_buffer = torch.empty(chunk * P, dtype=dtype)
    for lo in range(0, T, chunk):
        hi = min(lo + chunk, T)
        C = hi - lo
        first, last = P - T + lo + 1, P - T + hi  # keys seen by the chunk's first and last row
        q_MD = q_TID[lo:hi].to(dtype).reshape(C * I, D)
        weights_C1I = (weights_TI[lo:hi].to(dtype) * D**-0.5).unsqueeze(1)
        score_CP = score_buffer[: C * P].view(C, P)
        for t0 in range(0, last, tile):
            t1 = min(t0 + tile, last)
            key_tD = cache_SD.index_select(0, slots_P[t0:t1]).to(dtype)
            logits_Mt = logits_buffer[: C * I * (t1 - t0)].view(C * I, t1 - t0)
            torch.mm(q_MD, key_tD.t(), out=logits_Mt).relu_()
            score_CP[:, t0:t1] = torch.bmm(weights_C1I, logits_Mt.view(C, I, -1)).squeeze(1)
        # Only the corner past the first row's limit can be hidden. The row keeps its full length P because how
        # topk breaks ties depends on it: a reference that scores whole rows then picks the same keys.
        position_t = torch.arange(first, P)
        limit_C1 = torch.arange(first, last + 1).unsqueeze(1)
        score_CP[:, first:].masked_fill_(position_t >= limit_C1, float("-inf"))
        ids_TK[lo:hi] = torch.topk(score_CP, K, dim=-1, sorted=False).indices
