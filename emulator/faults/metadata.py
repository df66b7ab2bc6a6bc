"""Faults of the batch description on some or all ranks: positions, slots, masks, lengths, block tables."""

import torch

from emulator.faults.fault import Case, Place, at, no_padding, rank_fault
from emulator.faults.on_rank import RankSite

POSITIONS = (at("self_attn", "rope"), at("self_attn.indexer.wk", "dsa_indexer_key"))
WRITES = at("self_attn.cache", "cache_write")
ATTENTION = (at("self_attn.indexer", "dsa_indexer_topk"), at("self_attn.attn", "mla_sparse_attention"))
MASK: tuple[Place, ...] = (at("mlp.topk", "pad", "slice", "moe_topk"),)


def _one_window(case: Case) -> str | None:
    return "one token: rank 0's window is the whole sequence" if case.tokens.real <= case.tokens.per else None


def _one_token(case: Case) -> str | None:
    return "one token has one order" if case.tokens.real == 1 else None


@rank_fault(
    "metadata", cases=("rope-positions-and-query-in-different-layouts",), places=POSITIONS,
    diagnoses="wrong_positions", no_effect=_one_window,
)  # fmt: skip
def positions_of_first_window_everywhere(site: RankSite) -> None:
    """Every window is rotated by rank 0's positions: they count from 0 again at each rank's first token."""
    site.inputs["positions"] = site.inputs["positions"] % site.tokens.per


@rank_fault("metadata", places=POSITIONS, diagnoses="wrong_positions")
def positions_local_on_one_rank(site: RankSite) -> None:
    """Rank 1 counts positions from its own first token."""
    if site.rank == 1:
        site.inputs["positions"] = site.inputs["positions"] - site.index * site.tokens.per


@rank_fault("metadata", places=POSITIONS, diagnoses="wrong_positions")
def positions_shifted_by_one(site: RankSite) -> None:
    """Positions start at 1 on every rank; relative angles, and so the attention output, stay right."""
    site.inputs["positions"] = site.inputs["positions"] + 1


@rank_fault("metadata", places=WRITES, diagnoses="wrong_metadata window_shift")
def slots_shifted(site: RankSite) -> None:
    """Cache rows are written one slot too far, on every rank."""
    site.inputs["slots"] = site.inputs["slots"] + 1


@rank_fault("metadata", places=WRITES, diagnoses="wrong_metadata rows_permuted", no_effect=_one_token)
def slots_reversed_on_one_rank(site: RankSite) -> None:
    """Rank 1 writes its cache rows in the reverse order."""
    if site.rank == 1:
        site.inputs["slots"] = site.inputs["slots"].flip(0)


@rank_fault("metadata", layers=3, cases=("mc2-mask-buffer-not-tp-aligned",), places=MASK, diagnoses="wrong_metadata")
def real_token_marked_pad(site: RankSite) -> None:
    """The mask calls the last real token padding: it reaches no expert."""
    site.inputs["token_mask"] = site.inputs["token_mask"].clone()
    site.inputs["token_mask"][-1] = False


@rank_fault(
    "metadata", cases=("draft-steps-share-length-buffers",), places=ATTENTION, diagnoses="wrong_metadata local_ids"
)
def kv_length_of_next_step(site: RankSite) -> None:
    """Key lengths are those of the next step: every row sees one key too many."""
    site.inputs["kv_lens"] = site.inputs["kv_lens"] + 1


@rank_fault("metadata", cases=("negative-key-length-on-graph-padding",), places=ATTENTION, diagnoses="wrong_metadata")
def negative_key_length(site: RankSite) -> None:
    """Rank 1's key length has become negative: rows of later ranks were subtracted without a clamp."""
    if site.rank == 1:
        site.inputs["kv_lens"] = torch.full_like(site.inputs["kv_lens"], -2)


@rank_fault("metadata", cases=("one-token-last-chunk-taken-for-decode",), places=ATTENTION, diagnoses="wrong_metadata")
def query_length_short_on_one_rank(site: RankSite) -> None:
    """Rank 1 counts one query token less than there is: its last row belongs to no request."""
    if site.rank == 1:
        site.inputs["query_lens"] = site.inputs["query_lens"] - 1


@rank_fault("metadata", places=at("self_attn.attn", "mla_sparse_attention"), diagnoses="wrong_metadata pad_leaked")
def block_table_stale_on_one_rank(site: RankSite) -> None:
    """Rank 1's block table names a block that this request never wrote."""
    if site.rank == 1:
        table = site.inputs["block_table"]
        site.inputs["block_table"] = torch.full_like(table, int(table.max()) + 1)


@rank_fault(
    "metadata", cases=("sp-padding-adds-a-request", "dummy-request-missing-in-kv-lengths"), places=ATTENTION,
    diagnoses="wrong_metadata", no_effect=no_padding,
)  # fmt: skip
def dummy_request_missing_in_kv_lengths(site: RankSite) -> None:
    """Padding adds a request to the query lengths, but not to the key lengths."""
    if site.num_pads:
        lens = site.inputs["query_lens"]
        site.inputs["query_lens"] = torch.cat((lens, lens.new_tensor([site.num_pads])))
