"""Sparse multi-head latent attention over a paged cache, in bounded memory.

Shape suffixes: T packed rows, N heads, d = n + r query/key dim (n without rope, r with), R latent, L = R + r cache
row, v value dim, S cache slots, K selected keys, B requests; C rows of one chunk, P key positions of one request,
H heads of one block, W columns of topk that a chunk uses.
"""

from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from emulator.ops.paged import physical_rows, request_rows, row_limits
from emulator.ops.row_tiles import in_tiles

Form = Literal["gather", "expanded"]

# Working sets: gathered rows are read twice right after being written, so they should stay in cache; expanded heads
# share one top-k mask, so a block should hold several.
_GATHER_BYTES = 8 << 20
_ABSORB_BYTES = 4 << 20
_EXPAND_BYTES = 32 << 20
_SCORE_BYTES = 8 << 20
_CHUNK_ROWS = 128
_KEY_TILE = 1024
# One head's expanded keys and values are the smallest unit of the expanded form: above this it is not offered.
_EXPAND_LIMIT_BYTES = 64 << 20
# Costs in multiply-adds of a large GEMM, fitted to timings at (N, d, R, v) = (16, 96, 128, 64) and (8, 256, 512, 256).
_COPY = 46.0  # one copied element
_SMALL_GEMM = 1.5  # one multiply-add of a GEMM with only N rows
_SOFTMAX = 60.0  # one score
_MASKED_SOFTMAX = 170.0  # one score, with its mask built, copied and added


@dataclass(frozen=True)
class _Dims:
    N: int
    n: int
    r: int
    R: int
    v: int
    K: int
    dtype: torch.dtype  # dtype of the arithmetic

    def gather_cost(self, rows: int, visible: int) -> float:
        """Cost of `rows` rows in gather form, each seeing about `visible` keys."""
        width = min(self.K, visible)
        per_key = self.N * ((2 * self.R + self.r) * _SMALL_GEMM + _SOFTMAX) + (self.R + self.r) * _COPY
        return rows * (width * per_key + self.N * self.R * (self.n + self.v))

    def expanded_cost(self, rows: int, visible: int) -> float:
        """Cost of `rows` rows in expanded form over `visible` keys, without the expansion itself."""
        return rows * visible * self.N * (self.n + self.r + self.v + _MASKED_SOFTMAX)

    def expansion_cost(self, keys: int) -> float:
        return keys * self.N * (self.R * (self.n + self.v) + (self.n + self.r + self.v) * _COPY)

    def expanded_rows(self, rows: int, context: int) -> int:
        """How many leading rows of a request should use the expanded form (the rest gather).

        A row's expanded cost grows with the keys it sees while its gather cost stops growing at K, so the cheap
        split is a prefix; the expansion is paid once for the longest prefix. Every chunk boundary is tried.
        """
        limit = _EXPAND_LIMIT_BYTES // ((self.n + self.r + self.v) * self.dtype.itemsize)
        best, best_cost, cost = 0, 0.0, 0.0  # costs relative to gathering every row
        for lo in range(0, rows, _CHUNK_ROWS):
            hi = min(lo + _CHUNK_ROWS, rows)
            visible = context + hi
            if visible > limit:
                break
            cost += self.expanded_cost(hi - lo, visible) - self.gather_cost(hi - lo, visible)
            if cost + self.expansion_cost(visible) < best_cost:
                best, best_cost = hi, cost + self.expansion_cost(visible)
        return best


