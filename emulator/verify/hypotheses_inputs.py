"""Hypotheses about what a node was told beside its activations: positions, slots, lengths, masks, ids and constants."""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from emulator.ops.registry import R
from emulator.verify.hypotheses_rerun import Evidence
from emulator.verify.hypotheses_words import ranks_text, rows_text, verb
from emulator.verify.rows import Tolerance, locate, spans
from emulator.verify.scene import Diagnosis

_EPS = (0.0, 1e-12, 1e-10, 1e-8, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3)
_OFFSETS = (1, -1, 2, -2)


def ranks_disagree(evidence: Evidence) -> Diagnosis | None:
    """A whole-number operand that all ranks share is another on some ranks; with one rank's the value is right."""
    if not evidence.faithful:
        return None
    for at, layout in evidence.operand_layouts():
        values = evidence.operand(at)
        if values[0].is_floating_point() or layout.kind not in ("batch", "token") or layout.on("tp") != R:
            continue
        if all(torch.equal(v, values[0]) for v in values):
            continue
        for right in values:
            if evidence.gives_expected(evidence.run(evidence.replaced(at, [right] * len(values)))):
                ranks = [r for r in evidence.ranks if not torch.equal(values[r], right)]
                return _differs(evidence, at, ranks, values[ranks[0]], right)
    return None


def wrong_positions(evidence: Evidence) -> Diagnosis | None:
    """Other positions give the right value (or the one found)."""
    at = evidence.index_of("positions")
    if at is None:
        return None
    values = evidence.operand(at)
    for words, used, other in _positions(evidence, values):
        if any(o.shape != v.shape for o, v in zip(other, values)) or all(map(torch.equal, other, values)):
            continue
        result = evidence.run(evidence.replaced(at, other))
        if evidence.faithful and evidence.gives_expected(result):
            rank = next(r for r in evidence.compared or evidence.scene.wrong if not torch.equal(other[r], values[r]))
            real = max(len(evidence.want[rank] if evidence.want[rank] is not None else []), 1)  # type: ignore[arg-type]
            text = (
                f"{ranks_text(evidence.scene.wrong, evidence.mesh.size)} {verb(evidence.scene.wrong, 'use')} {used}: "
                f"rank {rank} has positions {_listed(values[rank][:real])}, and {_listed(other[rank][:real])} give the "
                "right values."
            )
            return Diagnosis("wrong_positions", text, {"ranks": evidence.scene.wrong, "right": words, "used": used})
        if evidence.healthy and evidence.gives_found(result):
            text = (
                f"{ranks_text(evidence.scene.wrong, evidence.mesh.size)} {verb(evidence.scene.wrong, 'use')} {words} in "
                "place of the positions given."
            )
            return Diagnosis("wrong_positions", text, {"ranks": evidence.scene.wrong, "used": words})
    return None


def local_ids(evidence: Evidence) -> Diagnosis | None:
    """Ids that are local where global ones were meant, or the reverse: they differ by where the rank's part starts."""
    if not evidence.all_compared() or any(h.is_floating_point() for _, h, _ in evidence.wrong_ranks()):
        return None
    for axis, starts in _starts(evidence):
        for sign, told in (
            (1, "local ids where global ones were meant"),
            (-1, "global ids where local ones were meant"),
        ):
            if all(
                starts[rank] and _shifted_equal(evidence, held, want, -sign * starts[rank])
                for rank, held, want in evidence.wrong_ranks()
            ):
                ranks = evidence.compared
                text = (
                    f"{ranks_text(ranks, evidence.mesh.size)} {verb(ranks, 'hold')} {told}: found "
                    f"{'+' if sign > 0 else '-'} {starts[ranks[0]]} (where rank {ranks[0]}'s part begins on {axis}) is "
                    "expected."
                )
                return Diagnosis("local_ids", text, {"ranks": ranks, "starts": [sign * starts[r] for r in ranks]})
    return None


def wrong_numbers(evidence: Evidence) -> Diagnosis | None:
    """A whole-number or mask operand, the same wrong one on all ranks: what it should be gives the right value."""
    if not evidence.faithful:
        return None
    if evidence.op == "cache_write" and (found := _slots(evidence)):
        return found
    for at, _ in evidence.operand_layouts():
        values, name = evidence.operand(at), evidence.name_of(at)
        if values[0].is_floating_point() or name == "positions" or not values[0].dim():
            continue
        for words, other in _numbers(evidence, name, values):
            if evidence.gives_expected(evidence.run(evidence.replaced(at, other))):
                ranks = [r for r in evidence.ranks if not torch.equal(other[r], values[r])]
                entries = (other[ranks[0]] != values[ranks[0]]).nonzero()[:, 0].unique().tolist()
                where = f"{ranks_text(ranks, evidence.mesh.size).lower()}, {rows_text(entries, 'entry')}"
                if name == "ids" and "part begins" in words:
                    kind, text = "local_ids", f"Operand `ids` holds local ids where global ones were meant: {words}"
                elif words.startswith("padding"):
                    kind, text = "pad_leaked", f"Operand `{name}` takes padding for tokens: {words}"
                else:
                    kind, text = "wrong_metadata", f"Operand `{name}` is wrong ({where}): {words}"
                return Diagnosis(kind, f"{text} would give the right values.", {"operand": name, "right": words})
    return None


