"""MLA in absorbed form, dense or with the lightning indexer, as single-device modules; names follow the HF checkpoint.

Legend: T tokens, D hidden, N heads, K index top-k, d index head dim.
"""

import torch
from torch import Tensor, nn

from emulator.model.config import ModelConfig
from emulator.model.layers import Batch, Linear, ProgramOptions, RMSNorm, ops, parameter
from emulator.model.rope import inverse_frequencies, softmax_scale
from emulator.model.structure import has_dsa_structure

INDEXER_NORM_EPS = 1e-6  # HF builds the indexer's LayerNorm with it, whatever the config says


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


class IndexerKey(nn.Module):
    """indexer.wk: the key side, [T, D] -> index keys [T, d]."""

    def __init__(self, config: ModelConfig, rope_scaling: float):
        super().__init__()
        self.weight = parameter(config.index_head_dim, config.hidden_size)
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
        self.weights_proj.quantisable = False  # its product is taken inside the op, in the run's dtype
        self.topk, self.block_size = config.index_topk, block_size

    def forward(self, x: Tensor, q_resid: Tensor, cache: Tensor, inv_freq: Tensor, batch: Batch) -> Tensor:
        return ops.dsa_indexer_topk(
            q_resid, x, self.wq_b.weight, self.weights_proj.weight, cache, batch.positions, inv_freq,
            batch.query_lens, batch.kv_lens, batch.block_table,
            self.block_size, self.topk, self.wk.interleaved, self.wk.rope_scaling, *self.wq_b.quantised(),
        )  # fmt: skip


class SparseAttention(nn.Module):
    def __init__(self, scale: float, block_size: int):
        super().__init__()
        self.scale, self.block_size = scale, block_size

    def forward(self, q: Tensor, cache: Tensor, w_uk_t: Tensor, w_uv: Tensor, ids: Tensor, batch: Batch) -> Tensor:
        return ops.mla_sparse_attention(
            q, cache, w_uk_t, w_uv, ids, batch.query_lens, batch.kv_lens, batch.block_table, self.block_size, self.scale
        )


class DenseAttention(nn.Module):
    """Every query sees all keys before it."""

    def __init__(self, scale: float, block_size: int, int8: bool = False):
        super().__init__()
        self.scale, self.block_size, self.int8 = scale, block_size, int8

    def forward(self, q: Tensor, cache: Tensor, w_uk_t: Tensor, w_uv: Tensor, batch: Batch) -> Tensor:
        quantised = (True,) if self.int8 else ()
        return ops.multihead_latent_attention(
            q, cache, w_uk_t, w_uv, batch.query_lens, batch.kv_lens, batch.block_table, self.block_size, self.scale,
            *quantised,
        )  # fmt: skip


class Attention(nn.Module):
    """MLA in absorbed form over the latent cache, with top-k ids from its own or an earlier layer's indexer; over all
    keys in a model without one."""

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
        if has_dsa_structure(config):
            self.attn: nn.Module = SparseAttention(softmax_scale(config), options.block_size)
        else:
            self.attn = DenseAttention(softmax_scale(config), options.block_size, options.attention == "int8")
        width = config.num_attention_heads * config.v_head_dim
        self.o_proj = OutputProjection(width, config.hidden_size, config.attention_bias, unit=config.v_head_dim)

    def forward(self, x: Tensor, ids: Tensor | None, inv_freq: Tensor, batch: Batch) -> tuple[Tensor, Tensor | None]:
        """x [T, D], ids [T, K] of the last full-indexer layer (or None) -> (output [T, D], ids used or None)."""
        config, layer, interleaved = self.config, self.layer, self.config.rope_interleaved
        q_resid = self.q_a_layernorm(self.q_a_proj(x))
        q = self.q_b_proj(q_resid)
        q = ops.rope(q, batch.positions, inv_freq, config.qk_nope_head_dim, interleaved, self.rope_scaling)
        latent, k_pe = torch.split(self.kv_a_proj_with_mqa(x), [config.kv_lora_rank, config.qk_rope_head_dim], -1)
        parts = [self.kv_a_layernorm(latent)]
        parts.append(ops.rope(k_pe, batch.positions, inv_freq, 0, interleaved, self.rope_scaling))
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
        if ids is None:  # no layer of the model has an indexer
            output = self.attn(q, latent_cache, w_uk_t, w_uv, batch)
        else:
            output = self.attn(q, latent_cache, w_uk_t, w_uv, ids, batch)
        return self.o_proj(output), ids