def sparse_attention(
    q_TNd: Tensor,
    cache_SL: Tensor,
    w_uk_NnR: Tensor,
    w_uv_NRv: Tensor,
    topk_TK: Tensor,
    query_lens: Tensor,
    kv_lens: Tensor,
    block_table: Tensor,
    *,
    block_size: int,
    scale: float,
    form: Form | None = None,
) -> Tensor:
    """Attention of every packed row over its selected keys: softmax(scale * q k^T) v, per head.

    Multi-head latent attention of DeepSeek-V2/V3.2: with cache row [latent | k_pe], key = [latent @ w_uk^T | k_pe]
    and value = latent @ w_uv. The gather form moves w_uk to the query and w_uv behind the weighted sum instead.

    q_TNd [T, N, n + r], rope part last and rotated; cache_SL [slots, R + r]; w_uk_NnR [N, n, R]; w_uv_NRv [N, R, v];
    topk_TK int [T, K], distinct positions within the row's request in any order; query_lens, kv_lens [num_requests];
    block_table [num_requests, max_blocks]. Local row j of a request with q rows and L keys sees keys 0 .. L - q + j;
    ids outside that range (-1 in particular) select nothing and are never looked up.

    Returns [T, N, v] in q's dtype (arithmetic in at least float32): zeros for a row that selects nothing, NaN for
    rows after the last request. `form` overrides the cost estimate.
    """
    T, N, d = q_TNd.shape
    n, R = w_uk_NnR.shape[1:]
    dtype = torch.promote_types(q_TNd.dtype, torch.float32)
    dims = _Dims(N=N, n=n, r=d - n, R=R, v=w_uv_NRv.shape[2], K=topk_TK.shape[1], dtype=dtype)
    out_TNv = q_TNd.new_full((T, N, dims.v), float("nan"))
    request_t, visible_t = row_limits(query_lens, kv_lens)

    gathers: list[tuple[int, int]] = []
    for start, rows, kv_len, request in request_rows(query_lens, kv_lens):
        stop = start + rows
        blind = max(0, min(rows, rows - kv_len))
        out_TNv[start : start + blind] = 0
        start, rows = start + blind, rows - blind
        if rows == 0:
            continue
        if form is None:
            exact = dtype == torch.float64  # only the gather form can work on tiles of rows
            split = start if exact else start + dims.expanded_rows(rows, kv_len - rows)
        else:
            split = stop if form == "expanded" else start
        if split > start:
            slots_P = physical_rows(block_table[request], kv_len - (stop - split), block_size)
            span = slice(start, split)
            _expanded(
                dims, q_TNd[span], cache_SL, w_uk_NnR, w_uv_NRv, topk_TK[span], visible_t[span], slots_P, scale,
                out_TNv[span],
            )  # fmt: skip
        if split < stop:
            if gathers and gathers[-1][1] == split:  # neighbours share chunks: decode batches are one-row requests
                gathers[-1] = (gathers[-1][0], stop)
            else:
                gathers.append((split, stop))

    if gathers:
        w_uk_NnR, w_uv_NRv = w_uk_NnR.to(dtype), w_uv_NRv.to(dtype)  # once, every block needs all of them
        # slot = position + shift[request, position // block_size]: one division per id instead of two.
        shift_BM = (block_table.long() - torch.arange(block_table.shape[1])) * block_size
        block = max(1, _ABSORB_BYTES // (N * (R + dims.r) * dtype.itemsize))
        for start, stop in gathers:
            for lo in range(start, stop, block):
                span = slice(lo, min(lo + block, stop))
                masked_CK = (topk_TK[span] < 0) | (topk_TK[span] >= visible_t[span].unsqueeze(1))
                used = (~masked_CK.all(0)).nonzero()
                width = int(used[-1]) + 1 if used.numel() else 0  # short rows leave trailing columns unused
                width = dims.K if dtype == torch.float64 else width
                masked_CW = masked_CK[:, :width]
                # Position 0 stands in for ids that select nothing: every row here sees it, so it holds real data.
                ids_CW = topk_TK[span, :width].long().masked_fill(masked_CW, 0)
                slot_CW = ids_CW + shift_BM[request_t[span].unsqueeze(1), ids_CW // block_size]
                rows_of = partial(_gathered, dims, cache_SL, w_uk_NnR, w_uv_NRv, scale)
                if dtype == torch.float64:  # a row's keys in one order, however they were chosen
                    order_CW = ids_CW.masked_fill(masked_CW, block_table.numel() * block_size).argsort(
                        dim=1, stable=True
                    )
                    slot_CW, masked_CW = slot_CW.gather(1, order_CW), masked_CW.gather(1, order_CW)
                    out_TNv[span] = in_tiles(rows_of, q_TNd[span], slot_CW, masked_CW)
                else:
                    out_TNv[span] = rows_of(q_TNd[span], slot_CW, masked_CW)
    return out_TNv


def _gathered(
    dims: _Dims,
    cache_SL: Tensor,
    w_uk_NnR: Tensor,
    w_uv_NRv: Tensor,
    scale: float,
    q_CNd: Tensor,
    slot_CW: Tensor,
    masked_CW: Tensor,
) -> Tensor:
    """Absorbed form: copy each row's selected latents and use them as both key and value of all heads."""
    (C, W), L = slot_CW.shape, cache_SL.shape[1]
    q_CNL = absorb_query(q_CNd, w_uk_NnR, scale)
    o_CNR = torch.zeros(C, dims.N, dims.R, dtype=dims.dtype)
    step = max(1, _GATHER_BYTES // max(1, W * L * dims.dtype.itemsize))
    any_masked = bool(masked_CW.any())
    rows_buffer = torch.empty(min(C, step) * W, L, dtype=cache_SL.dtype)
    for lo in range(0, C if W else 0, step):
        hi = min(lo + step, C)
        c = hi - lo
        rows_ML = torch.index_select(cache_SL, 0, slot_CW[lo:hi].reshape(-1), out=rows_buffer[: c * W])
        rows_CWL = rows_ML.to(dims.dtype).view(c, W, L)
        scores_CNW = torch.bmm(q_CNL[lo:hi], rows_CWL.mT)
        if any_masked:
            scores_CNW.masked_fill_(masked_CW[lo:hi].unsqueeze(1), float("-inf"))
        o_CNR[lo:hi] = torch.bmm(torch.softmax(scores_CNW, dim=-1), rows_CWL[..., : dims.R])
    o_CNR.masked_fill_(masked_CW.all(1)[:, None, None], 0)  # nothing selected: the softmax above was 0 / 0
    return values_of(o_CNR, w_uv_NRv)


def absorb_query(q_CNd: Tensor, w_uk_NnR: Tensor, scale: float) -> Tensor:
    """Queries that meet cache rows as they are, [C, N, R + r]: scale * [q_nope w_uk | q_pe], in w_uk's dtype."""
    n = w_uk_NnR.shape[1]
    q_NCd = (q_CNd.to(w_uk_NnR.dtype) * scale).transpose(0, 1)
    q_lat_NCR = torch.bmm(q_NCd[..., :n], w_uk_NnR)
    return torch.cat((q_lat_NCR, q_NCd[..., n:]), dim=-1).transpose(0, 1).contiguous()


def values_of(o_CNR: Tensor, w_uv_NRv: Tensor) -> Tensor:
    """Weighted sums of latents [C, N, R] -> weighted sums of values [C, N, v]."""
    return torch.bmm(o_CNR.transpose(0, 1), w_uv_NRv).transpose(0, 1)


def _expanded(
    dims: _Dims,
    q_TNd: Tensor,
    cache_SL: Tensor,
    w_uk_NnR: Tensor,
    w_uv_NRv: Tensor,
    topk_TK: Tensor,
    visible_T: Tensor,
    slots_P: Tensor,
    scale: float,
    out_TNv: Tensor,
) -> None:
    """Dense form for consecutive rows of one request, the last of which sees all P keys. Writes out_TNv."""
    T, P = q_TNd.shape[0], slots_P.numel()
    heads = min(dims.N, max(1, _EXPAND_BYTES // (P * (dims.n + dims.r + dims.v) * dims.dtype.itemsize)))
    chunk = min(_CHUNK_ROWS, max(16, _SCORE_BYTES // (heads * P * dims.dtype.itemsize)))
    key_buffer = torch.empty(heads, P, dims.n + dims.r, dtype=dims.dtype)
    value_buffer = torch.empty(heads, P, dims.v, dtype=dims.dtype)
    for h0 in range(0, dims.N, heads):
        block = slice(h0, min(h0 + heads, dims.N))
        H = block.stop - h0
        key_HPd, value_HPv = key_buffer[:H], value_buffer[:H]
        for p in range(0, P, _KEY_TILE):
            tile = slice(p, min(p + _KEY_TILE, P))
            rows_tL = cache_SL.index_select(0, slots_P[tile]).to(dims.dtype)
            latent_tR, rope_tr = rows_tL[:, : dims.R], rows_tL[:, dims.R :]
            key_HPd[:, tile, : dims.n] = torch.matmul(latent_tR, w_uk_NnR[block].to(dims.dtype).mT)
            key_HPd[:, tile, dims.n :] = rope_tr
            value_HPv[:, tile] = torch.matmul(latent_tR, w_uv_NRv[block].to(dims.dtype))
        for lo in range(0, T, chunk):
            hi = min(lo + chunk, T)
            seen = P - T + hi
            masked_CK = (topk_TK[lo:hi] < 0) | (topk_TK[lo:hi] >= visible_T[lo:hi].unsqueeze(1))
            # Column `seen` collects the ids that select nothing and is cut off again.
            bias_Cs = torch.full((hi - lo, seen + 1), float("-inf"), dtype=dims.dtype)
            bias_Cs = bias_Cs.scatter_(1, topk_TK[lo:hi].long().masked_fill(masked_CK, seen), 0.0)[:, :seen]
            q_HCd = q_TNd[lo:hi, block].to(dims.dtype).transpose(0, 1)
            scores_HCs = torch.baddbmm(bias_Cs.expand(H, -1, -1), q_HCd, key_HPd[:, :seen].mT, alpha=scale)
            o_HCv = torch.bmm(torch.softmax(scores_HCs, dim=-1), value_HPv[:, :seen])
            o_HCv.masked_fill_(masked_CK.all(1)[None, :, None], 0)  # nothing selected: the softmax above was 0 / 0
            out_TNv[lo:hi, block] = o_HCv.transpose(0, 1)
