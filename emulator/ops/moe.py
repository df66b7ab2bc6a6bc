"""moe_gate, moe_topk, moe_dispatch, grouped_matmul, moe_combine.

Legend: T tokens, D features, E experts, k experts per token, M dispatched rows, S sources (ranks that sent rows),
X experts held here.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.tensor.placement_types import Placement, Shard

from emulator.ops.quantised import int4_linear, quantised_linear
from emulator.ops.registry import LOCAL, PARTIAL, Illegal, R, compute_dtype, define, same_placement
from emulator.ops.row_tiles import each_element, row_linear

# tensors of quantised experts beside their weight, as the op takes them; 8-bit ones have no scale_bias
GROUPED_QUANTISED = ("weight_scale", "weight_offset", "scale_bias")


def _moe_gate(x: Tensor, weight: Tensor) -> Tensor:
    """Router logits [T, E] = x W^T in at least float32."""
    wide = compute_dtype(x, weight)
    return row_linear(x.to(wide), weight.to(wide))


def _moe_gate_fake(x: Tensor, weight: Tensor) -> Tensor:
    return x.new_empty((x.shape[0], weight.shape[0]), dtype=compute_dtype(x, weight))


def _whole_rows(**placements: Placement) -> Placement:
    weight = placements.pop("weight", R)
    output = same_placement(**placements)
    if weight != R or output not in (R, LOCAL):
        raise Illegal("routing needs whole rows and the whole router", "full-token or local-token, whole weight")
    return output


def _moe_topk(
    logits: Tensor,
    bias: Tensor,
    token_mask: Tensor,
    k: int,
    n_group: int,
    topk_group: int,
    normalise: bool,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Grouped sigmoid top-k (DeepSeek-V3 routing): (weights [T, k], expert ids [T, k]).

    A group's score is the sum of its two best biased scores; the best topk_group groups stay in; the k best biased
    scores choose, the unbiased ones weigh. Rows with token_mask False are padding: ids -1, weights 0.
    """
    scores = each_element(torch.sigmoid, logits)
    choice = scores + bias.to(scores.dtype)
    grouped = choice.view(choice.shape[0], n_group, choice.shape[1] // n_group)
    group_scores = grouped.topk(2, dim=-1).values.sum(-1)
    kept = torch.zeros_like(group_scores, dtype=torch.bool)
    kept.scatter_(1, group_scores.topk(topk_group, dim=-1, sorted=False).indices, True)
    choice = grouped.masked_fill(~kept.unsqueeze(-1), float("-inf")).flatten(1)
    ids = choice.topk(k, dim=-1, sorted=False).indices
    weights = scores.gather(1, ids)
    if normalise:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    real = token_mask.unsqueeze(-1)
    return torch.where(real, weights * scale, 0.0), torch.where(real, ids, -1)


def _moe_topk_fake(logits, bias, token_mask, k, n_group, topk_group, normalise, scale):
    return logits.new_empty((logits.shape[0], k)), logits.new_empty((logits.shape[0], k), dtype=torch.int64)


def _moe_topk_rule(logits: Placement, bias: Placement, token_mask: Placement) -> tuple[Placement, Placement]:
    output = _whole_rows(logits=logits, token_mask=token_mask, weight=bias)
    return output, output


def _combine_rule(rows: Placement, order: Placement, weights: Placement) -> Placement:
    if rows == order == LOCAL and weights == R:  # each rank sums the rows of its own experts
        return PARTIAL
    return _whole_rows(rows=rows, order=order, weights=weights)


def _moe_dispatch(x: Tensor, ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Copies of x's rows sorted by expert: (rows [M, D], rows per expert [1, E], order [M]).

    order holds the flat index t * k + j of each row in ids [T, k]; ids -1 are not dispatched.
    """
    assert x.shape[0] == ids.shape[0], f"{x.shape[0]} rows of hidden states, {ids.shape[0]} of expert ids"
    flat = ids.flatten()
    order = torch.argsort(flat, stable=True)
    order = order[(flat < 0).sum() :]
    counts = torch.bincount(flat[order], minlength=num_experts)
    return x[order // ids.shape[1]], counts.unsqueeze(0), order


def _moe_dispatch_fake(x: Tensor, ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    assert x.shape[0] == ids.shape[0], f"{x.shape[0]} rows of hidden states, {ids.shape[0]} of expert ids"
    num_rows = ids.shape[0] * ids.shape[1]
    return (
        x.new_empty((num_rows, x.shape[1])),
        ids.new_empty((1, num_experts)),
        ids.new_empty((num_rows,)),
    )


def _moe_dispatch_rule(x: Placement, ids: Placement) -> tuple[Placement, Placement, Placement]:
    output = _whole_rows(x=x, ids=ids)
    return output, output, output


def _expert_linear(rows: Tensor, weight: Tensor, *quantised: Tensor | None) -> Tensor:
    """One expert's rows through its weight: float [O, I], int8 codes, or two int4 codes in a byte (with scale_bias)."""
    scale, offset, bias = (*quantised, None, None, None)[:3]
    if scale is None or offset is None:
        return row_linear(rows, weight)
    if bias is None:
        return quantised_linear(rows, weight, scale, offset)
    return int4_linear(rows, weight, scale, offset, bias)


def _grouped_matmul(rows: Tensor, weight: Tensor, counts: Tensor, *quantised: Tensor | None) -> Tensor:
    """rows [M, I] in segments of counts [S, X] (source-major, then expert); weight [X, O, I] -> [M, O]. quantised: the
    tensors of GROUPED_QUANTISED, in order, each [X, ...]; a weight of int4 codes is [X, O/2, I]."""
    output = rows.new_empty(_grouped_shape(rows, weight, quantised))

    def product(expert: int, part: Tensor) -> Tensor:
        return _expert_linear(part, weight[expert], *(None if q is None else q[expert] for q in quantised))

    num_sources, num_experts = counts.shape
    if num_sources == 1:  # segments are contiguous: no index needed
        start = 0
        for expert, count in enumerate(counts[0].tolist()):
            if count:
                output[start : start + count] = product(expert, rows[start : start + count])
            start += count
        return output
    expert_of_row = torch.arange(num_experts).repeat(num_sources).repeat_interleave(counts.flatten())
    for expert in expert_of_row.unique().tolist():
        index = (expert_of_row == expert).nonzero().squeeze(1)
        output[index] = product(expert, rows[index])
    return output


def _grouped_shape(rows: Tensor, weight: Tensor, quantised: Sequence[Tensor | None]) -> tuple[int, int]:
    scale = quantised[0] if quantised else None
    return rows.shape[0], weight.shape[1] if scale is None else scale.shape[1]


def _grouped_matmul_fake(rows: Tensor, weight: Tensor, counts: Tensor, *quantised: Tensor | None) -> Tensor:
    assert rows.shape[1] == weight.shape[2], f"rows of {rows.shape[1]} features, weight takes {weight.shape[2]}"
    return rows.new_empty(_grouped_shape(rows, weight, quantised))


def _grouped_matmul_rule(rows: Placement, weight: Placement, counts: Placement, **quantised: Placement) -> Placement:
    if any(p != weight for p in quantised.values()):
        raise Illegal("scales stand with another rank's experts", f"scales {weight}, as the weight")
    if rows == counts and rows in (R, LOCAL) and (weight == R or (weight == Shard(0) and rows == LOCAL)):
        return rows
    raise Illegal("rows stand with another rank's experts", "expert rows x the same ranks' experts, or whole experts")


def _moe_combine(rows: Tensor, order: Tensor, weights: Tensor) -> Tensor:
    """Sum over k of weight * expert row, back in token order: rows [M, D], order [M], weights [T, k] -> [T, D]."""
    if not rows.shape[0]:
        return rows.new_zeros((weights.shape[0], rows.shape[1]))
    flat, row = order.sort()  # token by token, its experts in the order of its k choices
    counts = torch.bincount(flat // weights.shape[1], minlength=weights.shape[0])
    # One pass that gathers, scales and sums: rows * weight would be another copy of all dispatched rows.
    return torch.nn.functional.embedding_bag(
        row, rows, counts.cumsum(0) - counts, mode="sum", per_sample_weights=weights.flatten()[flat].to(rows.dtype)
    )


define("moe_gate(Tensor x, Tensor weight) -> Tensor", kernel=_moe_gate, fake=_moe_gate_fake, rule=_whole_rows)
define(
    "moe_topk(Tensor logits, Tensor bias, Tensor token_mask, int k, int n_group, int topk_group, bool normalise, "
    "float scale) -> (Tensor, Tensor)",
    kernel=_moe_topk,
    fake=_moe_topk_fake,
    rule=_moe_topk_rule,
)
define(
    "moe_dispatch(Tensor x, Tensor ids, int num_experts) -> (Tensor, Tensor, Tensor)",
    kernel=_moe_dispatch,
    fake=_moe_dispatch_fake,
    rule=_moe_dispatch_rule,
    output_kind="rows",
)
define(
    "grouped_matmul(Tensor rows, Tensor weight, Tensor counts, "
    + ", ".join(f"Tensor? {name}=None" for name in GROUPED_QUANTISED)
    + ") -> Tensor",
    kernel=_grouped_matmul,
    fake=_grouped_matmul_fake,
    rule=_grouped_matmul_rule,
)
define(
    "moe_combine(Tensor rows, Tensor order, Tensor weights) -> Tensor",
    kernel=_moe_combine,
    fake=lambda rows, order, weights: rows.new_empty((weights.shape[0], rows.shape[1])),
    rule=_combine_rule,
    output_kind="token",
)
