"""multihead_latent_attention: dense MLA, for models without an indexer. Every query sees all keys before it.

Shape suffixes: T packed rows, N heads, d = n + r query/key dim (n without rope, r with), R latent, L = R + r cache
row, v value dim, S cache slots, P key positions of one request; C rows of one chunk, V keys that a chunk sees.
"""

import torch
from torch import Tensor

from emulator.ops.mla import attention_rule
from emulator.ops.mla_kernel import absorb_query, values_of
from emulator.ops.paged import physical_rows, request_rows
from emulator.ops.quantised import int_matmul, row_codes
from emulator.ops.registry import compute_dtype, define

_SCORE_BYTES = 8 << 20  # scores of one chunk: written once and read three times, so they should stay in cache
_CHUNK_ROWS = 128


def _attention(
    q_TNd: Tensor, cache_SL: Tensor, w_uk_NnR: Tensor, w_uv_NRv: Tensor, query_lens: Tensor, kv_lens: Tensor,
    block_table: Tensor, block_size: int, scale: float, int8: bool = False,
) -> Tensor:  # fmt: skip
    """Causal attention of every packed row over the latent cache, in chunks of rows: no score matrix is ever whole.

    logits = scale * ((q_nope W_UK_T) . latent + q_pe . k_pe); output = (softmax(logits) latent) W_UV (DeepSeek-V2
    report, absorbed MLA), with cache row [latent | k_pe].

    q_TNd [T, N, n + r], rope part last and rotated; cache_SL [slots, R + r]; w_uk_NnR [N, n, R]; w_uv_NRv [N, R, v];
    query_lens, kv_lens [num_requests]; block_table [num_requests, max_blocks]. Local row j of a request with q rows
    and L keys sees keys 0 .. L - q + j.

    int8: absorbed queries and cache rows are 8-bit codes with a scale for each row (of a head, of a token), their
    products exact integers, and values what the codes of the latents stand for.

    Returns [T, N, v] in q's dtype (arithmetic in at least float32): zeros for a row that sees no key, NaN for rows
    after the last request.
    """
    T, N = q_TNd.shape[:2]
    dtype = compute_dtype(q_TNd)
    w_uk_NnR, w_uv_NRv = w_uk_NnR.to(dtype), w_uv_NRv.to(dtype)
    out_TNv = q_TNd.new_full((T, N, w_uv_NRv.shape[2]), float("nan"))
    for start, rows, kv_len, request in request_rows(query_lens, kv_lens):
        blind = max(0, min(rows, rows - kv_len))
        out_TNv[start : start + blind] = 0
        if blind == rows:
            continue
        keys_PL = cache_SL.index_select(0, physical_rows(block_table[request], kv_len, block_size)).to(dtype)
        codes = row_codes(keys_PL) if int8 else None
        if codes is not None:
            keys_PL = codes[0].to(dtype) * codes[1]
        chunk = min(_CHUNK_ROWS, max(1, _SCORE_BYTES // (N * kv_len * dtype.itemsize)))
        for lo in range(start + blind, start + rows, chunk):
            hi = min(lo + chunk, start + rows)
            seen = kv_len - (start + rows - hi)
            codes_V = None if codes is None else (codes[0][:seen], codes[1][:seen])
            out_TNv[lo:hi] = _chunk(absorb_query(q_TNd[lo:hi], w_uk_NnR, scale), keys_PL[:seen], w_uv_NRv, codes_V)
    return out_TNv


def _chunk(q_CNL: Tensor, keys_VL: Tensor, w_uv_NRv: Tensor, codes_V: tuple[Tensor, Tensor] | None = None) -> Tensor:
    """Consecutive rows, the last of which sees all V keys, the one before it all but one, and so on -> [C, N, v].
    codes_V: int8 codes and scales of the keys, with which scores are products of codes."""
    (C, N, L), V, R = q_CNL.shape, keys_VL.shape[0], w_uv_NRv.shape[1]
    if codes_V is None:
        scores_CNV = torch.mm(q_CNL.view(C * N, L), keys_VL.mT).view(C, N, V)
    else:
        q_codes_ML, q_scale_M1 = row_codes(q_CNL.view(C * N, L))
        products_MV = int_matmul(q_codes_ML, codes_V[0]).to(q_CNL.dtype)
        scores_CNV = (products_MV * q_scale_M1 * codes_V[1].mT).view(C, N, V)
    future_CC = torch.ones(C, C, dtype=torch.bool).triu(1)  # of the last C keys, those after a row's own position
    scores_CNV[..., V - C :].masked_fill_(future_CC.unsqueeze(1), float("-inf"))
    weights_CNV = torch.softmax(scores_CNV, dim=-1)
    return values_of(torch.mm(weights_CNV.view(C * N, V), keys_VL[:, :R]).view(C, N, R), w_uv_NRv)


def _attention_fake(q, cache, w_uk_t, w_uv, query_lens, kv_lens, block_table, block_size, scale, int8=False):
    assert q.shape[1] == w_uk_t.shape[0] == w_uv.shape[0], (
        f"attention: {q.shape[1]} query heads against derived weights of {w_uk_t.shape[0]} and {w_uv.shape[0]} heads"
    )
    return q.new_empty((q.shape[0], q.shape[1], w_uv.shape[2]))


define(
    "multihead_latent_attention(Tensor q, Tensor cache, Tensor w_uk_t, Tensor w_uv, Tensor query_lens, Tensor kv_lens, "
    "Tensor block_table, int block_size, float scale, bool int8=False) -> Tensor",
    kernel=_attention,
    fake=_attention_fake,
    rule=attention_rule,
)
