"""Hypotheses about rows: right values in the wrong place, too many or too few of them, slices of the wrong dim."""

import math
from collections import Counter
from dataclasses import dataclass

import torch
from torch import Tensor

from emulator.ops.transition import pad_rows
from emulator.verify.hypotheses_orders import PAD, natural, orders
from emulator.verify.hypotheses_rerun import Evidence
from emulator.verify.hypotheses_words import ranks_text, rows_text, verb
from emulator.verify.rows import locate, spans
from emulator.verify.scene import Diagnosis


@dataclass
class _Moved:
    """One wrong rank: its wrong rows and the rows of the reference whose values they hold (PAD: padding). All are token
    numbers."""

    rank: int
    rows: list[int]
    sources: list[int]

    @property
    def offsets(self) -> set[int]:
        return {s - r for r, s in zip(self.rows, self.sources) if s != PAD}

    @property
    def real(self) -> list[int]:
        return [s for s in self.sources if s != PAD]


def named_order(evidence: Evidence) -> Diagnosis | None:
    """The rows of all ranks stand in an order that has a name."""
    tokens, moved = evidence.tokens, _moved(evidence)
    if (
        not moved
        or evidence.layout.kind != "token"
        or evidence.mesh.tp != tokens.parts
        or (evidence.is_local and tokens.per == 1)
    ):
        return None
    if sum(len(m.real) for m in moved) < 2:
        return None
    for name, order in orders(tokens, local=evidence.is_local):
        if all(_is_order(evidence, order, rank) for rank in evidence.ranks):
            return Diagnosis(
                "rows_permuted",
                f"The rows are the right ones in another order: {name}. {_example(moved[0])}",
                {"order": name, "ranks": [m.rank for m in moved]},
            )
    return None


def rotated(evidence: Evidence) -> Diagnosis | None:
    """All rows are shifted by k, and those of one end stand at the other."""
    moved, tokens = _moved(evidence), evidence.tokens
    if not moved or evidence.layout.kind != "token" or (evidence.is_local and tokens.per == 1):
        return None
    for k in sorted(set().union(*(m.offsets for m in moved)), key=abs):
        around = [(i + k) % tokens.real for i in range(tokens.real)]
        windows = k % tokens.per == 0 and tokens.per > 1  # an order of whole windows has its own name
        if not windows and all(_is_order(evidence, around, rank) for rank in evidence.ranks):
            text = f"Rows are shifted by {k:+d}, around the end. {_example(moved[0])}"
            return Diagnosis("window_shift", text, {"shifts": [k], "ranks": {str(m.rank): m.sources for m in moved}})
    return None


def window_shift(evidence: Evidence) -> Diagnosis | None:
    """The wrong rows are other rows of the reference: another rank's window, or a shift."""
    moved = _moved(evidence)
    if not moved or not any(m.real for m in moved):
        return None
    if any(len(m.offsets) > 1 for m in moved) and _once(evidence, moved):
        return None  # the same rows in another order
    told: dict[str, list[int]] = {}
    for m in moved:
        what = f"the values of {rows_text(m.real)}{_whose(evidence, m)}" if m.real else "padding"
        pads = len(m.sources) - len(m.real)
        more = f" and {pads} row{'s' if pads > 1 else ''} of padding" if pads and m.real else ""
        told.setdefault(f"{what}{more} in place of {rows_text(m.rows)}", []).append(m.rank)
    texts = [f"{ranks_text(r, evidence.mesh.size)} {verb(r, 'hold')} {what}" for what, r in told.items()]
    shifts = sorted(set().union(*(m.offsets for m in moved)))
    shift = f"Rows are shifted by {shifts[0]:+d}. " if len(shifts) == 1 else ""
    return Diagnosis(
        "window_shift",
        f"{shift}{'; '.join(texts[:4])}{'; ...' if len(texts) > 4 else ''}.",
        {"shifts": shifts, "ranks": {str(m.rank): m.sources for m in moved}},
    )


def rows_permuted(evidence: Evidence) -> Diagnosis | None:
    """The same rows in an order without a name."""
    moved = _moved(evidence)
    if not moved or not _once(evidence, moved):
        return None
    who = ranks_text([m.rank for m in moved], evidence.mesh.size)
    unit = "" if evidence.layout.kind == "token" else " (counted from its first row)"
    text = f"{who}: the rows are the right ones in another order. {_example(moved[0])}"
    return Diagnosis("rows_permuted", text[:-1] + f"{unit}.", {"ranks": {str(m.rank): m.sources for m in moved}})


