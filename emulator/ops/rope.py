"""rope: rotary embedding of part of the last dim. Legend: T tokens, d last dim, r rotated dims."""

import torch
from torch import Tensor
from torch.distributed.tensor.placement_types import Placement, Shard

from emulator.ops.registry import LOCAL, Illegal, R, compute_dtype, define
from emulator.ops.row_tiles import each_element


def rotate(x: Tensor, positions: Tensor, inv_freq: Tensor, start: int, interleaved: bool, scaling: float) -> Tensor:
    """Rotates x[..., start : start + r], r = 2 * len(inv_freq); x is [T, d] or [T, heads, d].

    Pairs are (2i, 2i+1) when interleaved, else (i, i + r/2). The rotated part comes out as [firsts | seconds] in both
    styles, as in HF's models: a fixed permutation that no dot product of two rotated vectors sees. Angles are taken in
    at least float32; cos and sin are then rounded to x's dtype.
    """
    half = inv_freq.shape[0]
    wide = compute_dtype(x)
    angles = positions.to(wide).unsqueeze(-1) * inv_freq.to(wide)
    cos, sin = ((each_element(f, angles) * scaling).to(x.dtype) for f in (torch.cos, torch.sin))
    if x.dim() == 3:
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    part = x[..., start : start + 2 * half]
    first, second = (part[..., 0::2], part[..., 1::2]) if interleaved else (part[..., :half], part[..., half:])
    pieces = [
        x[..., :start],
        first * cos - second * sin,
        second * cos + first * sin,
        x[..., start + 2 * half :],
    ]
    return torch.cat(pieces, dim=-1)


def _rope_fake(x: Tensor, positions: Tensor, inv_freq: Tensor, start: int, interleaved: bool, scaling: float) -> Tensor:
    assert x.shape[0] == positions.shape[0], f"{x.shape[0]} rows, {positions.shape[0]} positions"
    return torch.empty_like(x)


def _rope_rule(x: Placement, positions: Placement, inv_freq: Placement) -> Placement:
    if inv_freq == R and ((x in (R, Shard(1)) and positions == R) or (x == LOCAL and positions == LOCAL)):
        return x
    raise Illegal("positions must name the same tokens as the rows they rotate", "positions laid out as the rows")


define(
    "rope(Tensor x, Tensor positions, Tensor inv_freq, int start, bool interleaved, float scaling) -> Tensor",
    kernel=rotate,
    fake=_rope_fake,
    rule=_rope_rule,
)
