"""The op vocabulary: one torch.library op per name, with its kernel, its fake and its layout rule.

A layout rule speaks of ONE mesh axis: it maps the placements of the tensor arguments on that axis to the placements
of the outputs, or raises Illegal. Placements are torch.distributed.tensor's.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor.placement_types import Partial, Placement, Replicate, Shard

LIBRARY = torch.library.Library("emulator", "DEF")

R, LOCAL, PARTIAL = Replicate(), Shard(0), Partial("sum")

Rule = Callable[..., Any]


class Mixed(Placement):
    """Not a sound placement: local-token rows whose features are sharded or partial on the SAME axis.

    It exists so that a plan which asks for it can be reported, and run without the static check to show that the
    values come out wrong.
    """

    def __init__(self, value: Placement):
        super().__init__()
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Mixed) and self.value == other.value

    def __hash__(self) -> int:
        return hash(("Mixed", self.value))

    def __repr__(self) -> str:
        return f"Mixed({self.value})"


class Owned(Placement):
    """The whole value is on one rank of the axis, and the others have nothing of it (layer-sharded weights)."""

    def __init__(self, index: int):
        super().__init__()
        self.index = index

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Owned) and self.index == other.index

    def __hash__(self) -> int:
        return hash(("Owned", self.index))

    def __repr__(self) -> str:
        return f"Owned({self.index})"


class Illegal(Exception):
    """A combination of placements that an op does not allow.

    reason: the rule it breaks; allowed: the combinations that are sound; fallback: output placements to go on with
    when the static check is off (None: there is no way on).
    """

    def __init__(self, reason: str, allowed: str, fallback: Any = None):
        super().__init__(reason)
        self.reason, self.allowed, self.fallback = reason, allowed, fallback


@dataclass(frozen=True)
class Op:
    """One op of the vocabulary.

    output_kind: kind of value it makes, where that is not the kind of its first tensor argument.
    rank_args: (weight argument, index of this rank's shard) -> keyword arguments that depend on the rank.
    residual_work: norms and adds: each row needs the same rows of the operands only, and little work.
    """

    name: str
    rule: Rule
    argument_names: tuple[str, ...]
    output_kind: str | None = None
    rank_args: Callable[..., dict[str, Any]] | None = None
    residual_work: bool = False


OPS: dict[str, Op] = {}


def define(
    schema: str,
    *,
    kernel: Callable,
    fake: Callable,
    rule: Rule,
    output_kind: str | None = None,
    rank_args: Callable[..., dict[str, Any]] | None = None,
    residual_work: bool = False,
) -> None:
    """Registers `emulator::<schema>` with a CPU kernel, a fake (shape) kernel and a layout rule."""
    name = schema.split("(")[0]
    LIBRARY.define(schema)
    LIBRARY.impl(name, kernel, "CPU")
    torch.library.register_fake(f"emulator::{name}", fake, lib=LIBRARY)
    arguments = tuple(a.name for a in getattr(torch.ops.emulator, name).default._schema.arguments)
    OPS[name] = Op(name, rule, arguments, output_kind, rank_args, residual_work)


def op_name(target: Any) -> str | None:
    """Vocabulary name of an fx node's target; None for views, getitem and other plain functions."""
    if isinstance(target, torch._ops.OpOverloadPacket) and target._qualified_op_name.startswith("emulator::"):
        return target._qualified_op_name.removeprefix("emulator::")
    return None


def same_placement(**placements: Placement | None) -> Placement:
    """Rule of elementwise ops: all tensor operands have one placement, and the output has it too.

    Raises Illegal when they differ: rows of one rank would meet other rows.
    """
    given = [p for p in placements.values() if p is not None]
    if any(p != given[0] for p in given):
        raise Illegal("operands are laid out differently, so their rows are different tokens or values", "one layout")
    return given[0]


def compute_dtype(*tensors: torch.Tensor) -> torch.dtype:
    """At least float32 and never below the operands' dtype."""
    dtype = torch.float32
    for tensor in tensors:
        dtype = torch.promote_types(dtype, tensor.dtype)
    return dtype