def wrong_eps(evidence: Evidence) -> Diagnosis | None:
    """A norm with another eps gives the right value (or the one found)."""
    at = evidence.index_of("eps")
    if at is None:
        return None
    own = float(evidence.operand(at)[0])
    for eps in _EPS:
        if eps == own:
            continue
        result = evidence.run(evidence.replaced(at, [eps] * evidence.mesh.size))
        if evidence.faithful and evidence.gives_expected(result):
            used, right = own, eps
        elif evidence.healthy and evidence.gives_found(result):
            used, right = eps, own
        else:
            continue
        text = f"{evidence.op} is computed with eps {used:g}; eps {right:g} gives the right values."
        return Diagnosis("wrong_eps", text, {"eps": used, "right_eps": right})
    return None


def wrong_constant(evidence: Evidence) -> Diagnosis | None:
    """Another constant argument gives the right value (or the one found)."""
    for at, constant in enumerate(evidence.scene.operands[0]):
        if isinstance(constant, Tensor):
            continue
        name = evidence.name_of(at)
        for other in _constants(evidence, name, constant):
            result = evidence.run(evidence.replaced(at, [other] * evidence.mesh.size))
            if evidence.faithful and evidence.gives_expected(result):
                used, right = constant, other
            elif evidence.healthy and evidence.gives_found(result):
                used, right = other, constant
            else:
                continue
            text = f"{evidence.op} is computed with {name} = {_value(used)}; {_value(right)} gives the right values."
            return Diagnosis("wrong_constant", text, {"argument": name, "used": used, "right": right})
    return None


# --- candidates ------------------------------------------------------------------------------------------------------


def _positions(evidence: Evidence, values: list[Tensor]) -> Iterator[tuple[str, str, list[Tensor]]]:
    """(what they are, what the present ones are if these are right, positions by rank)."""
    starts = [evidence.window(r)[0] for r in evidence.ranks]
    yield (
        "global positions",
        "local positions where global ones were meant",
        [_moved(v, s) for v, s in zip(values, starts)],
    )
    yield (
        "local positions",
        "global positions where local ones were meant",
        [_moved(v, -s) for v, s in zip(values, starts)],
    )
    ids = evidence.scene.ids
    if all(i is not None and len(i) == len(v) for i, v in zip(ids, values)):
        tokens = [i.to(v.dtype) for i, v in zip(ids, values) if i is not None]
        yield "the rows' token ids", "positions that are not those of their tokens", tokens
    counted = [torch.arange(len(v), dtype=v.dtype) for v in values]
    yield "positions that count each rank's rows from 0", "positions that do not begin at 0", counted
    for k in _OFFSETS:
        yield f"positions shifted by {k:+d}", f"positions shifted by {-k:+d}", [_moved(v, k) for v in values]
    for member in range(evidence.mesh.tp if len({len(v) for v in values}) == 1 else 0):
        same = [values[evidence.mesh.members("tp", r)[member]] for r in evidence.ranks]
        yield f"the positions of rank {member}", f"other positions than rank {member}", same
    whole = [torch.cat([values[m] for m in evidence.mesh.members("tp", r)]) for r in evidence.ranks]
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


def _numbers(evidence: Evidence, name: str, values: list[Tensor]) -> Iterator[tuple[str, list[Tensor]]]:
    """(words, operand by rank) of what a whole-number or mask operand may have been meant to be."""
    ids = evidence.scene.ids
    if values[0].dtype == torch.bool:
        if all(i is not None and len(i) == len(v) for i, v in zip(ids, values)):
            yield "the mask of the rows' tokens", [i >= 0 for i in ids if i is not None]
        yield "all rows", [torch.ones_like(v) for v in values]
        return
    starts = [evidence.window(r)[0] for r in evidence.ranks]
    if name == "ids":
        yield "ids plus where the rank's part begins", [_moved(v, s) for v, s in zip(values, starts)]
        real = [max(0, min(evidence.tokens.real - s, len(v))) for v, s in zip(values, starts)]
        if evidence.op == "moe_dispatch" and all(len(v) == evidence.tokens.per for v in values):
            masked = [torch.cat((v[:n], torch.full_like(v[n:], -1))) for v, n in zip(values, real)]
            yield "padding rows left out", masked
    lens, keys = evidence.index_of("query_lens"), evidence.index_of("kv_lens")
    if name == "kv_lens" and lens is not None:
        yield "the query lengths", evidence.operand(lens)
    if name == "query_lens" and keys is not None:
        yield "the key lengths", evidence.operand(keys)
    for k in _OFFSETS:
        yield f"{k:+d} on every entry", [_moved(v, k) for v in values]
    if values[0].dim() == 1 and len(values[0]) > 1:
        yield "the entries in reversed order", [v.flip(0) for v in values]
        for k in (1, -1):
            yield f"the entries moved by {k:+d}", [v.roll(k) for v in values]


