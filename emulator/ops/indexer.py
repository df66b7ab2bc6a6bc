"""dsa_indexer_key and dsa_indexer_topk: the lightning indexer's two sides.

Legend: T tokens, D hidden, Q query rank, I index heads, d index head dim, S cache slots, K top-k.
"""

import torch
from torch import Tensor
from torch.distributed.tensor.placement_types import Placement

from emulator.ops.indexer_kernel import topk_ids
from emulator.ops.linear import QUANTISED_SCHEMA, any_linear
from emulator.ops.registry import LOCAL, Illegal, R, define
from emulator.ops.rope import rotate
from emulator.ops.row_tiles import row_linear


def _key(
    x: Tensor, wk: Tensor, norm_weight: Tensor, norm_bias: Tensor, positions: Tensor, inv_freq: Tensor,
    eps: float, interleaved: bool, scaling: float,
) -> Tensor:  # fmt: skip
    """LayerNorm(x wk^T) with rope on its first dims: x [T, D], wk [d, D] -> index keys [T, d]."""
    key = row_linear(x, wk)
    key = torch.nn.functional.layer_norm(key, (wk.shape[0],), norm_weight, norm_bias, eps)
    return rotate(key, positions, inv_freq, 0, interleaved, scaling)


def _key_fake(x, wk, norm_weight, norm_bias, positions, inv_freq, eps, interleaved, scaling):
    return x.new_empty((x.shape[0], wk.shape[0]))


def _key_rule(x: Placement, positions: Placement, **weights: Placement) -> Placement:
    if all(w == R for w in weights.values()) and x == positions and x in (R, LOCAL):
        return x
    raise Illegal("index keys need whole rows and their own positions", "full-token or local-token, whole weights")


def _topk(
    q_resid: Tensor, x: Tensor, wq_b: Tensor, weights_proj: Tensor, index_cache: Tensor, positions: Tensor,
    inv_freq: Tensor, query_lens: Tensor, kv_lens: Tensor, block_table: Tensor,
    block_size: int, topk: int, interleaved: bool, scaling: float, *quantised: Tensor | None,
) -> Tensor:  # fmt: skip
    """Top-k positions per query row by sum_h w_h relu(q_h . k): int32 [T, K], -1 where fewer keys are visible.

    q_resid [T, Q] (normed), x [T, D], wq_b [I*d, Q], weights_proj [I, D], index_cache [S, d]. Formula: DeepSeek-V3.2
    report, lightning indexer; the constants I^-0.5 and d^-0.5 are HF's and change no choice. quantised: of wq_b, the
    tensors that a quantised linear has beside its weight.
    """
    num_heads, head_dim = weights_proj.shape[0], index_cache.shape[1]
    q = any_linear(q_resid, wq_b, None, *quantised).view(-1, num_heads, head_dim)
    q = rotate(q, positions, inv_freq, 0, interleaved, scaling)
    weights = torch.nn.functional.linear(x, weights_proj) * num_heads**-0.5
    return topk_ids(q, weights, index_cache, query_lens, kv_lens, block_table, block_size=block_size, topk=topk)


def _topk_fake(
    q_resid, x, wq_b, weights_proj, index_cache, positions, inv_freq, query_lens, kv_lens, block_table,
    block_size, topk, interleaved, scaling, *quantised,
):  # fmt: skip
    return q_resid.new_empty((q_resid.shape[0], topk), dtype=torch.int32)


def _topk_rule(**placements: Placement) -> Placement:
    if all(p == R for p in placements.values()):
        return R
    rows = ("q_resid", "x", "positions", "query_lens", "kv_lens")
    if all(p == (LOCAL if name in rows else R) for name, p in placements.items()):
        return LOCAL  # local queries over the whole index cache, at their own lengths
    raise Illegal(
        "the fused indexer sees the complete sequence: its queries, its index cache and the per-request lengths are "
        "those of the whole batch",
        "full-token",
    )


define(
    "dsa_indexer_key(Tensor x, Tensor wk, Tensor norm_weight, Tensor norm_bias, Tensor positions, Tensor inv_freq, "
    "float eps, bool interleaved, float scaling) -> Tensor",
    kernel=_key,
    fake=_key_fake,
    rule=_key_rule,
)
define(
    "dsa_indexer_topk(Tensor q_resid, Tensor x, Tensor wq_b, Tensor weights_proj, Tensor index_cache, "
    "Tensor positions, Tensor inv_freq, Tensor query_lens, Tensor kv_lens, Tensor block_table, "
    f"int block_size, int topk, bool interleaved, float scaling, {QUANTISED_SCHEMA}) -> Tensor",
    kernel=_topk,
    fake=_topk_fake,
    rule=_topk_rule,
)