def wrong_row_count(evidence: Evidence) -> Diagnosis | None:
    """Right rows, but more or fewer of them than the layout has."""
    if evidence.layout.kind != "token" or evidence.scene.reference is None:
        return None
    kinds: dict[str, list[int]] = {}
    for rank in evidence.wrong:
        held, want = evidence.held[rank], evidence.want[rank]
        if want is None or not want.numel():
            continue
        if held is None or held.shape[1:] != want.shape[1:] or len(held) == evidence.num_rows(rank) or not len(held):
            return None
        at = _sources(evidence, rank, held)
        kinds.setdefault(_count_kind(evidence, rank, at), []).append(rank)
    if len(kinds) != 1 or not (kind := next(iter(kinds))):
        return None
    ranks = kinds[kind]
    found, meant = len(evidence.scene.found[ranks[0]]), evidence.num_rows(ranks[0])
    who = f"{ranks_text(ranks, evidence.mesh.size)} {verb(ranks, 'hold')}"
    words = {
        "residual_gathered": f"a full value was gathered again, its rows repeat {found // evidence.tokens.real} times",
        "not_sliced": "these are all rows (full-token), not its own (local-token)",
        "not_gathered": "these are the rows of one rank only, not gathered over the tp group",
        "pad_missing": "padding is missing",
        "pad_leaked": "the padding rows behind them were not removed",
    }
    text = f"{who} {found} row{'s' if found != 1 else ''} where {meant} were meant: {words[kind]}."
    if evidence.op == "all_gather" and kind == "not_sliced":
        kind = "residual_gathered"
    return Diagnosis(kind, text, {"rows": found, "right_rows": meant, "ranks": ranks})


def feature_slice(evidence: Evidence) -> Diagnosis | None:
    """A slice of features where a slice of tokens was meant, or the reverse."""
    reference, size = evidence.scene.reference, evidence.mesh.tp
    if reference is None or evidence.layout.kind != "token" or evidence.partial_axes or size == 1:
        return None
    ranks = [r for r in evidence.wrong if (w := evidence.want[r]) is not None and w.numel()]
    for dim in range(reference.dim()):
        whole, words = reference, f"a slice of features (dim {dim}) of all tokens"
        if dim == 0:
            whole, words = pad_rows(reference, 0, evidence.tokens.padded), "all features of its own tokens"
        if whole.shape[dim] % size or not ranks:
            continue
        shards = whole.chunk(size, dim)
        if not all(_same(evidence, r, shards[evidence.mesh.index("tp", r)]) for r in ranks):
            continue
        meant = "its own rows" if evidence.is_local else f"{evidence.layout}"
        text = f"{ranks_text(ranks, evidence.mesh.size)} {verb(ranks, 'hold')} {words} where {meant} was meant."
        return Diagnosis("feature_slice", text, {"dim": dim, "ranks": ranks})
    return None


# --- where rows come from --------------------------------------------------------------------------------------------


def _moved(evidence: Evidence) -> list[_Moved]:
    """What the wrong rows of every wrong rank hold; empty when some hold nothing known, or when that proves nothing."""
    if evidence.layout.kind not in ("token", "rows") or not evidence.all_compared():
        return []
    found = []
    for rank, held, want in evidence.wrong_ranks():
        if held.dtype == torch.bool or (not held.is_floating_point() and held.unique().numel() < 3):
            return []
        wrong = wrong_rows(evidence, rank, held, want)
        if not wrong or (not held[wrong].any()):
            return []
        at = _sources(evidence, rank, held)
        sources = [at[i] for i in wrong]
        if any(s is None for s in sources):
            return []
        found.append(_Moved(rank, [evidence.start(rank) + i for i in wrong], [s for s in sources if s is not None]))
    return found if any(m.real for m in found) else []


def _sources(evidence: Evidence, rank: int, held: Tensor) -> list[int | None]:
    """The row of the reference that each row is; PAD for padding, None for none of them."""
    pool = _pool(evidence, rank)
    if pool is None or not len(pool) or pool.shape[1:] != held.shape[1:]:
        return [None] * len(held)
    at = locate(held, pool, evidence.start(rank), evidence.tolerance(rank))
    pads = _is_padding(held)
    return [PAD if pad else i for i, pad in zip(at, pads)]


