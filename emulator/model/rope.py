"""Rotary frequencies and softmax scale, default and yarn.

Formulas: YaRN (arXiv 2309.00071), section 3, as HF's rope initialisation applies it.
"""

import math

import torch

from emulator.model.config import ModelConfig


def _mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def inverse_frequencies(config: ModelConfig) -> tuple[torch.Tensor, float]:
    """(inv_freq [rope_dim/2] float32, factor applied to cos and sin)."""
    rope, dim = config.rope_parameters, config.qk_rope_head_dim
    pos_freqs = rope.rope_theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    extrapolated = 1.0 / pos_freqs
    if rope.rope_type == "default":
        return extrapolated, 1.0

    original = rope.original_max_position_embeddings
    if original is None:
        raise ValueError("rope_parameters: yarn needs original_max_position_embeddings")

    def correction_dim(num_rotations: float) -> float:
        return dim * math.log(original / (num_rotations * 2 * math.pi)) / (2 * math.log(rope.rope_theta))

    low, high = correction_dim(rope.beta_fast), correction_dim(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / max(high - low, 0.001)).clamp(0, 1)
    inv_freq = 1.0 / (rope.factor * pos_freqs) * ramp + extrapolated * (1 - ramp)

    if rope.attention_factor is not None:
        scaling = rope.attention_factor
    elif rope.mscale and rope.mscale_all_dim:
        scaling = _mscale(rope.factor, rope.mscale) / _mscale(rope.factor, rope.mscale_all_dim)
    else:
        scaling = _mscale(rope.factor, 1.0)
    return inv_freq, scaling


def softmax_scale(config: ModelConfig) -> float:
    """(nope + rope)^-0.5, times mscale^2 for yarn with mscale_all_dim."""
    scale = config.qk_head_dim**-0.5
    rope = config.rope_parameters
    if rope.rope_type != "default" and rope.mscale_all_dim:
        scale *= _mscale(rope.factor, rope.mscale_all_dim) ** 2
    return scale
