"""A request, empty paged caches, and a batch as graph inputs."""

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


def empty_caches(config: ModelConfig, num_slots: int, dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor]]:
    """Per layer: latent cache [slots, kv_lora_rank + rope] and index-key cache [slots, index_head_dim], all NaN.
    Without an indexer, index keys are 0 wide."""
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
