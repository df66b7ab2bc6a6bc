"""Discrete choices: top-k ids and routed experts.

Below float64 a near-tie may fall either way, and the two ways differ by far more than rounding. So there the choices
are compared apart, and later values are compared on the reference's choices.
"""

import operator

import torch
from torch import Tensor, fx

from emulator.ops.registry import op_name


def is_choice(node: fx.Node) -> bool:
    """Whether a Program node holds a discrete choice (top-k ids; routed experts and, with them, their weights)."""
    if node.target is operator.getitem:
        source = node.args[0]
        assert isinstance(source, fx.Node)
        return op_name(source.target) == "moe_topk"
    return op_name(node.target) == "dsa_indexer_topk"


def choices_of(graph: fx.Graph) -> set[str]:
    """Names of a Program's discrete choices."""
    return {node.name for node in graph.nodes if is_choice(node)}


def differing_rows(value: Tensor, expected: Tensor, tolerance: float) -> Tensor:
    """Bool per row: ids are compared as sets (their order carries no meaning), floats after sorting."""
    value, expected = value.sort(dim=-1).values, expected.sort(dim=-1).values
    if value.is_floating_point():
        return ~((value.double() - expected.double()).abs() <= tolerance).all(-1)
    return (value != expected).any(-1)


def num_flips(value: Tensor, expected: Tensor) -> int:
    """How many ids of `value` [T, K] are not among those of the same row of `expected`."""
    value, expected = value.contiguous(), expected.sort(dim=-1).values
    at = torch.searchsorted(expected, value).clamp(max=expected.shape[-1] - 1)
    return int((expected.gather(-1, at) != value).sum())
