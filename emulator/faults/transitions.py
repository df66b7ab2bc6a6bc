"""Faults of how all ranks carry a transition out: wrong windows, orders of rows and padding."""

import torch
from torch import Tensor

from emulator.faults.fault import Case, at, no_padding, rank_fault
from emulator.faults.on_rank import Move, RankSite

SLICE = at("self_attn.o_proj", "slice")
GATHER = at("self_attn", "all_gather", "unpad")
ORDER = "rows_permuted window_shift pad_leaked"


def _one_row_each(case: Case) -> str | None:
    return "each rank holds one row: all orders of cutting agree" if case.tokens.per == 1 else None


def _cut(site: RankSite) -> str:
    return site.find("0.self_attn.o_proj", "slice").name


@rank_fault("behaviour", places=SLICE, diagnoses="window_shift pad_leaked")
def window_of_next_rank(site: RankSite) -> None:
    """Every rank slices the window of the rank after it."""

    def stand_in(move: Move, x: Tensor, axis: str, size: int, dim: int) -> Tensor:
        return x.chunk(size, dim)[(site.index + 1) % size].clone()

    site.stand_ins[_cut(site)] = stand_in


@rank_fault("behaviour", places=SLICE, diagnoses="window_shift pad_leaked")
def window_off_by_one_row(site: RankSite) -> None:
    """Every rank's window starts one row late."""

    def stand_in(move: Move, x: Tensor, axis: str, size: int, dim: int) -> Tensor:
        return x.roll(-1, dim).chunk(size, dim)[site.index].clone()

    site.stand_ins[_cut(site)] = stand_in


@rank_fault("behaviour", places=SLICE, diagnoses=ORDER, no_effect=_one_row_each)
def round_robin_slice(site: RankSite) -> None:
    """Rank r takes rows r, r + tp, ... in place of a block; the gather joins blocks."""

    def stand_in(move: Move, x: Tensor, axis: str, size: int, dim: int) -> Tensor:
        return x[site.index :: size].clone()

    site.stand_ins[_cut(site)] = stand_in


@rank_fault("behaviour", places=SLICE, diagnoses=ORDER, no_effect=_one_row_each)
def zigzag_slice(site: RankSite) -> None:
    """Rank r takes chunks r and 2 tp - 1 - r (balanced for causal attention) in place of a block."""

    def stand_in(move: Move, x: Tensor, axis: str, size: int, dim: int) -> Tensor:
        chunks = x.tensor_split(2 * size)
        return torch.cat((chunks[site.index], chunks[2 * size - 1 - site.index]))

    site.stand_ins[_cut(site)] = stand_in


@rank_fault("behaviour", places=GATHER, diagnoses=ORDER)
def gather_in_reversed_order(site: RankSite) -> None:
    """Gathered blocks are joined from the last rank to the first."""

    def stand_in(move: Move, x: Tensor, axis: str, size: int, dim: int) -> Tensor:
        return torch.cat(move(x, axis, size, dim).chunk(size, dim)[::-1], dim)

    site.stand_ins[site.find("0.self_attn", "all_gather").name] = stand_in


@rank_fault("behaviour", places=GATHER, diagnoses=ORDER)
def gathered_ranks_swapped(site: RankSite) -> None:
    """The blocks of ranks 0 and 1 are joined in the wrong order."""

    def stand_in(move: Move, x: Tensor, axis: str, size: int, dim: int) -> Tensor:
        blocks = move(x, axis, size, dim).chunk(size, dim)
        return torch.cat((blocks[1], blocks[0], *blocks[2:]), dim)

    site.stand_ins[site.find("0.self_attn", "all_gather").name] = stand_in


@rank_fault("behaviour", places=at("self_attn", "unpad"), diagnoses=ORDER, no_effect=no_padding)
def unpad_from_the_front(site: RankSite) -> None:
    """As many rows as there is padding are dropped from the front of gathered rows, not from their end."""
    if site.num_pads:
        gathered = site.find("0.self_attn", "all_gather")
        site.after(gathered, lambda x: x.roll(-site.num_pads, 0))


