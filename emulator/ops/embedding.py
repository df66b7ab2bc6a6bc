"""embedding: rows of a table, or of this rank's block of its rows. Legend: T tokens, V vocabulary, D features."""

import torch
from torch import Tensor
from torch.distributed.tensor.placement_types import Placement, Shard

from emulator.ops.registry import LOCAL, PARTIAL, Illegal, R, define


def _embedding(ids: Tensor, weight: Tensor, vocab_start: int = 0) -> Tensor:
    """ids [T] global token ids, weight [V_local, D] = table rows from vocab_start -> [T, D], zero outside the block."""
    local = ids - vocab_start
    inside = (local >= 0) & (local < weight.shape[0])
    rows = weight[torch.where(inside, local, 0)]
    return rows * inside.unsqueeze(-1).to(rows.dtype)


def _embedding_fake(ids: Tensor, weight: Tensor, vocab_start: int = 0) -> Tensor:
    return weight.new_empty((ids.shape[0], weight.shape[1]))


def _embedding_rule(ids: Placement, weight: Placement) -> Placement:
    if weight == R and ids in (R, LOCAL):
        return ids
    if weight == Shard(0) and ids == R:
        return PARTIAL
    raise Illegal("the ids and the table do not fit", "any ids x whole table, or full-token ids x rows of the table")


def _vocab_start(weight: Tensor, shard_index: int) -> dict[str, int]:
    return {"vocab_start": shard_index * weight.shape[0]}


define(
    "embedding(Tensor ids, Tensor weight, int vocab_start=0) -> Tensor",
    kernel=_embedding,
    fake=_embedding_fake,
    rule=_embedding_rule,
    rank_args=_vocab_start,
)
