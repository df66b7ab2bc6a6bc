"""Faults of the engine's own layouts: local queries with gathered KV rows, and o_proj by weight gather, broadcast or
all_to_all."""

import torch
from torch import Tensor, fx

from emulator.faults.behaviour import Move
from emulator.faults.fault import Case, all_have_rows, at, graph_fault, no_padding, no_row_on_rank_1, rank_fault
from emulator.faults.on_graph import GraphEdit
from emulator.faults.on_rank import RankSite, StandIn, is_ids
from emulator.faults.reductions import TWICE
from emulator.faults.transitions import ORDER
from emulator.ops.registry import op_name

ENGINE, ERA_A, ERA_C, DECODE = "dsa_cp_engine", "dsa_cp_engine_a", "dsa_cp_engine_c", "dsa_cp_engine_decode"
O_PROJ, KV = at("self_attn.o_proj", "linear"), at("self_attn.cache", "all_gather", "wait", "unpad", "cache_write")


@graph_fault(
    cases=("prefill-attention-output-times-tp",), plan=ERA_C, places=at("self_attn.o_proj", "all_reduce"),
    diagnoses=TWICE,
)  # fmt: skip
def complete_attention_output_all_reduced(edit: GraphEdit) -> None:
    """Attention returns complete rows on every rank, and the layer sums them as the partial sums it expects."""
    name = "0.self_attn.o_proj"  # its first all_gather is that of the weight
    rows = edit.find(name, "unpad") if edit.is_padded else edit.find(name, "all_gather", 1)
    edit.reroute(rows, edit.add("all_reduce", rows, "tp", edit.sizes["tp"]))


@graph_fault(plan=ERA_C, places=at("self_attn.o_proj", "linear", "all_gather"), diagnoses="not_reduced weight_shard")
def weight_gather_skipped(edit: GraphEdit) -> None:
    """Rows with all heads meet the stored shard of o_proj: the gather of the weight was skipped."""
    gather = _weight_move(edit, "0.self_attn.o_proj", "all_gather")
    wait = next(iter(gather.users))
    edit.without(wait)
    edit.without(gather)


def _weight_move(edit: GraphEdit, module: str, op: str) -> fx.Node:
    """The collective that brings a module's whole weight."""
    node = edit.find(module, op)
    while isinstance(node.args[0], fx.Node) and node.args[0].op != "get_attr":
        node = edit.find(module, op, 1)
    return node


@rank_fault(
    "behaviour", plan=ENGINE, cases=("o-proj-paths-disagree",), places=O_PROJ, diagnoses="weight_value weight_shard",
)  # fmt: skip
def weight_shards_joined_in_another_order(site: RankSite) -> None:
    """The gathered shards of o_proj are joined one rank late, so heads meet another rank's columns."""
    node = site.find("0.self_attn.o_proj", "all_gather")
    width = site.part("model.layers.0.self_attn.o_proj.weight").shape[1]
    site.move(node, lambda move, x, *args: move(x, *args).roll(width, 1))


@rank_fault(
    "behaviour", plan=ENGINE, layers=2, cases=("full-weight-pool-shared-across-layouts",), places=O_PROJ,
    diagnoses="weight_value",
)  # fmt: skip
def gathered_into_a_pool_in_use(site: RankSite) -> None:
    """The pool of whole weights is overwritten by the next layer's gather before this layer has used it."""
    later = site.weights["model.layers.1.self_attn.o_proj.weight"]

    site.move(site.find("0.self_attn.o_proj", "all_gather"), _brings(later))


def _brings(other: Tensor) -> StandIn:
    """A transition that is made, and whose result is another tensor."""

    def stand_in(move: Move, x: Tensor, *args) -> Tensor:
        move(x, *args)
        return other.clone()

    return stand_in


