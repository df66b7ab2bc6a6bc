"""add and swiglu. Legend: T tokens (or expert rows), F features."""

import torch
from torch import Tensor
from torch.distributed.tensor.placement_types import Placement, Shard

from emulator.ops.registry import LOCAL, PARTIAL, Illegal, Mixed, R, define, same_placement


def _add_rule(x: Placement, y: Placement) -> Placement:
    return same_placement(x=x, y=y)


def _swiglu(gate: Tensor, up: Tensor | None = None) -> Tensor:
    """silu(gate) * up; without `up`, gate is packed as [gate | up] along the last dim."""
    if up is None:
        gate, up = gate.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate).mul_(up)


def _swiglu_fake(gate: Tensor, up: Tensor | None = None) -> Tensor:
    return torch.empty_like(gate) if up is not None else gate.new_empty((*gate.shape[:-1], gate.shape[-1] // 2))


def _swiglu_rule(gate: Placement, up: Placement | None = None) -> Placement:
    output = same_placement(gate=gate, up=up)
    if output == PARTIAL or (up is None and output not in (R, LOCAL)):
        raise Illegal(
            "silu is not linear and needs complete gate and up values", "full-token, local-token, feature shard"
        )
    assert output in (R, LOCAL, Shard(1)) or isinstance(output, Mixed)
    return output


define("add(Tensor x, Tensor y) -> Tensor", kernel=torch.add, fake=lambda x, y: torch.empty_like(x), rule=_add_rule)
define("swiglu(Tensor gate, Tensor? up=None) -> Tensor", kernel=_swiglu, fake=_swiglu_fake, rule=_swiglu_rule)
