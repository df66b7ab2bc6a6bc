"""The reference run: the Program on one process, whole weights, no ranks. Its values are what ranks are compared with."""

import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx

from emulator.model.program import Program
from emulator.ops.registry import op_name
from emulator.runtime.executor import last_uses

_FACTOR = 16.0  # rank runs re-order several sums per layer; one perturbation re-rounds each weight once


def is_choice(node: fx.Node) -> bool:
    """Whether a Program node holds a discrete choice (top-k ids, routed experts and their weights)."""
    if node.target is operator.getitem:
        return op_name(node.args[0].target) == "moe_topk"  # type: ignore[union-attr]
    return op_name(node.target) == "dsa_indexer_topk"


def run_reference(
    program: Program,
    weights: Mapping[str, Tensor],
    inputs: Mapping[str, Any],
    *,
    keep: set[str] | None,
    force: Mapping[str, Tensor] | None = None,
) -> dict[str, Tensor]:
    """Values of the Program's nodes named in `keep` (None: every tensor), by node name.

    inputs: graph inputs; their caches are written. force: values that replace the discrete choices, so that runs of
    lower precision are compared on the same choices.
    """
    env: dict[fx.Node, Any] = {}
    kept: dict[str, Tensor] = {}
    frees = last_uses(program.graph)
    with torch.no_grad():
        for node in program.graph.nodes:
            if node.op == "placeholder":
                env[node] = inputs[node.target]
            elif node.op == "get_attr":
                env[node] = weights[node.target]
            elif node.op == "call_function":
                value = node.target(*fx.map_arg(node.args, env.__getitem__), **node.kwargs)
                if force is not None and is_choice(node):
                    value = force[node.name]
                env[node] = value
                if isinstance(value, Tensor) and (keep is None or node.name in keep):
                    # a cache is written in place again later, so it is copied as it is now
                    kept[node.name] = value.clone() if op_name(node.target) == "cache_write" else value
            for dead in frees.get(node, ()):
                env.pop(dead, None)
    return kept


def tolerances(
    program: Program,
    weights: Mapping[str, Tensor],
    inputs: Mapping[str, Any],
    reference: Mapping[str, Tensor],
    dtype: torch.dtype,
    seed: int,
) -> dict[str, float]:
    """Absolute tolerance per node name.

    float64: 1e-9 of the reference's largest value; re-ordered sums differ by about 1e-12 of it. Other dtypes: a fixed
    multiple of what a re-rounding of every weight (one eps, random sign) does to the value, at least that many eps of
    its largest value. The discrete choices are held fixed while that is measured.
    """
    scales = {name: _scale(value) for name, value in reference.items()}
    if dtype == torch.float64:
        return {name: 1e-9 * scale for name, scale in scales.items()}
    eps = torch.finfo(dtype).eps
    generator = torch.Generator().manual_seed(seed)
    perturbed = {
        name: (w * (1 + eps * torch.randint(-1, 2, w.shape, generator=generator).to(w.dtype))).to(w.dtype)
        for name, w in weights.items()
    }
    other = run_reference(program, perturbed, inputs, keep=set(reference), force=reference)
    return {
        name: _FACTOR * max(eps * scales[name], _largest_difference(other[name], value))
        for name, value in reference.items()
    }


def _scale(value: Tensor) -> float:
    finite = value[value.isfinite()] if value.is_floating_point() else value
    return float(finite.abs().max()) if finite.numel() else 0.0


def _largest_difference(a: Tensor, b: Tensor) -> float:
    if not a.is_floating_point() or a.shape != b.shape or not a.numel():
        return 0.0
    return float((a.double() - b.double()).abs().nan_to_num(0.0).max())
