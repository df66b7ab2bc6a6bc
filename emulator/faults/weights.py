"""Faults of what a rank holds of a weight: another shard, another cut, other values, a bias too often or never."""

import torch

from emulator.faults.fault import at, no_row_on_rank_1, rank_fault
from emulator.faults.on_rank import RankSite

BIAS = "weight_value bias_count"


@rank_fault("weights", places=at("mlp.gate_proj", "linear"), diagnoses="weight_shard")
def shard_of_another_rank(site: RankSite) -> None:
    """Rank 1 holds rank 0's shard of a column-parallel weight."""
    name = "model.layers.0.mlp.gate_proj.weight"
    if site.rank == 1:
        site.parts[name] = site.part(name, 0)


@rank_fault("weights", places=at("mlp.up_proj", "linear"), diagnoses="weight_shard")
def shards_swapped(site: RankSite) -> None:
    """Ranks 0 and 1 hold each other's shard."""
    name = "model.layers.0.mlp.up_proj.weight"
    if site.rank < 2:
        site.parts[name] = site.part(name, 1 - site.rank)


@rank_fault(
    "weights", cases=("full-head-rows-into-sharded-o-proj", "role-selects-wrong-o-proj-path"),
    places=at("self_attn.o_proj", "linear"), diagnoses="weight_shard",
)  # fmt: skip
def shard_where_whole_was_meant(site: RankSite) -> None:
    """Rows with all heads meet a tp shard of o_proj: the gather of the weight was skipped."""
    name = "model.layers.0.self_attn.o_proj.weight"
    site.parts[name] = site.weights[name].chunk(site.size, 1)[site.index]


@rank_fault("weights", places=at("lm_head", "lm_head"), diagnoses="weight_shard")
def whole_where_shard_was_meant(site: RankSite) -> None:
    """Every rank holds the whole lm_head, and the joined logits repeat the vocabulary tp times."""
    site.parts["lm_head.weight"] = site.weights["lm_head.weight"]


@rank_fault("weights", places=at("mlp.down_proj", "linear"), diagnoses="weight_shard weight_value")
def shard_cut_along_wrong_dim(site: RankSite) -> None:
    """A row-parallel weight is cut along its out-features and read as if it had been cut along its in-features."""
    name = "model.layers.0.mlp.down_proj.weight"
    proper = site.part(name)
    site.parts[name] = site.weights[name].chunk(site.size, 0)[site.index].reshape(proper.shape)


@rank_fault("weights", layers=3, places=at("mlp.experts.down_proj", "grouped_matmul"), diagnoses="weight_shard")
def experts_of_another_rank(site: RankSite) -> None:
    """Every rank holds the down projections of the next rank's experts."""
    name = "model.layers.2.mlp.experts.down_proj.weight"
    block = (site.mesh.index("ep", site.rank) + 1) % site.mesh.ep
    site.parts[name] = site.weights[name].chunk(site.mesh.ep, 0)[block]


@rank_fault("weights", places=at("self_attn.kv_b_proj", "mla_absorb"), diagnoses="weight_value")
def kv_b_proj_halves_swapped(site: RankSite) -> None:
    """Each head's block of kv_b_proj holds [value | key] where [key | value] is meant, so W_UK_T and W_UV mix."""
    name = "model.layers.0.self_attn.kv_b_proj.weight"
    nope, value = site.find("0.self_attn.kv_b_proj", "mla_absorb").args[1:]
    per_head = site.part(name).unflatten(0, (-1, nope + value))
    site.parts[name] = torch.cat((per_head[:, nope:], per_head[:, :nope]), 1).flatten(0, 1)


@rank_fault(
    "weights", layers=2, cases=("o-proj-paths-disagree", "full-weight-pool-shared-across-layouts"),
    places=at("self_attn.o_proj", "linear"), diagnoses="weight_value",
)  # fmt: skip
def weight_of_another_layer(site: RankSite) -> None:
    """The pool of gathered weights still holds the last layer's o_proj."""
    site.parts["model.layers.1.self_attn.o_proj.weight"] = site.weights["model.layers.0.self_attn.o_proj.weight"]


@rank_fault(
    "weights", layers=2, cases=("layer-shard-broadcast-unpaired",), places=at("self_attn.o_proj", "linear"),
    diagnoses="weight_value", no_effect=no_row_on_rank_1,
)  # fmt: skip
def broadcast_weight_of_another_layer(site: RankSite) -> None:
    """Rank 1 missed a broadcast of layer-sharded weights and computes with the next layer's o_proj."""
    if site.rank == 1:
        site.parts["model.layers.0.self_attn.o_proj.weight"] = site.weights["model.layers.1.self_attn.o_proj.weight"]


@rank_fault("weights", places=at("self_attn.q_a_proj", "linear"), diagnoses="weight_value")
def replicated_weight_differs(site: RankSite) -> None:
    """One row of a replicated weight has another value on rank 1."""
    name = "model.layers.0.self_attn.q_a_proj.weight"
    if site.rank == 1:
        site.parts[name] = site.part(name)
        site.parts[name][5] += 0.01


@rank_fault(
    "weights", cases=("o-proj-paths-disagree",), places=at("self_attn.o_proj", "linear"), diagnoses="weight_value"
)
def channel_scale_missing(site: RankSite) -> None:
    """The per-channel scale of a quantised weight is not applied: its out-features are off by a factor each."""
    name = "model.layers.0.self_attn.o_proj.weight"
    weight = site.part(name)
    site.parts[name] = weight / torch.linspace(0.5, 1.5, len(weight), dtype=weight.dtype).unsqueeze(1)


@rank_fault("weights", places=at("self_attn.o_proj", "linear"), diagnoses="weight_value")
def heads_rotated_in_weight(site: RankSite) -> None:
    """The head blocks of o_proj stand one head further than those of the attention output."""
    name = "model.layers.0.self_attn.o_proj.weight"
    _, value = site.find("0.self_attn.kv_b_proj", "mla_absorb").args[1:]
    site.parts[name] = site.part(name).roll(value, 1)


@rank_fault(
    "weights", cases=("quant-bias-missing-with-full-weight",), places=at("self_attn.indexer.wk", "dsa_indexer_key"),
    diagnoses=BIAS,
)  # fmt: skip
def bias_only_on_first_rank(site: RankSite) -> None:
    """A bias is added on rank 0 only, as for a sum over ranks, but every rank computes complete rows."""
    name = "model.layers.0.self_attn.indexer.k_norm.bias"
    if site.rank > 0:
        site.parts[name] = torch.zeros_like(site.part(name))


@rank_fault("weights", places=at("self_attn.indexer.wk", "dsa_indexer_key"), diagnoses=BIAS)
def bias_added_tp_times(site: RankSite) -> None:
    """A bias counts once per rank of the tp group."""
    name = "model.layers.0.self_attn.indexer.k_norm.bias"
    site.parts[name] = site.part(name) * site.size


@rank_fault("weights", layers=3, places=at("mlp.topk", "moe_topk"), diagnoses=BIAS)
def router_bias_missing(site: RankSite) -> None:
    """The router's correction bias is zero on every rank, so other experts are chosen."""
    name = "model.layers.2.mlp.gate.e_score_correction_bias"
    site.parts[name] = torch.zeros_like(site.part(name))
