"""rms_norm, add_rms_norm, add_rms_norm2. Legend: T tokens, D features.

y = x / sqrt(mean(x^2) + eps) in at least float32, cast back, then times the weight (the order HF's models use).
"""

import torch
from torch import Tensor
from torch.distributed.tensor.placement_types import Placement

from emulator.ops.registry import LOCAL, Illegal, R, compute_dtype, define, same_placement


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.to(compute_dtype(x))
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * normed.to(x.dtype)


def _add_rms_norm2(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(normalised [T, D], new residual [T, D] = residual + x)."""
    total = residual + x
    return _rms_norm(total, weight, eps), total


def _check_rows(x: Tensor, residual: Tensor) -> None:
    assert x.shape == residual.shape, f"residual has shape {list(residual.shape)}, hidden states {list(x.shape)}"


def _add_rms_norm2_fake(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    _check_rows(x, residual)
    return torch.empty_like(x), torch.empty_like(x)


def _add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    return _rms_norm(residual + x, weight, eps)


def _add_rms_norm_fake(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    _check_rows(x, residual)
    return torch.empty_like(x)


def _rms_norm_rule(x: Placement, weight: Placement, residual: Placement | None = None) -> Placement:
    output = same_placement(x=x, residual=residual)
    if weight != R or output not in (R, LOCAL):
        raise Illegal("a norm needs whole rows: every feature, and complete sums", "full-token or local-token")
    return output


def _add_rms_norm2_rule(x: Placement, residual: Placement, weight: Placement) -> tuple[Placement, Placement]:
    output = _rms_norm_rule(x, weight, residual)
    return output, output


define(
    "rms_norm(Tensor x, Tensor weight, float eps) -> Tensor",
    kernel=_rms_norm,
    fake=lambda x, weight, eps: torch.empty_like(x),
    rule=_rms_norm_rule,
    residual_work=True,
)
define(
    "add_rms_norm(Tensor x, Tensor residual, Tensor weight, float eps) -> Tensor",
    kernel=_add_rms_norm,
    fake=_add_rms_norm_fake,
    rule=_rms_norm_rule,
    residual_work=True,
)
define(
    "add_rms_norm2(Tensor x, Tensor residual, Tensor weight, float eps) -> (Tensor, Tensor)",
    kernel=_add_rms_norm2,
    fake=_add_rms_norm2_fake,
    rule=_add_rms_norm2_rule,
    residual_work=True,
)
