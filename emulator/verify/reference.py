"""The reference run: the Program on one process, whole weights, no ranks. Ranks are compared with its values."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from emulator.model.program import Program
from emulator.ops.linear import linear_in_shards
from emulator.ops.quantised import row_codes
from emulator.ops.registry import OPS, op_name
from emulator.runtime.executor import last_uses
from emulator.verify.choices import choices_of, differing_rows, is_choice

_FACTOR = 4.0  # several sums are re-ordered per layer; one perturbation re-rounds each weight once
_FLIP_FACTOR = 4.0  # the same for the share of rows whose choice falls the other way


@dataclass(frozen=True)
class Tolerance:
    """absolute: largest error allowed, per node name. flips: share of rows of a discrete choice that may differ."""

    absolute: dict[str, float]
    flips: dict[str, float]


def run_reference(
    program: Program,
    weights: Mapping[str, Tensor],
    inputs: Mapping[str, Any],
    *,
    keep: set[str] | None,
    force: Mapping[str, Tensor] | None = None,
    in_shards: Mapping[str, int] | None = None,
    observe: Callable[[fx.Node, tuple, Any], None] | None = None,
    adjust: Callable[[fx.Node, tuple], tuple] | None = None,
) -> dict[str, Tensor]:
    """Values of the Program's nodes named in `keep` (None: every tensor), by node name.

    inputs: graph inputs; their caches are written. force: values with which the run goes on in place of its own
    discrete choices (which are still the ones returned), so that two runs are compared on the same choices. in_shards:
    quantised linears whose activations are scaled per shard of their in-features, as row-parallel ranks scale theirs.
    observe(node, arguments, value): called for every computed node. adjust(node, arguments): what it is computed from
    instead.
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
                args = fx.map_arg(node.args, env.__getitem__)
                if adjust is not None:
                    args = adjust(node, args)
                if in_shards is not None and node.name in in_shards:
                    value = linear_in_shards(in_shards[node.name], *args)
                else:
                    value = node.target(*args, **node.kwargs)
                if observe is not None:
                    observe(node, args, value)
                env[node] = force[node.name] if force is not None and is_choice(node) else value
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
    in_shards: Mapping[str, int] | None = None,
) -> Tolerance:
    """How far a rank's values may be from the reference.

    float64: 1e-9 of the reference's largest value (re-ordered sums differ by about 1e-12 of it), and no choice flips.
    Other dtypes: a fixed multiple of what a re-rounding of every weight (one eps, random sign) does to a value, at
    least that many eps of its largest value; measured with the discrete choices held fixed. Where activations are
    quantised, a rounding error may move a code by one, which is far more than an eps: so there the other run has, in
    every row of every quantised product, one input moved by one step of its scale.
    """
    scales = {name: _scale(value) for name, value in reference.items()}
    if dtype == torch.float64:
        return Tolerance({name: 1e-9 * scale for name, scale in scales.items()}, {})
    eps = torch.finfo(dtype).eps
    generator = torch.Generator().manual_seed(seed)
    perturbed = {
        name: (w * (1 + eps * torch.randint(-1, 2, w.shape, generator=generator).to(w.dtype))).to(w.dtype)
        if w.is_floating_point()
        else w  # codes are what they are
        for name, w in weights.items()
    }
    other = run_reference(
        program, perturbed, inputs, keep=set(reference), force=reference, in_shards=in_shards,
        adjust=partial(_one_step_off, generator) if program.quantised else None,
    )  # fmt: skip
    choices = choices_of(program.graph)
    absolute, flips = {}, {}
    for name, value in reference.items():
        absolute[name] = _FACTOR * eps * scales[name]
        if name in choices:  # rows that flip would drown the rounding of those that do not
            differing = differing_rows(other[name], value, absolute[name])
            flips[name] = _FLIP_FACTOR * max(float(differing.float().mean()), 0.005)
        else:
            absolute[name] = max(absolute[name], _FACTOR * _largest_difference(other[name], value))
    return Tolerance(absolute, flips)


def _one_step_off(generator: torch.Generator, node: fx.Node, args: tuple) -> tuple:
    """The operands of a quantised product with one input of each row a step nearer to zero; others as they are."""
    name = op_name(node.target)
    given = dict(zip(OPS[name].argument_names, args)) if name in OPS else {}
    if given.get("weight_scale") is None or not args[0].numel():
        return args
    x = args[0].clone()
    step = given["input_scale"].to(x.dtype) if given.get("input_scale") is not None else row_codes(x)[1].to(x.dtype)
    at = torch.randint(x.shape[1], (len(x), 1), generator=generator)
    return (x.scatter_add(1, at, -step.expand(len(x), 1) * x.gather(1, at).sign()), *args[1:])


def largest_tolerance(found: Sequence[Tolerance]) -> Tolerance:
    """The largest of each."""
    absolute = {name: max(t.absolute.get(name, 0.0) for t in found) for name in found[0].absolute}
    return Tolerance(absolute, {name: max(t.flips.get(name, 0.0) for t in found) for name in found[0].flips})


def _scale(value: Tensor) -> float:
    finite = value[value.isfinite()] if value.is_floating_point() else value
    return float(finite.abs().max()) if finite.numel() else 0.0


def _largest_difference(a: Tensor, b: Tensor) -> float:
    if not a.is_floating_point() or a.shape != b.shape or not a.numel():
        return 0.0
    return float((a.double() - b.double()).abs().nan_to_num(0.0).max())
