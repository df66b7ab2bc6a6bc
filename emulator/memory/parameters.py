"""The parameters a rank's ledger starts from: those of the Program, and of multi-token-prediction layers if wanted."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor, nn

from emulator.errors import UsageError
from emulator.layout.placement import Layout, placement_word
from emulator.layout.plan import Plan
from emulator.model.config import ModelConfig
from emulator.model.decoder import DecoderLayer
from emulator.model.layers import Linear, ProgramOptions, RMSNorm
from emulator.model.program import CausalLM, Embedding, LMHead
from emulator.ops.registry import PARTIAL, Owned, R, Shard
from emulator.runtime.mesh import Mesh

# an MTP layer's own modules (DeepSeek-V3 technical report, arXiv 2412.19437, section 2.2; names of its checkpoint) ->
# the module of the model whose row in the plan they share
_MTP_LIKE = {"embed_tokens": "model.embed_tokens", "shared_head.head": "lm_head", "shared_head.norm": "model.norm"}


@dataclass(frozen=True)
class Parameters:
    """weights: name -> meta tensor of whole shape, in order of the model. mtp: names in MTP layers. modules: all module
    names of the Program. like: module -> the module whose row in the plan applies, where it is not its own."""

    weights: Mapping[str, Tensor]
    mtp: frozenset[str]
    modules: tuple[str, ...]
    like: Mapping[str, str]


class SharedHead(nn.Module):
    def __init__(self, config: ModelConfig):
        super().__init__()
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.head = LMHead(config.hidden_size, config.vocab_size)


class MTPLayer(DecoderLayer):
    """A decoder layer behind its own embedding, two norms and the projection that joins token and hidden state."""

    def __init__(self, config: ModelConfig, layer: int, options: ProgramOptions):
        super().__init__(config, layer, options)
        hidden = config.hidden_size
        self.embed_tokens = Embedding(config.vocab_size, hidden)
        self.enorm, self.hnorm = RMSNorm(hidden, config.rms_norm_eps), RMSNorm(hidden, config.rms_norm_eps)
        self.eh_proj = Linear(2 * hidden, hidden)
        self.shared_head = SharedHead(config)


def parameters_of(config: ModelConfig, mtp_layers: int = 0) -> Parameters:
    """The model's parameters on the meta device, and those of `mtp_layers` further layers. Where the config lists its
    layers' kinds, these are MoE layers with an indexer of their own."""
    model = CausalLM(config, ProgramOptions())
    weights: dict[str, Tensor] = dict(model.named_parameters())
    first, like, mtp = config.num_hidden_layers, {}, set()
    longer = _longer(config, mtp_layers)
    for layer in range(first, first + mtp_layers):
        prefix = f"model.layers.{layer}"
        like.update({f"{prefix}.{name}": module for name, module in _MTP_LIKE.items()})
        for name, parameter in MTPLayer(longer, layer, ProgramOptions()).named_parameters():
            weights[f"{prefix}.{name}"] = parameter
            mtp.add(f"{prefix}.{name}")
    modules = tuple(name for name, _ in model.named_modules() if name)
    return Parameters(weights, frozenset(mtp), modules, like)


def _longer(config: ModelConfig, added: int) -> ModelConfig:
    """The config with `added` layers, where it lists its layers' kinds."""
    update: dict[str, object] = {"num_hidden_layers": config.num_hidden_layers + added}
    if config.mlp_layer_types is not None:
        update["mlp_layer_types"] = config.mlp_layer_types[: config.num_hidden_layers] + ("sparse",) * added
    if config.indexer_types is not None:
        update["indexer_types"] = config.indexer_types[: config.num_hidden_layers] + ("full",) * added
    if config.index_topk_pattern is not None:
        pattern = tuple(config.index_topk_pattern)[: config.num_hidden_layers]
        update["index_topk_pattern"] = tuple("full" if p in ("F", "full") else "shared" for p in pattern) + (
            ("full",) * added
        )
    return config.model_copy(update=update)


def weight_layout(name: str, parameter: Tensor, plan: Plan, sizes: Mapping[str, int], row: str) -> Layout:
    """Where a plan puts a parameter, as lowering does: a bias is split with the out-features, or partial where the
    product is. A layer-sharded one is on the tp rank of its layer. row: the module whose row in the plan applies.

    Raises UsageError for a split that does not divide."""
    placements = plan.weight_of(row)
    if name.endswith(".bias"):
        share = R if plan.gathers_weight(row) else PARTIAL
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