def _constants(evidence: Evidence, name: str, constant: Any) -> Iterator[Any]:
    if isinstance(constant, bool):
        yield not constant
    elif name == "start":
        rotated, x = evidence.index_of("inv_freq"), evidence.operand(0)[0]
        if rotated is not None:
            yield from {0, x.shape[-1] - 2 * len(evidence.operand(rotated)[0])} - {constant}
    elif evidence.op == "mla_sparse_attention" and name == "scale":
        named = {n: evidence.operand(i)[0] for i, n in enumerate(evidence.argument_names())}
        nope, rank = named["w_uk_t"].shape[1:]
        rope = named["cache"].shape[1] - rank
        widths = (nope + rope, nope, rank + rope, rank, named["w_uv"].shape[2], rope)
        yield from dict.fromkeys(w**-0.5 for w in widths if abs(w**-0.5 - constant) > 1e-9)
        yield 1.0


def _starts(evidence: Evidence) -> Iterator[tuple[str, list[int]]]:
    """(axis, first id of every rank's part): its token window, or its block of experts."""
    yield "tp", [evidence.window(r)[0] for r in evidence.ranks]
    largest = [int(w.max()) for w in evidence.want if w is not None and w.numel()]
    logits = evidence.operand(0)[0] if evidence.op == "moe_topk" else None
    if logits is not None and evidence.mesh.ep > 1 and max(largest, default=0) < logits.shape[1]:
        held = logits.shape[1] // evidence.mesh.ep
        yield "ep", [held * evidence.mesh.index("ep", r) for r in evidence.ranks]


def _slots(evidence: Evidence) -> Diagnosis | None:
    """cache_write: the rows stand in other slots than in the reference."""
    reference = evidence.scene.reference
    cache, rows, slots, start = evidence.scene.operands[evidence.scene.wrong[0]]
    if reference is None or not len(rows):
        return None
    written = rows[:, start : start + cache.shape[1]]
    right = locate(written, reference, -1, Tolerance(0.0, evidence.scene.tolerance))
    if any(i is None for i in right) or len(set(right)) < len(right):
        return None
    moved = [i for i, slot in enumerate(slots.tolist()) if slot != right[i]]
    if not moved:
        return None
    first = moved[0]
    text = (
        f"Operand `slots` is wrong for {rows_text(moved)}: row {first} is written to slot {slots[first].item()}, the "
        f"reference has it in slot {right[first]}."
    )
    return Diagnosis("wrong_metadata", text, {"operand": "slots", "rows": moved, "right": right})


# --- helpers ---------------------------------------------------------------------------------------------------------


def _differs(evidence: Evidence, at: int, ranks: list[int], found: Tensor, right: Tensor) -> Diagnosis:
    name = evidence.name_of(at)
    if found.shape == right.shape:
        entries = (found != right).nonzero()
        first = entries[0].tolist()
        index = ", ".join(map(str, first))
        where = f"{name}[{index}] is {found[tuple(first)].item()} where {right[tuple(first)].item()} was meant"
        more = f", and {len(entries) - 1} more differ" if len(entries) > 1 else ""
    else:
        where, more = f"its shape is {list(found.shape)} where {list(right.shape)} was meant", ""
    kind = "wrong_positions" if name == "positions" else "wrong_metadata"
    text = (
        f"{ranks_text(ranks, evidence.mesh.size)} {verb(ranks, 'have')} another `{name}` than the other ranks: "
        f"{where}{more}."
    ).replace("haves", "has")
    return Diagnosis(kind, text, {"operand": name, "ranks": ranks})


def _moved(values: Tensor, by: int) -> Tensor:
    """Entries plus `by`; padding (-1) stays."""
    return torch.where(values < 0, values, values + by)


def _shifted_equal(evidence: Evidence, held: Tensor, want: Tensor, by: int) -> bool:
    return torch.equal(evidence.sorted(held), evidence.sorted(_moved(want.long(), by)))


def _by_lengths(query_lens: Tensor, kv_lens: Tensor, like: Tensor) -> Tensor:
    """Position of every packed row: kv length - query length + row of the request."""
    rows = [
        torch.arange(max(k - q, 0), max(k - q, 0) + max(q, 0)) for q, k in zip(query_lens.tolist(), kv_lens.tolist())
    ]
    return torch.cat(rows).to(like.dtype) if rows else like


def _listed(values: Tensor) -> str:
    numbers = values.tolist()
    if all(b == a + 1 for a, b in pairwise(numbers)):
        return spans(numbers)
    return ", ".join(map(str, numbers[:6])) + (", ..." if len(numbers) > 6 else "")


def _value(constant: Any) -> str:
    return f"{constant:.6g}" if isinstance(constant, float) else str(constant)
