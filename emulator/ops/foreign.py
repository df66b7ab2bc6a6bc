"""Layout rules of functions outside the vocabulary: views, and the torch or aten functions of a user's own graph."""

from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.distributed.tensor.placement_types import Partial, Placement, Shard

from emulator.ops.linear import linear_rule
from emulator.ops.registry import LOCAL, Illegal, R
from emulator.ops.views import VIEW_RULES

_LINEAR_IN_EACH = ("add", "sub", "neg", "clone", "to", "_to_copy", "contiguous")  # of partial sums, partial sums
_RESHAPES = ("view", "reshape", "_unsafe_view", "unsqueeze", "squeeze")
_WHOLE_LAST_DIM = ("softmax", "_softmax", "log_softmax", "layer_norm", "native_layer_norm", "rms_norm")


def function_name(node: fx.Node) -> str:
    """add for torch.add, operator.add, Tensor.add and aten.add.Tensor alike."""
    target: Any = node.target
    if isinstance(target, str):
        return target
    if isinstance(target, torch._ops.OpOverload):
        return target.overloadpacket.__name__
    return target.__name__


def foreign_rule(node: fx.Node) -> Callable[..., Any]:
    """Rule of a node whose target is no op of the vocabulary; it takes the tensor operands' placements in order."""
    if node.target in VIEW_RULES:
        return VIEW_RULES[node.target]
    name = function_name(node).rstrip("_")
    if name in ("linear",):
        return linear_rule
    if name in ("mm", "matmul", "addmm"):
        return _addmm if name == "addmm" else _mm
    if name in ("t", "transpose"):
        return _transposed
    if name in _RESHAPES:
        return VIEW_RULES[torch.unflatten]
    if name in _WHOLE_LAST_DIM:
        return _whole_rows
    if name == "cat":
        return VIEW_RULES[torch.cat]
    if _is_pointwise(name):
        return _pointwise(name, [n.meta["layout"].kind == "weight" for n in node.all_input_nodes])
    return lambda *operands: _unknown(name)


def is_row_wise(node: fx.Node) -> bool:
    """Whether each row of the result needs the same rows of the operands only, and little work: the residual's adds."""
    return function_name(node).rstrip("_") in ("add", "rms_norm", "layer_norm")


def _is_pointwise(name: str) -> bool:
    packet = getattr(torch.ops.aten, name, None)
    if packet is None:
        return name in ("contiguous", "to", "float", "double")
    return any(torch.Tag.pointwise in getattr(packet, o).tags for o in packet.overloads()) or name in _LINEAR_IN_EACH


def _pointwise(name: str, weights: list[bool]) -> Callable[..., Placement]:
    """weights: which operands are weights: those are broadcast over the tokens."""

    def rule(*operands: Placement) -> Placement:
        tokens = {p for p, is_weight in zip(operands, weights) if not is_weight}
        if len(tokens) > 1:
            raise Illegal("operands are laid out differently, so their rows are different tokens", "one layout")
        placement = next(iter(tokens), R)
        split = [p for p, is_weight in zip(operands, weights) if is_weight and p != R]
        if split and placement != Shard(1):
            raise Illegal("features of a split weight meet whole rows", "whole weights, or equal feature shards")
        if isinstance(placement, Partial) and not (name in _LINEAR_IN_EACH or name in ("mul", "div")):
            raise Illegal(f"{name} of partial sums is not the partial sum of {name}", "complete values")
        if isinstance(placement, Partial) and name in ("mul", "div") and len(weights) - sum(weights) > 1:
            raise Illegal("a product of partial sums is not the partial sum of products", "complete values")
        return placement

    return rule


def _mm(x: Placement, weight: Placement) -> Placement:
    """x [T, I] @ weight [I, O]: linear with the weight's dims swapped."""
    return linear_rule(x, _transposed(weight))


def _addmm(bias: Placement, x: Placement, weight: Placement) -> Placement:
    return linear_rule(x, _transposed(weight), bias)


def _transposed(x: Placement) -> Placement:
    return Shard(1 - x.dim) if isinstance(x, Shard) else x


def _whole_rows(x: Placement, *weights: Placement) -> Placement:
    if x not in (R, LOCAL) or any(w != R for w in weights):
        raise Illegal("needs whole rows: every feature, and complete sums", "full-token or local-token")
    return x


def _unknown(name: str) -> Placement:
    raise Illegal(f"no layout rule is known for {name}", "full-token operands")