def _pool(evidence: Evidence, rank: int) -> Tensor | None:
    if evidence.layout.kind != "token" or evidence.shares:
        return evidence.want[rank]
    reference = evidence.scene.reference
    return None if reference is None else evidence.share(reference, rank, window=False)


def _is_padding(rows: Tensor) -> list[bool]:
    flat = rows.reshape(len(rows), math.prod(rows.shape[1:]))
    return (flat.isnan() if rows.is_floating_point() else flat == -1).all(-1).tolist()


def wrong_rows(evidence: Evidence, rank: int, held: Tensor, want: Tensor) -> list[int]:
    return (~evidence.tolerance(rank).close_rows(held, want)).nonzero().flatten().tolist()


def _is_order(evidence: Evidence, order: list[int], rank: int) -> bool:
    """Whether a rank's rows are those of an order, by value."""
    held, want, pool = evidence.held[rank], evidence.want[rank], _pool(evidence, rank)
    if want is None or pool is None or held is None or not want.numel():
        return True
    per, index = evidence.tokens.per, evidence.mesh.index("tp", rank)
    mine = order[index * per : (index + 1) * per] if evidence.is_local else order
    if len(held) < len(want) or len(mine) < len(want):
        return False
    pads = [i for i, token in enumerate(mine[: len(want)]) if token == PAD]
    known = [i for i, token in enumerate(mine[: len(want)]) if token != PAD]
    right = pool[[mine[i] for i in known]]
    return all(_is_padding(held[pads])) and bool(evidence.tolerance(rank).close_rows(held[known], right).all())


def _whose(evidence: Evidence, moved: _Moved) -> str:
    """Which rank's window it is, where the rows are the beginning of one."""
    if not evidence.is_local or not moved.real:
        return ""
    offset = moved.real[0] - moved.rows[moved.sources.index(moved.real[0])]
    first = evidence.start(moved.rank) + offset
    for member in evidence.mesh.members("tp", moved.rank):
        start, end = evidence.window(member)
        if first == start and start < end and len(moved.offsets) == 1:
            return f" (rank {member}'s window)"
    return ""


def _once(evidence: Evidence, moved: list[_Moved]) -> bool:
    """Whether no row of the reference is held twice: by a rank, or by a group of ranks with their own windows."""
    for members in evidence.mesh.groups("tp") or [[0]]:
        mine = [m for m in moved if m.rank in members]
        for part in [mine] if evidence.is_local else [[m] for m in mine]:
            same = _same_as(evidence, part[0].rank) if part else []
            held = Counter(same[s] for m in part for s in m.real)
            missing = Counter(same[row] for m in part for row in m.rows)
            if not held <= missing:
                return False
    return True


def _same_as(evidence: Evidence, rank: int) -> list[int]:
    """Of every row of the reference, the first that equals it: tokens may be the same."""
    pool = _pool(evidence, rank)
    assert pool is not None
    flat = pool.reshape(len(pool), -1).double()
    prints = flat @ torch.cos(torch.arange(flat.shape[1], dtype=torch.float64) * 1.7)
    close = torch.isclose(prints.unsqueeze(1), prints.unsqueeze(0), 1e-9, 1e-12)
    return close.int().argmax(1).tolist()


def _example(moved: _Moved) -> str:
    pads = PAD in moved.sources
    return (
        f"Rank {moved.rank} holds {spans(moved.real)}{' and padding' if pads else ''} in place of {spans(moved.rows)}."
    )


def _count_kind(evidence: Evidence, rank: int, at: list[int | None]) -> str:
    real, tokens = evidence.tokens.real, evidence.tokens
    whole, padded = list(range(real)), natural(tokens)
    if len(at) >= 2 * real and (at == whole * (len(at) // real) or at == padded * (len(at) // tokens.padded)):
        return "residual_gathered"
    if evidence.is_local:
        own = list(range(*evidence.window(rank)))
        return "not_sliced" if at in (whole, padded) else "pad_missing" if at == own else ""
    if at == padded:
        return "pad_leaked"
    for index in range(tokens.parts):
        start, end = tokens.window(index)
        window = [*range(start, end), *[PAD] * (tokens.per - (end - start))]
        if at in (window, window[: end - start]):
            return "not_gathered"
    return ""


# --- helpers ---------------------------------------------------------------------------------------------------------


def _same(evidence: Evidence, rank: int, value: Tensor) -> bool:
    held = evidence.held[rank]
    return held is not None and held.shape == value.shape and evidence.close(held, value, rank)
