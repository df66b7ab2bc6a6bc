"""linear and lm_head: y = x W^T (+ b). Legend: T tokens, I in-features, O out-features.

A quantised linear is the same op with another set of weights: int8 codes, and the tensors of QUANTISED beside them.
"""

from collections.abc import Mapping

from torch import Tensor
from torch.distributed.tensor.placement_types import Placement, Shard

from emulator.ops.quantised import quantised_linear
from emulator.ops.registry import LOCAL, PARTIAL, Illegal, Mixed, R, define
from emulator.ops.row_tiles import row_linear

ALLOWED = "full-token or local-token with a whole weight; full-token with a weight split by features"


# a quantised linear's tensors beside its weight, as the op takes them; a dynamic set ends after the second
QUANTISED = ("weight_scale", "weight_offset", "input_scale", "input_offset", "quant_bias", "deq_scale")
QUANTISED_SCHEMA = ", ".join(f"Tensor? {name}=None" for name in QUANTISED)


def any_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, *quantised: Tensor | None) -> Tensor:
    """x [T, I], weight [O, I], bias [O]; quantised: the tensors of QUANTISED, in order (ops/quantised.py)."""
    if not quantised or quantised[0] is None:
        return row_linear(x, weight, bias)
    scale, offset, *static = quantised
    assert scale is not None
    assert offset is not None
    y = quantised_linear(x, weight, scale, offset, *static)
    return y if bias is None else y + bias


def linear_in_shards(
    num_shards: int, x: Tensor, weight: Tensor, bias: Tensor | None = None, *quantised: Tensor | None
) -> Tensor:
    """A dynamically quantised linear whose in-features are cut into shards, each with scales of its own per row, as
    row-parallel ranks run it; the shards' products are summed."""
    shards = list(zip(x.chunk(num_shards, 1), weight.chunk(num_shards, 1)))
    y = any_linear(*shards[0], bias, *quantised)
    for part in shards[1:]:
        y = y + any_linear(*part, None, *quantised)
    return y


def _linear_fake(x: Tensor, weight: Tensor, bias: Tensor | None = None, *quantised: Tensor | None) -> Tensor:
    assert x.shape[-1] == weight.shape[-1], f"linear: input has {x.shape[-1]} features, weight takes {weight.shape[-1]}"
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


def linear_rule(x: Placement, weight: Placement, bias: Placement | None = None, **quantised: Placement) -> Placement:
    """x [T, I], weight [O, I], bias [O]. A partial output takes its bias once, so there the bias is partial too.

    quantised: scales and offsets per out-feature are split with them, and whole beside a weight split by in-features;
    quant_bias is placed like a bias; what belongs to the input is whole.
    """
    if weight == R and x in (R, LOCAL):
        output: Placement = x
    elif x == R and weight == Shard(0):
        output = Shard(1)
    elif x == Shard(1) and weight == Shard(1):
        output = PARTIAL
    elif x == LOCAL and weight == Shard(0):
        raise Illegal(
            "on one axis, rows of different tokens meet shards of features: their products can be neither summed nor "
            "joined over the ranks",
            ALLOWED,
            fallback=Mixed(Shard(1)),
        )
    elif x == Mixed(Shard(1)) and weight == Shard(1):
        output = Mixed(PARTIAL)  # reported where it began
    else:
        raise Illegal("no sound product of these layouts", ALLOWED)
    expected = {Shard(1): Shard(0), PARTIAL: PARTIAL}.get(output, R)
    if bias is not None and bias != expected and not isinstance(output, Mixed):
        raise Illegal(
            f"the bias is added {'tp times' if output == PARTIAL else 'to other features'}", f"bias {expected}"
        )
    if not isinstance(output, Mixed):
        _check_quantised(quantised, R if expected == PARTIAL else expected, expected)
    return output


def _check_quantised(found: Mapping[str, Placement], per_output: Placement, bias: Placement) -> None:
    for name, placement in found.items():
        want = R if name.startswith("input_") else bias if name == "quant_bias" else per_output
        if placement != want:
            raise Illegal(f"{name} does not belong to the products that this rank computes", f"{name} {want}")


define(
    f"linear(Tensor x, Tensor weight, Tensor? bias=None, {QUANTISED_SCHEMA}) -> Tensor",
    kernel=any_linear,
    fake=_linear_fake,
    rule=linear_rule,
)
define("lm_head(Tensor x, Tensor weight) -> Tensor", kernel=any_linear, fake=_linear_fake, rule=linear_rule)
