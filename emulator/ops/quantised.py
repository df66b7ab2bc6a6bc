"""What a quantised linear computes: int8 codes times int8 or int4 codes, exact integer sums, and scales.

Formulas: ModelSlim's W8A8, W8A8_DYNAMIC and W4A8_DYNAMIC checkpoints as vllm-ascend runs them (quantization/methods).
Legend: T tokens, I in-features, O out-features.
"""

from functools import cache

import torch
from torch import Tensor

from emulator.ops.registry import compute_dtype

CODE_MAX = 127  # of a symmetric int8 code


def quantised_linear(
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    weight_offset: Tensor,
    input_scale: Tensor | None = None,
    input_offset: Tensor | None = None,
    quant_bias: Tensor | None = None,
    deq_scale: Tensor | None = None,
) -> Tensor:
    """x [T, I] float, weight int8 [O, I], weight_scale and weight_offset [O, 1] -> [T, O] in x's dtype.

    Dynamic: codes = round(x / s), s = max|x| / 127 of each row; y = (codes W^T - offset sum(codes)) s weight_scale.
    Static, with input_scale, input_offset [1], quant_bias int32 [O], deq_scale float32 [O]: codes = round(x /
    input_scale) + input_offset, clipped; y = (codes W^T + quant_bias) deq_scale. There deq_scale = input_scale *
    weight_scale, and quant_bias = -input_offset sum(W) takes out what the offset adds.
    """
    if input_scale is None:
        return _rescaled(x, *row_codes(x), weight, weight_scale, weight_offset)
    assert input_offset is not None
    assert quant_bias is not None
    assert deq_scale is not None
    wide = compute_dtype(x)
    sums = int_matmul(static_codes(x, input_scale, input_offset), weight) + quant_bias
    return _poisoned(sums.to(wide) * deq_scale.to(wide), x)


def int4_linear(x: Tensor, packed: Tensor, weight_scale: Tensor, weight_offset: Tensor, scale_bias: Tensor) -> Tensor:
    """x [T, I] float, packed int8 [O/2, I] (two 4-bit codes each), weight_scale and weight_offset float32 [O, 1],
    scale_bias float32 [O, parts] -> [T, O]; codes of x per row, as in the dynamic form.

    Ascend's kernel multiplies the 4-bit halves of x's codes, the low one less 8, so its sums lack 8 sum(W); scale_bias
    = 8 weight_scale sum(W), in parts over the in-features, makes up for it.
    """
    codes, scale = row_codes(x)
    weight, wide = unpack_int4(packed), scale.dtype
    sums = int_matmul(codes, weight) - 8 * weight.sum(1, dtype=torch.int32)
    shifted = codes.sum(1, keepdim=True, dtype=torch.int32).to(wide) * weight_offset.to(wide).t()
    product = (sums.to(wide) - shifted) * weight_scale.to(wide).t() + scale_bias.to(wide).sum(1)
    return _poisoned(product * scale, x)


def row_codes(x: Tensor) -> tuple[Tensor, Tensor]:
    """(int8 codes [T, I], scale of each row [T, 1] in at least float32): max|x| of a row has the code 127."""
    wide = x.to(compute_dtype(x))
    largest = wide.abs().amax(1, keepdim=True)
    scale = torch.where(largest > 0, largest / CODE_MAX, 1.0)
    return (wide / scale).nan_to_num(0.0).round().to(torch.int8), scale


def static_codes(x: Tensor, input_scale: Tensor, input_offset: Tensor) -> Tensor:
    """int8 codes [T, I] on one scale for the whole tensor; values beyond its range are clipped."""
    wide = compute_dtype(x)
    codes = (x.to(wide) / input_scale.to(wide)).nan_to_num(0.0).round() + input_offset.to(wide)
    return codes.clamp(-CODE_MAX - 1, CODE_MAX).to(torch.int8)


def int_matmul(codes: Tensor, weight: Tensor) -> Tensor:
    """codes int8 [T, I] times weight int8 [O, I], transposed: exact int32 [T, O]."""
    if _int_mm_is_exact():
        return torch._int_mm(codes, weight.t())
    return (codes.double() @ weight.double().t()).to(torch.int32)  # below 2^53, so exact too


@cache
def _int_mm_is_exact() -> bool:
    """On CPUs without int8 dot products a library may saturate the 16-bit sums of pairs."""
    extreme = torch.full((16, 64), CODE_MAX, dtype=torch.int8)
    low = torch.full((16, 64), -CODE_MAX - 1, dtype=torch.int8)
    found = torch._int_mm(low, extreme.t()), torch._int_mm(extreme, extreme.t())
    return bool((found[0] == -128 * 127 * 64).all()) and bool((found[1] == 127 * 127 * 64).all())


def pack_int4(codes: Tensor) -> Tensor:
    """int8 [..., O, I] in -8..7 -> int8 [..., O/2, I]: output 2o in the low half of a byte, 2o + 1 in the high one."""
    low, high = codes.unflatten(-2, (-1, 2)).unbind(-2)
    return (low & 0xF) | (high << 4)


def unpack_int4(packed: Tensor) -> Tensor:
    """The inverse of pack_int4."""
    low, high = (packed << 4) >> 4, packed >> 4  # shifts of int8 keep the sign
    return torch.stack((low, high), -2).flatten(-3, -2)


def dequantised(weight: Tensor, weight_scale: Tensor, weight_offset: Tensor) -> Tensor:
    """The float weight that codes stand for, (code - offset) scale, in the scale's dtype."""
    return (weight.to(weight_scale.dtype) - weight_offset) * weight_scale


def _rescaled(
    x: Tensor, codes: Tensor, scale: Tensor, weight: Tensor, weight_scale: Tensor, weight_offset: Tensor
) -> Tensor:
    wide = scale.dtype
    shifted = codes.sum(1, keepdim=True, dtype=torch.int32).to(wide) * weight_offset.to(wide).t()
    return _poisoned((int_matmul(codes, weight).to(wide) - shifted) * scale * weight_scale.to(wide).t(), x)


def _poisoned(y: Tensor, x: Tensor) -> Tensor:
    """y in x's dtype. An integer code cannot be NaN, but a padding row filled with NaN must stay one to be seen."""
    return y.masked_fill(x.isnan().any(1, keepdim=True), float("nan")).to(x.dtype)
