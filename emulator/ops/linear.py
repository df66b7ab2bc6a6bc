"""linear and lm_head: y = x W^T (+ b). Legend: T tokens, I in-features, O out-features."""

import torch
from torch import Tensor
from torch.distributed.tensor.placement_types import Placement, Shard

from emulator.ops.registry import LOCAL, PARTIAL, Illegal, Mixed, R, define

ALLOWED = "full-token or local-token with a whole weight; full-token with a weight split by features"


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return torch.nn.functional.linear(x, weight, bias)


def _linear_fake(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    assert x.shape[-1] == weight.shape[-1], f"linear: input has {x.shape[-1]} features, weight takes {weight.shape[-1]}"
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


def linear_rule(x: Placement, weight: Placement, bias: Placement | None = None) -> Placement:
    """x [T, I], weight [O, I], bias [O]. A partial output takes its bias once, so there the bias is partial too."""
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
    return output


define(
    "linear(Tensor x, Tensor weight, Tensor? bias=None) -> Tensor", kernel=_linear, fake=_linear_fake, rule=linear_rule
)
define("lm_head(Tensor x, Tensor weight) -> Tensor", kernel=_linear, fake=_linear_fake, rule=linear_rule)