@rank_fault(
    "behaviour", cases=("uninitialised-pad-rows-spread-nan",), places=at("self_attn.o_proj", "pad", "slice"),
    diagnoses=ORDER, no_effect=no_padding,
)  # fmt: skip
def pad_at_the_front(site: RankSite) -> None:
    """Padding is put in front of the rows before they are cut."""
    if site.num_pads:
        site.after(site.find("0.self_attn.o_proj", "pad"), lambda x: x.roll(site.num_pads, 0))


def _one_source(case: Case) -> str | None:
    senders = [r for r in range(case.mesh.tp) if case.num_real(r)]
    return "only one rank has rows to dispatch" if len(senders) == 1 else None


@rank_fault(
    "behaviour", layers=3, places=at("mlp.experts.gate_up_proj", "all_to_all_rows"), diagnoses="rows_permuted",
    no_effect=_one_source,
)  # fmt: skip
def received_blocks_reversed(site: RankSite) -> None:
    """Rows received in all_to_all are joined from the last source to the first, their counts are not."""

    def stand_in(move: Move, x: Tensor, send: list[int], receive: list[int], *rest: object) -> Tensor:
        return torch.cat(move(x, send, receive, *rest).split(receive)[::-1])

    site.stand_ins[site.find("2.mlp.experts.gate_up_proj", "all_to_all_rows").name] = stand_in


@rank_fault(
    "behaviour", layers=3, cases=("mc2-mask-buffer-not-tp-aligned",), places=at("mlp.topk", "slice"),
    diagnoses="window_shift wrong_metadata mixed_tokens",
)  # fmt: skip
def mask_cut_unlike_hidden(site: RankSite) -> None:
    """The token mask is cut one rank further than the hidden states: real tokens are lost, padding is dispatched."""

    def stand_in(move: Move, x: Tensor, axis: str, size: int, dim: int) -> Tensor:
        return x.chunk(size, dim)[(site.index + 1) % size].clone()

    site.stand_ins[site.find("2.mlp.topk", "slice").name] = stand_in


def _rows_differ(case: Case) -> str | None:
    real, per = case.tokens.real, case.tokens.per
    return f"{real} full rows are not {per} local ones: the comparison tells them apart" if real != per else None


@rank_fault(
    "behaviour", cases=("layout-inferred-from-row-count", "layer-boundary-leaves-and-reenters-sp"), places=GATHER,
    diagnoses="not_gathered pad_leaked", no_effect=_rows_differ,
)  # fmt: skip
def gather_skipped_by_row_count(site: RankSite) -> None:
    """All ranks skip a gather when local rows are as many as full ones: with one token they are."""

    def stand_in(move: Move, x: Tensor, axis: str, size: int, dim: int) -> Tensor:
        skipped = len(x) == site.tokens.real
        return x.repeat(size, *[1] * (x.dim() - 1)) if skipped else move(x, axis, size, dim)

    site.stand_ins[site.find("0.self_attn", "all_gather").name] = stand_in


@rank_fault(
    "behaviour", variants={"embedding": "replicated"}, cases=("residual-chunk-silently-skipped",),
    places=at("model.embed_tokens", "slice"), diagnoses="window_shift not_sliced unknown", no_effect=_rows_differ,
)  # fmt: skip
def slice_skipped_by_row_count(site: RankSite) -> None:
    """All ranks skip a slice when full rows are as many as local ones: with one token all keep it, for padding too."""

    def stand_in(move: Move, x: Tensor, axis: str, size: int, dim: int) -> Tensor:
        skipped = site.tokens.real == site.tokens.per
        return x[: site.tokens.per].clone() if skipped else move(x, axis, size, dim)

    site.stand_ins[site.find("model.embed_tokens", "slice").name] = stand_in
