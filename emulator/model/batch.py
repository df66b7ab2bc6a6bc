"""The batch of one step: packed token ids, positions, lengths, block tables and slots, and empty paged caches."""

from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from emulator.model.config import ModelConfig
from emulator.model.layers import Batch


@dataclass(frozen=True)
class Request:
    """query: new tokens of this step; context: tokens already in the caches."""

    query: int
    context: int = 0


def build_batch(
    config: ModelConfig, requests: list[Request], *, seed: int, dtype: torch.dtype, block_size: int
) -> Batch:
    """Packs requests (TND). Blocks are dealt out in a seeded random order; caches hold NaN until written, and one
    block more than needed exists, so that a read through index -1 meets NaN."""
    generator = torch.Generator().manual_seed(seed)
    query_lens = torch.tensor([r.query for r in requests])
    kv_lens = torch.tensor([r.query + r.context for r in requests])
    positions = torch.cat([torch.arange(r.context, r.context + r.query) for r in requests])
    num_blocks = [-(-int(n) // block_size) for n in kv_lens]
    dealt = torch.randperm(sum(num_blocks), generator=generator)
    block_table = torch.full((len(requests), max(num_blocks)), -1)
    slots, used = [], 0
    for i, request in enumerate(requests):
        block_table[i, : num_blocks[i]] = dealt[used : used + num_blocks[i]]
        used += num_blocks[i]
        at = torch.arange(request.context, request.context + request.query)
        slots.append(block_table[i, at // block_size] * block_size + at % block_size)
    total = len(positions)
    latent, index = empty_caches(config, (sum(num_blocks) + 1) * block_size, dtype)
    return Batch(
        input_ids=torch.randint(config.vocab_size, (total,), generator=generator),
        positions=positions,
        slots=torch.cat(slots),
        token_mask=torch.ones(total, dtype=torch.bool),
        query_lens=query_lens,
        kv_lens=kv_lens,
        block_table=block_table,
        latent_caches=latent,
        index_caches=index,
    )


def empty_caches(config: ModelConfig, num_slots: int, dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor]]:
    """Per layer: latent cache [slots, kv_lora_rank + rope] and index-key cache [slots, index_head_dim], all NaN."""
    row, layers = config.kv_lora_rank + config.qk_rope_head_dim, range(config.num_hidden_layers)
    nan = float("nan")
    return (
        [torch.full((num_slots, row), nan, dtype=dtype) for _ in layers],
        [torch.full((num_slots, config.index_head_dim), nan, dtype=dtype) for _ in layers],
    )


def own_caches(batch: Batch) -> dict[str, Any]:
    """The batch as graph inputs, with caches that the caller may write."""
    own = replace(
        batch,
        latent_caches=[c.clone() for c in batch.latent_caches],
        index_caches=[c.clone() for c in batch.index_caches],
    )
    return batch_inputs(own)


def batch_inputs(batch: Batch) -> dict[str, Any]:
    """The batch as graph inputs, by name; its caches are written in place."""
    return {f.name: getattr(batch, f.name) for f in fields(batch)}
