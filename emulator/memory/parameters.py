"""The parameters a rank's ledger starts from: those of the Program, and of multi-token-prediction layers if wanted."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from emulator.errors import UsageError
from emulator.layout.placement import Layout, placement_word
from emulator.layout.plan import Plan
from emulator.model.config import ModelConfig
from emulator.model.layers import ProgramOptions
from emulator.model.mtp import MTPLayer
from emulator.model.program import CausalLM
from emulator.ops.registry import PARTIAL, Owned, R, Shard
from emulator.runtime.mesh import Mesh


@dataclass(frozen=True)
class Parameters:
    """weights: name -> meta tensor of whole shape, in order of the model. mtp: names in MTP layers. modules: all module
    names of the Program, without those of MTP layers."""

    weights: Mapping[str, Tensor]
    mtp: frozenset[str]
    modules: tuple[str, ...]


def parameters_of(config: ModelConfig, mtp_layers: int = 0) -> Parameters:
    """The model's parameters on the meta device, and those of `mtp_layers` further layers."""
    model = CausalLM(config, ProgramOptions())
    weights: dict[str, Tensor] = dict(model.named_parameters())
    first, mtp = config.num_hidden_layers, set()
    longer = config.with_mtp_layers(mtp_layers)
    for layer in range(first, first + mtp_layers):
        prefix = f"model.layers.{layer}"
        for name, parameter in MTPLayer(longer, layer, ProgramOptions()).named_parameters():
            weights[f"{prefix}.{name}"] = parameter
            mtp.add(f"{prefix}.{name}")
    modules = tuple(name for name, _ in model.named_modules() if name)
    return Parameters(weights, frozenset(mtp), modules)


def weight_layout(name: str, parameter: Tensor, plan: Plan, sizes: Mapping[str, int]) -> Layout:
    """Where a plan puts a parameter, as lowering does: a bias is split with the out-features, or partial where the
    product is. A layer-sharded one is on the tp rank of its layer.

    Raises UsageError for a split that does not divide."""
    module = name.rpartition(".")[0]
    placements = plan.weight_of(module)
    if name.endswith(".bias"):
        share = R if plan.gathers_weight(module) else PARTIAL
        placements = {a: share if p == Shard(1) else R if isinstance(p, Owned) else p for a, p in placements.items()}
    for axis, placement in placements.items():
        if not isinstance(placement, Shard):
            continue
        if axis not in sizes or placement.dim >= parameter.dim():
            word = placement_word(placement, "weight")
            raise UsageError(f"plan {plan.name}: {name} {list(parameter.shape)} cannot be {axis}:{word}")
        unit = getattr(parameter, "shard_unit", 1) if name.endswith(".weight") else 1
        units = parameter.shape[placement.dim] // unit
        if units % sizes[axis]:
            what = f"{units} heads" if unit > 1 else f"{units} (dim {placement.dim})"
            raise UsageError(f"plan {plan.name}: {axis} {sizes[axis]} does not divide {what} of {name}")
    on_ranks = {a: Owned(p.index % sizes[a]) if isinstance(p, Owned) else p for a, p in placements.items()}
    return Layout("weight").placed(**{a: p for a, p in on_ranks.items() if sizes[a] > 1})


def local_shape(shape: tuple[int, ...], layout: Layout, mesh: Mesh, rank: int) -> tuple[int, ...]:
    """A rank's part of a whole shape; of a layer-sharded weight, no row where another rank owns it."""
    local = list(shape)
    for axis, placement in layout.placements:
        if isinstance(placement, Shard):
            local[placement.dim] //= mesh.sizes[axis]
        elif isinstance(placement, Owned) and mesh.index(axis, rank) != placement.index:
            local[0] = 0
    return tuple(local)


def owner_of(layout: Layout) -> int | None:
    """Which tp rank holds a layer-sharded weight."""
    return next((p.index for _, p in layout.placements if isinstance(p, Owned)), None)


def raw_sizes(folder: Path) -> dict[str, int]:
    """Whole-number fields of a model folder's config.json, also those that the Program has no use for."""
    data = json.loads((folder / "config.json").read_text())
    return {k: v for k, v in data.items() if isinstance(v, int) and not isinstance(v, bool)}
