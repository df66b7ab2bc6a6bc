"""mla_absorb and mla_sparse_attention. There is no quantised variant: the attention's inputs are bf16 or wider.

Legend: T tokens, N heads, n nope dim, r rope dim, R latent rank, v value dim, S cache slots, K top-k.
"""

from torch import Tensor
from torch.distributed.tensor.placement_types import Placement, Shard

from emulator.ops.mla_kernel import sparse_attention
from emulator.ops.registry import LOCAL, Illegal, R, define


def _absorb(weight: Tensor, nope: int, value: int) -> tuple[Tensor, Tensor]:
    """kv_b_proj [N*(n+v), R] -> (W_UK_T [N, n, R], W_UV [N, R, v]), N = the heads of this (shard of the) weight."""
    per_head = weight.view(-1, nope + value, weight.shape[1])
    return per_head[:, :nope].contiguous(), per_head[:, nope:].transpose(1, 2).contiguous()


def _absorb_fake(weight: Tensor, nope: int, value: int) -> tuple[Tensor, Tensor]:
    num_heads, rank = weight.shape[0] // (nope + value), weight.shape[1]
    return weight.new_empty((num_heads, nope, rank)), weight.new_empty((num_heads, rank, value))


def _absorb_rule(weight: Placement) -> tuple[Placement, Placement]:
    if weight in (R, Shard(0)):
        return weight, weight
    raise Illegal("W_UK_T and W_UV are per head: kv_b_proj can only be split by heads", "whole, or split by heads")


def _attention(
    q: Tensor, cache: Tensor, w_uk_t: Tensor, w_uv: Tensor, ids: Tensor, query_lens: Tensor, kv_lens: Tensor,
    block_table: Tensor, block_size: int, scale: float,
) -> Tensor:  # fmt: skip
    """Attention of q [T, N, n+r] over the top-k ids [T, K] of the latent cache [S, R+r] -> [T, N, v].

    logits = scale * ((q_nope W_UK_T) . latent + q_pe . k_pe); output = (softmax(logits) latent) W_UV, causal and
    right-aligned in each request (DeepSeek-V2 report, absorbed MLA).
    """
    return sparse_attention(
        q, cache, w_uk_t, w_uv, ids, query_lens, kv_lens, block_table, block_size=block_size, scale=scale
    )


def _attention_fake(q, cache, w_uk_t, w_uv, ids, query_lens, kv_lens, block_table, block_size, scale):
    assert q.shape[1] == w_uk_t.shape[0] == w_uv.shape[0], (
        f"attention: {q.shape[1]} query heads against derived weights of {w_uk_t.shape[0]} and {w_uv.shape[0]} heads"
    )
    assert ids.shape[0] == q.shape[0], f"attention: {q.shape[0]} query rows against {ids.shape[0]} rows of top-k ids"
    return q.new_empty((q.shape[0], q.shape[1], w_uv.shape[2]))


def attention_rule(q: Placement, w_uk_t: Placement, w_uv: Placement, **rest: Placement) -> Placement:
    """Layout rule of attention over the latent cache. rest: cache and block_table, and what each row brings: lengths,
    and top-k ids where there are any."""
    whole_batch = all(p == R for p in rest.values())
    if whole_batch and q == w_uk_t == w_uv == R:
        return R
    if whole_batch and q == Shard(1) and w_uk_t == w_uv == Shard(0):
        return Shard(1)
    of_rows = {p for name, p in rest.items() if name not in ("cache", "block_table")}
    if rest["cache"] == rest["block_table"] == R and q == LOCAL and w_uk_t == w_uv == R and of_rows == {LOCAL}:
        return LOCAL  # local queries with all heads over the whole cache, at their own lengths
    raise Illegal(
        "attention sees the complete sequence, and its heads meet their own derived weights",
        "full-token with all heads or a shard of heads; full-token ids and lengths, or all of them local-token",
    )


define(
    "mla_absorb(Tensor weight, int nope, int value) -> (Tensor, Tensor)",
    kernel=_absorb,
    fake=_absorb_fake,
    rule=_absorb_rule,
)
define(
    "mla_sparse_attention(Tensor q, Tensor cache, Tensor w_uk_t, Tensor w_uv, Tensor ids, Tensor query_lens, "
    "Tensor kv_lens, Tensor block_table, int block_size, float scale) -> Tensor",
    kernel=_attention,
    fake=_attention_fake,
    rule=attention_rule,
)
