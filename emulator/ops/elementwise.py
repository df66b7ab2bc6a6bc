"""add and swiglu. Legend: T tokens (or expert rows), F features."""

import torch
from torch import Tensor
from torch.distributed.tensor.placement_types import Placement, Shard

from emulator.ops.registry import LOCAL, Illegal, Mixed, R, define, same_placement
from emulator.ops.row_tiles import each_element


def _add_rule(x: Placement, y: Placement) -> Placement:
    return same_placement(x=x, y=y)


def _check_shapes(x: Tensor, y: Tensor) -> None:
    assert x.shape == y.shape, f"operands of shapes {list(x.shape)} and {list(y.shape)}"  # never broadcast


def _add(x: Tensor, y: Tensor) -> Tensor:
    _check_shapes(x, y)
    return x + y


def _add_fake(x: Tensor, y: Tensor) -> Tensor:
    _check_shapes(x, y)
    return torch.empty_like(x)


def _swiglu(gate: Tensor, up: Tensor | None = None) -> Tensor:
    """silu(gate) * up; without `up`, gate is packed as [gate | up] along the last dim."""
    if up is None:
        gate, up = gate.chunk(2, dim=-1)
    return each_element(torch.nn.functional.silu, gate).mul_(up)


def _swiglu_fake(gate: Tensor, up: Tensor | None = None) -> Tensor:
    if up is None:
        return gate.new_empty((*gate.shape[:-1], gate.shape[-1] // 2))
    _check_shapes(gate, up)
    return torch.empty_like(gate)


def _swiglu_rule(gate: Placement, up: Placement | None = None) -> Placement:
    output = same_placement(gate=gate, up=up)
    shards = up is not None and (output == Shard(1) or isinstance(output, Mixed))
    if output not in (R, LOCAL) and not shards:
        raise Illegal(
            "silu is not linear and needs complete gate and up values", "full-token, local-token, feature shard"
        )
    return output


define("add(Tensor x, Tensor y) -> Tensor", kernel=_add, fake=_add_fake, rule=_add_rule, residual_work=True)
define("swiglu(Tensor gate, Tensor? up=None) -> Tensor", kernel=_swiglu, fake=_swiglu_fake, rule=_swiglu_rule)