@rank_fault(
    "behaviour", plan=ERA_A, layers=3, cases=("layer-shard-broadcast-unpaired",), places=O_PROJ,
    diagnoses="weight_value", no_effect=no_row_on_rank_1,
)  # fmt: skip
def broadcast_pairs_with_another_layer(site: RankSite) -> None:
    """Rank 1 skipped a layer, so what it receives for layer 1 is the o_proj of layer 2."""
    later = site.weights["model.layers.2.self_attn.o_proj.weight"]
    if site.rank == 1:
        site.move(site.find("1.self_attn.o_proj", "broadcast"), _brings(later))


@rank_fault(
    "behaviour", plan=ERA_A, layers=3, cases=("layer-shard-broadcast-unpaired",), timeout=3.0,
    places=(at("self_attn.o_proj", "broadcast"), at("self_attn.q_b_proj", "broadcast")),
)  # fmt: skip
def rank_skips_a_broadcast(site: RankSite) -> None:
    """Rank 1 does not step a layer (a dummy run), and leaves its broadcast unpaired."""
    later = site.weights["model.layers.1.self_attn.o_proj.weight"]
    if site.rank == 1:
        site.move(site.find("1.self_attn.o_proj", "broadcast"), lambda move, x, *args: later.clone())


@rank_fault(
    "behaviour", plan=ENGINE, cases=("empty-query-rank-skips-gather",), places=at("self_attn.cache", "all_gather"),
    timeout=3.0, no_effect=all_have_rows,
)  # fmt: skip
def empty_rank_skips_the_kv_gather(site: RankSite) -> None:
    """Ranks that hold only padding have no queries, return early and miss the gather of KV rows."""
    start, end = site.window
    per, size = site.tokens.per, site.size
    if start == end:
        node = site.find("0.self_attn.cache", "all_gather")
        site.move(node, lambda move, x, *args: x.repeat(size, *[1] * (x.dim() - 1))[: per * size])


def _one_row_in_all(case: Case) -> str | None:
    return "rank 0 holds the whole batch" if case.tokens.real <= case.tokens.per else None


@rank_fault("behaviour", plan=ENGINE, places=KV, diagnoses=ORDER)
def kv_rows_joined_in_another_order(site: RankSite) -> None:
    """The gathered KV rows are joined one rank late, and every slot gets another token's keys."""
    node = site.find("0.self_attn.cache", "all_gather")
    per = site.tokens.per
    site.move(node, lambda move, x, *args: move(x, *args) if is_ids(x) else move(x, *args).roll(per, 0))


@rank_fault("behaviour", plan=ENGINE, places=KV, diagnoses="pad_leaked rows_permuted stale_rows", no_effect=no_padding)
def kv_padding_among_the_tokens(site: RankSite) -> None:
    """The padding of the last rank's KV rows is not cut off at the end but at the front."""
    count = site.num_pads
    site.after(site.find("0.self_attn.cache", "wait"), lambda x: x.roll(count, 0))


@rank_fault(
    "metadata",
    plan=ENGINE,
    places=at("self_attn.indexer", "dsa_indexer_topk"),
    no_effect=_one_row_in_all,
    diagnoses="wrong_metadata window_shift",  # ids of rows that see more keys are those of later rows
)
def lengths_of_the_whole_batch(site: RankSite) -> None:
    """Local queries are given the key lengths of the whole batch: early rows see keys of later ones."""
    for node in list(site.graph.nodes):
        if op_name(node.target) == "local_kv_lens":
            site.wrap(node, lambda op, x, *args: torch.where(x > 0, x, 0))


@graph_fault(
    plan=DECODE,
    cases=("sp-prefill-only-with-weight-gather",),
    places=(at("self_attn.o_proj", "slice", "unpad", "linear"), at("post_attention_layernorm", "add_rms_norm2")),
    diagnoses="not_gathered",
)
def heads_and_tokens_not_exchanged(edit: GraphEdit) -> None:
    """The all_to_all before a row-parallel o_proj is missing: own heads are cut from local rows instead."""
    moved = edit.find("0.self_attn.o_proj", "all_to_all")
    edit.replace(moved, "slice", "tp", edit.sizes["tp"], 1)
