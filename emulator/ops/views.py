"""Layout rules of the plain torch functions that the Program uses between ops: views and concatenation."""

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor.placement_types import Placement, Shard

from emulator.ops.registry import LOCAL, Illegal, Mixed, R, same_placement


def _unflatten(x: Placement) -> Placement:
    """[T, N*d] -> [T, N, d]: a feature shard becomes a head shard."""
    return _tokens_or_heads(x)


def _flatten(x: Placement) -> Placement:
    """[T, N, d] -> [T, N*d]: a head shard becomes a feature shard."""
    return _tokens_or_heads(x)


def _tokens_or_heads(x: Placement) -> Placement:
    if x in (R, LOCAL, Shard(1)) or isinstance(x, Mixed):
        return x
    raise Illegal("heads can only be told apart on whole tokens or whole heads", "full-token, local-token, head shard")


def _cat_features(*parts: Placement) -> Placement:
    output = same_placement(**{str(i): p for i, p in enumerate(parts)})
    if output not in (R, LOCAL):
        raise Illegal("joining feature shards interleaves the ranks' features", "full-token or local-token")
    return output


def _split_features(x: Placement) -> tuple[Placement, ...]:
    if x not in (R, LOCAL):
        raise Illegal("a feature split needs every feature", "full-token or local-token")
    return (x, x)


VIEW_RULES: dict[Any, Callable] = {
    torch.unflatten: _unflatten,
    torch.flatten: _flatten,
    torch.cat: _cat_features,
    torch.split: _split_features,
}
