"""Faults of what ranks compute and of ranks that leave the common path: skip, repeat, raise, send something else."""

import torch
from torch import Tensor

from emulator.faults.fault import Case, all_have_rows, at, no_padding, no_row_on_rank_1, rank_fault
from emulator.faults.on_rank import Move, RankSite, is_ids
from emulator.faults.reductions import SHARED

LEFT = (at("self_attn", "all_gather"), at("mlp", "all_gather"))


# --- computing -------------------------------------------------------------------------------------------------------


def _no_mixed_rank(case: Case) -> str | None:
    if all(case.num_real(r) in (0, case.tokens.per) for r in range(case.mesh.tp)):
        return "no rank holds both real rows and padding"
    return None


@rank_fault(
    "behaviour", cases=("uninitialised-pad-rows-spread-nan",), places=at("self_attn.o_proj", "linear"),
    diagnoses="pad_leaked", no_effect=_no_mixed_rank,
)  # fmt: skip
def scale_over_padding(site: RankSite) -> None:
    """A shared scale (dynamic quantisation) is taken over all rows, padding included, and spreads NaN to real rows."""

    def scaled(op, x: Tensor, *rest):
        scale = x.abs().amax()
        return op(x / scale, *rest) * scale

    site.wrap(site.find("0.self_attn.o_proj", "linear"), scaled)


@rank_fault("behaviour", places=at("self_attn.indexer", "dsa_indexer_topk"), diagnoses="local_ids wrong_metadata")
def topk_ids_local(site: RankSite) -> None:
    """Top-k ids count from the first key of the rank's own window, and keys before it are lost."""
    start = site.index * site.tokens.per

    def local(op, *operands):
        ids = op(*operands)
        return torch.where(ids >= start, ids - start, -1)

    site.wrap(site.find("0.self_attn.indexer", "dsa_indexer_topk"), local)


@rank_fault("behaviour", places=at("self_attn.indexer", "dsa_indexer_topk"), diagnoses="local_ids")
def topk_ids_offset_twice(site: RankSite) -> None:
    """Each rank adds the start of its window to top-k ids that are global already."""
    start = site.index * site.tokens.per

    def moved(op, *operands):
        ids = op(*operands)
        return torch.where(ids >= 0, ids + start, -1)

    site.wrap(site.find("0.self_attn.indexer", "dsa_indexer_topk"), moved)


