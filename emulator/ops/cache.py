"""cache_write: rows of the packed batch into their slots of a paged cache. Legend: S slots, T tokens, W width."""

from torch import Tensor
from torch.distributed.tensor.placement_types import Placement

from emulator.ops.registry import Illegal, R, define


def _cache_write(cache: Tensor, rows: Tensor, slots: Tensor, start: int) -> Tensor:
    """cache [S, W] gets rows[:, start : start + W] [T, W] at slots [T]; slot -1 writes nothing. Returns the cache."""
    real = slots >= 0
    cache[slots[real]] = rows[real, start : start + cache.shape[1]].to(cache.dtype)
    return cache


def _cache_write_rule(cache: Placement, rows: Placement, slots: Placement) -> Placement:
    if cache == R and rows == R and slots == R:
        return R
    raise Illegal(
        "the cache is replicated: every rank writes every real slot, so it needs every row", "full-token rows"
    )


define(
    "cache_write(Tensor(a!) cache, Tensor rows, Tensor slots, int start) -> Tensor(a!)",
    kernel=_cache_write,
    fake=lambda cache, rows, slots, start: cache,
    rule=_cache_write_rule,
)
