"""The decoder as single-device modules over the op vocabulary; names follow the HF checkpoint.

These modules know nothing of ranks. They run eagerly and are traced into the Program.
Legend: T tokens, D hidden, N heads.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from emulator.model.config import HF_LATENT_NORM_EPS, ModelConfig
from emulator.model.rope import inverse_frequencies, softmax_scale

ops = torch.ops.emulator

INDEXER_NORM_EPS = 1e-6


@dataclass(frozen=True)
class Batch:
    """What a step works on. Packed rows (TND): request i owns the next query_lens[i] rows.

    input_ids, positions, slots: int64 [T]; token_mask: bool [T]; query_lens, kv_lens: int64 [requests], kv_lens
    counting the request's own queries; block_table: int64 [requests, blocks]; latent_caches: per layer [S, R+r];
    index_caches: per layer [S, d].
    """

    input_ids: Any
    positions: Any
    slots: Any
    token_mask: Any
    query_lens: Any
    kv_lens: Any
    block_table: Any
    latent_caches: Any
    index_caches: Any


@dataclass(frozen=True)
class ProgramOptions:
    """latent_norm_eps: eps of q_a/kv_a_layernorm, None = the config's (engines), default HF's fixed 1e-6.
    block_size: slots per block of the paged caches."""

    latent_norm_eps: float | None = HF_LATENT_NORM_EPS
    block_size: int = 16


def parameter(*shape: int, unit: int = 1) -> nn.Parameter:
    """A meta parameter. unit: features that must stay on one rank when it is split (a head's width)."""
    made = nn.Parameter(torch.empty(shape, device="meta"), requires_grad=False)
    made.shard_unit = unit  # type: ignore[attr-defined]
    return made


class Linear(nn.Module):
    def __init__(self, in_features: int, out_features: int, bias: bool = False, unit: int = 1):
        super().__init__()
        self.weight = parameter(out_features, in_features, unit=unit)
        self.bias = parameter(out_features) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return ops.linear(x, self.weight, self.bias)


class RMSNorm(nn.Module):
    """rms_norm; with a residual, add_rms_norm2 -> (normed, new residual)."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = parameter(size)
        self.eps = eps

    def forward(self, x: Tensor, residual: Tensor | None = None):
        if residual is None:
            return ops.rms_norm(x, self.weight, self.eps)
        normed, total = ops.add_rms_norm2(x, residual, self.weight, self.eps)
        return normed, total


class FinalNorm(RMSNorm):
    def forward(self, x: Tensor, residual: Tensor | None = None):
        return ops.add_rms_norm(x, residual, self.weight, self.eps)


class HeadProjection(Linear):
    """A linear whose output is split into heads: [T, in] -> [T, N, d]."""

    def __init__(self, in_features: int, num_heads: int, head_dim: int):
        super().__init__(in_features, num_heads * head_dim, unit=head_dim)
        self.head_dim = head_dim

    def forward(self, x: Tensor) -> Tensor:
        return torch.unflatten(super().forward(x), -1, (-1, self.head_dim))


class OutputProjection(Linear):
    """A linear that takes heads: [T, N, d] -> [T, out]."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(torch.flatten(x, 1))


class KeyValueUp(nn.Module):
    """kv_b_proj: never applied to tokens; W_UK_T and W_UV are derived from it."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.nope, self.value = config.qk_nope_head_dim, config.v_head_dim
        per_head = self.nope + self.value
        self.weight = parameter(config.num_attention_heads * per_head, config.kv_lora_rank, unit=per_head)

    def forward(self) -> tuple[Tensor, Tensor]:
        w_uk_t, w_uv = ops.mla_absorb(self.weight, self.nope, self.value)
        return w_uk_t, w_uv


class LayerNormWeights(nn.Module):
    def __init__(self, size: int):
        super().__init__()
        self.weight, self.bias = parameter(size), parameter(size)


class Cat(nn.Module):
    """The row that goes into the caches: latent | rope key | index key."""

    def forward(self, *parts: Tensor) -> Tensor:
        return torch.cat(parts, -1)


class CacheWrite(nn.Module):
    def forward(self, row: Tensor, latent_cache: Tensor, index_cache: Tensor | None, slots: Tensor, width: int):
        latent_cache = ops.cache_write(latent_cache, row, slots, 0)
        if index_cache is not None:
            index_cache = ops.cache_write(index_cache, row, slots, width)
        return latent_cache, index_cache


class IndexerKey(Linear):
    """indexer.wk: the key side, [T, D] -> index keys [T, d]."""

    def __init__(self, config: ModelConfig, rope_scaling: float):
        super().__init__(config.hidden_size, config.index_head_dim)
        self.interleaved, self.rope_scaling = config.indexer_interleaved, rope_scaling

    def forward(self, x: Tensor, norm_weight: Tensor, norm_bias: Tensor, positions: Tensor, inv_freq: Tensor) -> Tensor:
        return ops.dsa_indexer_key(
            x, self.weight, norm_weight, norm_bias, positions, inv_freq,
            INDEXER_NORM_EPS, self.interleaved, self.rope_scaling,
        )  # fmt: skip


class Indexer(nn.Module):
    """The lightning indexer: `wk` makes index keys, `forward` scores the cached ones -> top-k ids [T, K]."""

    def __init__(self, config: ModelConfig, rope_scaling: float, block_size: int):
        super().__init__()
        self.wq_b = Linear(config.q_lora_rank, config.index_n_heads * config.index_head_dim)
        self.wk = IndexerKey(config, rope_scaling)
        self.k_norm = LayerNormWeights(config.index_head_dim)
        self.weights_proj = Linear(config.hidden_size, config.index_n_heads)
        self.topk, self.block_size = config.index_topk, block_size

    def forward(self, x: Tensor, q_resid: Tensor, cache: Tensor, inv_freq: Tensor, batch: Batch) -> Tensor:
        return ops.dsa_indexer_topk(
            q_resid, x, self.wq_b.weight, self.weights_proj.weight, cache, batch.positions, inv_freq,
            batch.query_lens, batch.kv_lens, batch.block_table,
            self.block_size, self.topk, self.wk.interleaved, self.wk.rope_scaling,
        )  # fmt: skip


class SparseAttention(nn.Module):
    def __init__(self, scale: float, block_size: int):
        super().__init__()
        self.scale, self.block_size = scale, block_size

    def forward(self, q: Tensor, cache: Tensor, w_uk_t: Tensor, w_uv: Tensor, ids: Tensor, batch: Batch) -> Tensor:
        return ops.mla_sparse_attention(
            q, cache, w_uk_t, w_uv, ids, batch.query_lens, batch.kv_lens, batch.block_table, self.block_size, self.scale
        )


class Attention(nn.Module):
    """MLA in absorbed form over the latent cache, with top-k ids from its own or an earlier layer's indexer."""

    def __init__(self, config: ModelConfig, layer: int, options: ProgramOptions):
        super().__init__()
        eps = config.rms_norm_eps if options.latent_norm_eps is None else options.latent_norm_eps
        self.config, self.layer = config, layer
        _, self.rope_scaling = inverse_frequencies(config)
        self.q_a_proj = Linear(config.hidden_size, config.q_lora_rank, config.attention_bias)
        self.q_a_layernorm = RMSNorm(config.q_lora_rank, eps)
        self.q_b_proj = HeadProjection(config.q_lora_rank, config.num_attention_heads, config.qk_head_dim)
        latent_row = config.kv_lora_rank + config.qk_rope_head_dim
        self.kv_a_proj_with_mqa = Linear(config.hidden_size, latent_row, config.attention_bias)
        self.kv_a_layernorm = RMSNorm(config.kv_lora_rank, eps)
        self.kv_b_proj = KeyValueUp(config)
        self.indexer = Indexer(config, self.rope_scaling, options.block_size) if config.has_indexer(layer) else None
        self.kv_row, self.cache = Cat(), CacheWrite()
        self.attn = SparseAttention(softmax_scale(config), options.block_size)
        width = config.num_attention_heads * config.v_head_dim
        self.o_proj = OutputProjection(width, config.hidden_size, config.attention_bias, unit=config.v_head_dim)

    def forward(self, x: Tensor, ids: Tensor | None, inv_freq: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """x [T, D], ids [T, K] of the last full-indexer layer (or None) -> (output [T, D], ids used)."""
        config, layer = self.config, self.layer
        q_resid = self.q_a_layernorm(self.q_a_proj(x))
        q = self.q_b_proj(q_resid)
        q = ops.rope(q, batch.positions, inv_freq, config.qk_nope_head_dim, True, self.rope_scaling)
        latent, k_pe = torch.split(self.kv_a_proj_with_mqa(x), [config.kv_lora_rank, config.qk_rope_head_dim], -1)
        parts = [self.kv_a_layernorm(latent), ops.rope(k_pe, batch.positions, inv_freq, 0, True, self.rope_scaling)]
        if self.indexer is not None:
            k_norm = self.indexer.k_norm
            parts.append(self.indexer.wk(x, k_norm.weight, k_norm.bias, batch.positions, inv_freq))
        row = self.kv_row(*parts)
        latent_cache, index_cache = self.cache(
            row,
            batch.latent_caches[layer],
            batch.index_caches[layer] if self.indexer is not None else None,
            batch.slots,
            config.kv_lora_rank + config.qk_rope_head_dim,
        )
        if self.indexer is not None:
            ids = self.indexer(x, q_resid, index_cache, inv_freq, batch)
        w_uk_t, w_uv = self.kv_b_proj()
        output = self.attn(q, latent_cache, w_uk_t, w_uv, ids, batch)
        return self.o_proj(output), ids


class MLP(nn.Module):
    """down(silu(gate x) * up x)."""

    def __init__(self, hidden: int, width: int):
        super().__init__()
        self.gate_proj, self.up_proj = Linear(hidden, width), Linear(hidden, width)
        self.down_proj = Linear(width, hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(ops.swiglu(self.gate_proj(x), self.up_proj(x)))


class Gate(nn.Module):
    def __init__(self, config: ModelConfig):
        super().__init__()
        self.weight = parameter(config.n_routed_experts, config.hidden_size)
        self.e_score_correction_bias = parameter(config.n_routed_experts)

    def forward(self, x: Tensor) -> Tensor:
        return ops.moe_gate(x, self.weight)


class TopK(nn.Module):
    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config

    def forward(self, logits: Tensor, bias: Tensor, token_mask: Tensor) -> tuple[Tensor, Tensor]:
        c = self.config
        weights, ids = ops.moe_topk(
            logits, bias, token_mask, c.num_experts_per_tok, c.n_group, c.topk_group, c.norm_topk_prob,
            c.routed_scaling_factor,
        )  # fmt: skip
        return weights, ids


class Dispatch(nn.Module):
    def __init__(self, num_experts: int):
        super().__init__()
        self.num_experts = num_experts

    def forward(self, x: Tensor, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        rows, counts, order = ops.moe_dispatch(x, ids, self.num_experts)
        return rows, counts, order


class GroupedLinear(nn.Module):
    def __init__(self, num_experts: int, in_features: int, out_features: int):
        super().__init__()
        self.weight = parameter(num_experts, out_features, in_features)

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        return ops.grouped_matmul(rows, self.weight, counts)


class Combine(nn.Module):
    def forward(self, rows: Tensor, order: Tensor, weights: Tensor) -> Tensor:
        return ops.moe_combine(rows, order, weights)


class Experts(nn.Module):
    """Routed experts: gate_up_proj.weight [E, 2I, D] holds gate rows then up rows, down_proj.weight [E, D, I]."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        experts, hidden, width = config.n_routed_experts, config.hidden_size, config.moe_intermediate_size
        self.dispatch = Dispatch(experts)
        self.gate_up_proj = GroupedLinear(experts, hidden, 2 * width)
        self.down_proj = GroupedLinear(experts, width, hidden)
        self.combine = Combine()

    def forward(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        rows, counts, order = self.dispatch(x, ids)
        rows = ops.swiglu(self.gate_up_proj(rows, counts))
        return self.combine(self.down_proj(rows, counts), order, weights)


class MoE(nn.Module):
    def __init__(self, config: ModelConfig):
        super().__init__()
        self.gate, self.topk, self.experts = Gate(config), TopK(config), Experts(config)
        self.shared_experts = MLP(config.hidden_size, config.moe_intermediate_size * config.n_shared_experts)

    def forward(self, x: Tensor, token_mask: Tensor) -> Tensor:
        weights, ids = self.topk(self.gate(x), self.gate.e_score_correction_bias, token_mask)
        return ops.add(self.experts(x, weights, ids), self.shared_experts(x))


class DecoderLayer(nn.Module):
    def __init__(self, config: ModelConfig, layer: int, options: ProgramOptions):
        super().__init__()
        self.is_moe = config.is_moe(layer)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, layer, options)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MoE(config) if self.is_moe else MLP(config.hidden_size, config.intermediate_size)

    def forward(self, x: Tensor, residual: Tensor | None, ids: Tensor | None, inv_freq: Tensor, batch: Batch):
        """(x, residual) with hidden state = x + residual -> (MLP output, residual, top-k ids)."""
        if residual is None:
            x, residual = self.input_layernorm(x), x
        else:
            x, residual = self.input_layernorm(x, residual)
        x, ids = self.self_attn(x, ids, inv_freq, batch)
        x, residual = self.post_attention_layernorm(x, residual)
        return self.mlp(x, batch.token_mask) if self.is_moe else self.mlp(x), residual, ids