@rank_fault(
    "behaviour", cases=("short-row-topk-minus-one-read-as-index",), places=at("self_attn.attn", "mla_sparse_attention"),
    diagnoses="pad_leaked local_ids wrong_metadata",
)  # fmt: skip
def topk_minus_one_read_as_index(site: RankSite) -> None:
    """Attention takes the id -1 of short rows for an index, which reads the last row of the cache."""

    def unmasked(op, q, cache, w_uk_t, w_uv, ids, query_lens, kv_lens, block_table, block, scale):
        ids = ids.long()
        slots = torch.where(ids < 0, -1, block_table[0][ids.clamp(min=0) // block] * block + ids % block)
        nope, rank, rows = w_uk_t.shape[1], w_uk_t.shape[2], cache[slots]
        absorbed = torch.einsum("tnd,ndr->tnr", q[..., :nope], w_uk_t)
        logits = torch.einsum("tnl,tkl->tnk", torch.cat((absorbed, q[..., nope:]), -1), rows) * scale
        latent = torch.einsum("tnk,tkr->tnr", logits.softmax(-1), rows[..., :rank])
        return torch.einsum("tnr,nrv->tnv", latent, w_uv)

    site.wrap(site.find("0.self_attn.attn", "mla_sparse_attention"), unmasked)


@rank_fault(
    "behaviour", layers=3, cases=("mc2-mask-buffer-not-tp-aligned",),
    places=(at("mlp.topk", "slice", "moe_topk"), at("mlp.experts.dispatch", "moe_dispatch")),
    diagnoses="pad_leaked wrong_metadata", no_effect=no_padding,
)  # fmt: skip
def padding_marked_real(site: RankSite) -> None:
    """Padding rows are marked as real tokens, routed and dispatched to experts."""
    site.after(site.find("2.mlp.topk", "slice"), torch.ones_like)


@rank_fault(
    "behaviour", cases=("dummy-run-reuses-live-slots",), places=at("self_attn.cache", "cache_write"),
    diagnoses="wrong_metadata stale_rows unknown",
)  # fmt: skip
def dummy_rows_overwrite_live_slots(site: RankSite) -> None:
    """Rank 1 writes a dummy row into a slot of the last real step."""
    if site.rank != 1:
        return

    def written(op, cache, rows, slots, start):
        cache = op(cache, rows, slots, start)
        cache[slots[:1]] = 0.5
        return cache

    site.wrap(site.find("0.self_attn.cache", "cache_write"), written)


def _no_token_of_two_blocks(case: Case) -> str | None:
    held = case.config.vocab_size // case.mesh.tp
    hit = bool((case.input_ids // held < 2).any())
    return None if hit else "no token id is in the vocabulary blocks of ranks 0 and 1"


@rank_fault(
    "behaviour", places=at("model.embed_tokens", "embedding", "reduce_scatter", "pad"), diagnoses="weight_shard",
    no_effect=_no_token_of_two_blocks,
)  # fmt: skip
def vocabulary_offset_of_first_rank(site: RankSite) -> None:
    """Rank 1 looks token ids up as if its block of the embedding began at 0."""
    if site.rank == 1:
        site.wrap(site.find("model.embed_tokens", "embedding"), lambda op, ids, weight: op(ids, weight, 0))


@rank_fault(
    "behaviour", layers=3, cases=("draft-steps-share-length-buffers",), places=at("self_attn", "all_gather", "unpad"),
    diagnoses="stale_rows", no_effect=no_row_on_rank_1,
)  # fmt: skip
def gather_sends_rows_of_last_layer(site: RankSite) -> None:
    """Rank 1 sends the buffer of the layer before into a gather."""
    if site.rank != 1:
        return
    sent: list[Tensor] = []

    def keep(move: Move, x: Tensor, *args) -> Tensor:
        if not is_ids(x):
            sent.append(x.clone())
        return move(x, *args)

    def stale(move: Move, x: Tensor, *args) -> Tensor:
        return move(x if is_ids(x) else sent[0], *args)

    site.stand_ins[site.find("1.self_attn", "all_gather").name] = keep
    site.stand_ins[site.find("2.self_attn", "all_gather").name] = stale


# --- leaving the common path -----------------------------------------------------------------------------------------


def _skips(site: RankSite) -> None:
    def skip(move: Move, x: Tensor, axis: str, size: int, dim: int) -> Tensor:
        return torch.cat([x] * size, dim)

    site.stand_ins[site.find("0.self_attn", "all_gather").name] = skip


@rank_fault("behaviour", places=LEFT)
def rank_skips_gather(site: RankSite) -> None:
    """Rank 1 goes on without taking part in a gather."""
    if site.rank == 1:
        _skips(site)


@rank_fault("behaviour", cases=("empty-query-rank-skips-gather",), places=LEFT, no_effect=all_have_rows)
def empty_query_rank_skips_gather(site: RankSite) -> None:
    """Ranks whose window is all padding return early and miss a gather."""
    start, end = site.window
    if start == end:
        _skips(site)


@rank_fault("behaviour", cases=("draft-forward-count-decided-locally",), places=LEFT)
def rank_repeats_gather(site: RankSite) -> None:
    """Rank 1 makes one gather more than the others."""

    def twice(move: Move, x: Tensor, *args) -> Tensor:
        move(x, *args)
        return move(x, *args)

    if site.rank == 1:
        site.stand_ins[site.find("0.self_attn", "all_gather").name] = twice


@rank_fault(
    "behaviour", layers=3, variants=SHARED, cases=("layer-shard-broadcast-unpaired",), timeout=3.0,
    places=(at("mlp.shared_experts", "all_gather"), at("mlp.experts", "all_to_all")),
)  # fmt: skip
def collectives_swapped_on_one_rank(site: RankSite) -> None:
    """Rank 1 makes the shared expert's gather before the dispatch, the others after it: each waits for the other."""
    if site.rank == 1:
        site.find("2.mlp.experts", "all_to_all").prepend(site.find("2.mlp.shared_experts", "all_gather"))


@rank_fault("behaviour", cases=("one-token-last-chunk-taken-for-decode",), places=at("mlp.down_proj", "reduce_scatter"))
def rank_takes_another_path(site: RankSite) -> None:
    """Rank 1 decides by its own rows that this is decode and makes an all_reduce where the others reduce_scatter."""

    def other(move: Move, x: Tensor, axis: str, size: int, dim: int) -> Tensor:
        return x if is_ids(x) else move(x, axis, size, op="all_reduce").chunk(size, dim)[site.index]

    if site.rank == 1:
        site.stand_ins[site.find("0.mlp.down_proj", "reduce_scatter").name] = other


@rank_fault("behaviour", places=at("mlp", "all_gather"))
def rank_raises(site: RankSite) -> None:
    """Rank 1 raises on its way into a gather."""

    def fail(move: Move, x: Tensor, *args) -> Tensor:
        raise MemoryError("no room for the gathered rows")

    if site.rank == 1:
        site.stand_ins[site.find("0.mlp", "all_gather").name] = fail


@rank_fault("behaviour", places=at("mlp", "all_gather"))
def rank_sends_other_dtype(site: RankSite) -> None:
    """Rank 1 sends float32 into a gather of float64."""

    def narrow(move: Move, x: Tensor, *args) -> Tensor:
        return move(x if is_ids(x) else x.float(), *args)

    if site.rank == 1:
        site.stand_ins[site.find("0.mlp", "all_gather").name] = narrow


@rank_fault(
    "behaviour", cases=("dp-ranks-padded-to-different-lengths", "lm-head-gather-with-unequal-rows"),
    places=at("mlp", "all_gather"),
)  # fmt: skip
def rank_sends_other_row_count(site: RankSite) -> None:
    """Rank 1 sends one row more than the others into a gather: it was padded to another length."""

    def longer(move: Move, x: Tensor, *args) -> Tensor:
        return move(torch.cat((x, x[-1:])), *args)

    if site.rank == 1:
        site.stand_ins[site.find("0.mlp", "all_gather").name] = longer


@rank_fault("behaviour", layers=3, places=at("mlp.experts.gate_up_proj", "all_to_all_rows"))
def split_list_off_by_one(site: RankSite) -> None:
    """Rank 0 sends one row to a rank that does not expect it, in place of the one that does."""

    def uneven(move: Move, x: Tensor, send: list[int], receive: list[int], *rest) -> Tensor:
        sent = list(send)
        giver = max(range(len(sent)), key=sent.__getitem__)
        sent[giver], sent[giver - 1] = sent[giver] - 1, sent[giver - 1] + 1
        return move(x, sent, receive, *rest)

    if site.rank == 0:
        site.stand_ins[site.find("2.mlp.experts.gate_up_proj", "all_to_all_rows").name] = uneven
