"""Hypotheses about positions and ids: local where global ones were meant, shifted, or those of other tokens."""

from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor

from emulator.verify.hypotheses_rerun import Evidence
from emulator.verify.hypotheses_words import ranks_text, verb
from emulator.verify.rows import spans
from emulator.verify.scene import Diagnosis

OFFSETS = (1, -1, 2, -2)


def wrong_positions(evidence: Evidence) -> Diagnosis | None:
    """Other positions give the right value (or the one found)."""
    at = evidence.index_of("positions")
    if at is None:
        return None
    values = evidence.operand(at)
    for words, used, other in _positions(evidence, values):
        if all(map(torch.equal, other, values)):
            continue
        result = evidence.run(evidence.replaced(at, other))
        if evidence.faithful and evidence.is_right(result):
            rank = next(r for r in evidence.compared or evidence.wrong if not torch.equal(other[r], values[r]))
            text = (
                f"{ranks_text(evidence.wrong, evidence.mesh.size)} {verb(evidence.wrong, 'use')} {used}: rank {rank} "
                f"has {_listed(values[rank])}; {words}, {_listed(other[rank])}, give the right values."
            )
            return Diagnosis("wrong_positions", text, {"ranks": evidence.wrong, "right": words, "used": used})
        if evidence.healthy and evidence.gives_found(result):
            text = (
                f"{ranks_text(evidence.wrong, evidence.mesh.size)} {verb(evidence.wrong, 'use')} {words} in "
                "place of the positions given."
            )
            return Diagnosis("wrong_positions", text, {"ranks": evidence.wrong, "used": words})
    return None


def local_ids(evidence: Evidence) -> Diagnosis | None:
    """Ids that are local where global ones were meant, or the reverse: they differ by where the rank's part starts."""
    if not evidence.all_compared() or any(h.is_floating_point() for _, h, _ in evidence.wrong_ranks()):
        return None
    for axis, starts in _starts(evidence):
        for told, sign, lost in (
            ("local ids where global ones were meant", "+", False),
            ("local ids where global ones were meant, and those before their part are lost", "+", True),
            ("global ids where local ones were meant", "-", False),
        ):
            shown = [
                (starts[rank], evidence.sorted(held), _shifted(want.long(), starts[rank], sign, lost))
                for rank, held, want in evidence.wrong_ranks()
            ]
            same = all(start and torch.equal(held, evidence.sorted(value)) for start, held, value in shown)
            if same and any((value >= 0).any() for _, _, value in shown):
                ranks = evidence.compared
                text = (
                    f"{ranks_text(ranks, evidence.mesh.size)} {verb(ranks, 'hold')} {told}: found {sign} "
                    f"{starts[ranks[0]]} (where rank {ranks[0]}'s part begins on {axis}) is expected."
                )
                return Diagnosis("local_ids", text, {"ranks": ranks, "starts": [starts[r] for r in ranks]})
    return None


# --- candidates ---


def _positions(evidence: Evidence, values: list[Tensor]) -> Iterator[tuple[str, str, list[Tensor]]]:
    """(what they are, what the present ones are if these are right, positions by rank)."""
    starts = [evidence.window(r)[0] for r in evidence.ranks]
    yield (
        "global positions",
        "local positions where global ones were meant",
        [moved(v, s) for v, s in zip(values, starts)],
    )
    yield (
        "local positions",
        "global positions where local ones were meant",
        [moved(v, -s) for v, s in zip(values, starts)],
    )
    for k in OFFSETS:
        yield f"positions shifted by {k:+d}", f"positions shifted by {-k:+d}", [moved(v, k) for v in values]
    ids = evidence.scene.ids
    if all(i is not None and len(i) == len(v) for i, v in zip(ids, values)):
        tokens = [i.to(v.dtype) for i, v in zip(ids, values) if i is not None]
        yield "the rows' token ids", "positions that are not those of their tokens", tokens
    counted = [torch.arange(len(v), dtype=v.dtype) for v in values]
    yield "positions that count each rank's rows from 0", "positions that do not begin at 0", counted
    for member in range(evidence.mesh.tp if len({len(v) for v in values}) == 1 else 0):
        same = [values[evidence.mesh.members("tp", r)[member]] for r in evidence.ranks]
        yield f"the positions of rank {member}", f"other positions than rank {member}", same
    whole = [torch.cat([values[m] for m in evidence.mesh.members("tp", r)]) for r in evidence.ranks]
    if all(len(v) == evidence.tokens.per for v in values):
        real = evidence.tokens.real
        yield "those of all tokens", "their own window's positions on all rows", [w[:real] for w in whole]
    order = [torch.roll(w, 1)[s : s + len(v)] for w, s, v in zip(whole, starts, values)]
    yield "the positions of the tokens before", "the positions of the next tokens", order
    yield "reversed positions", "reversed positions", [v.flip(0) for v in values]
    lens, keys = evidence.index_of("query_lens"), evidence.index_of("kv_lens")
    if lens is not None and keys is not None:
        yield (
            "positions by the requests' lengths",
            "positions that contradict the requests' lengths",
            [_by_lengths(q, k, v) for q, k, v in zip(evidence.operand(lens), evidence.operand(keys), values)],
        )


def _starts(evidence: Evidence) -> Iterator[tuple[str, list[int]]]:
    """(axis, first id of every rank's part): its token window, or its block of experts."""
    yield "tp", [evidence.window(r)[0] for r in evidence.ranks]
    largest = [int(w.max()) for w in evidence.want if w is not None and w.numel()]
    logits = evidence.operand(0)[0] if evidence.op == "moe_topk" else None
    if logits is not None and evidence.mesh.ep > 1 and max(largest, default=0) < logits.shape[1]:
        held = logits.shape[1] // evidence.mesh.ep
        yield "ep", [held * evidence.mesh.index("ep", r) for r in evidence.ranks]


# --- helpers ---


def moved(values: Tensor, by: int) -> Tensor:
    """Entries plus `by`; padding (-1) stays."""
    return torch.where(values < 0, values, values + by)


def _shifted(want: Tensor, start: int, sign: str, lost: bool) -> Tensor:
    """What was found if ids differ by where the part starts; lost: those before it are none (-1)."""
    if sign == "-":
        return moved(want, start)
    return torch.where(want >= start, want - start, -1) if lost else moved(want, -start)


def _by_lengths(query_lens: Tensor, kv_lens: Tensor, like: Tensor) -> Tensor:
    """Position of every packed row: kv length - query length + row of the request."""
    rows = [
        torch.arange(max(k - q, 0), max(k - q, 0) + max(q, 0)) for q, k in zip(query_lens.tolist(), kv_lens.tolist())
    ]
    return torch.cat(rows).to(like.dtype) if rows else like


def _listed(values: Tensor) -> str:
    numbers = [n for n in values.tolist() if n >= 0]
    if numbers and all(b == a + 1 for a, b in pairwise(numbers)):
        return spans(numbers)
    return ", ".join(map(str, numbers[:6])) + (", ..." if len(numbers) > 6 else "")
