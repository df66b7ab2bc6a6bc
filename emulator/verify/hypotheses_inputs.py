"""Hypotheses about what a node was told beside its activations: positions, slots, lengths, masks, ids and constants."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from emulator.ops.registry import R
from emulator.verify.hypotheses_positions import OFFSETS, moved
from emulator.verify.hypotheses_rerun import Evidence
from emulator.verify.hypotheses_words import ranks_text, rows_text
from emulator.verify.rows import Tolerance, locate
from emulator.verify.scene import Diagnosis

_EPS = (0.0, 1e-12, 1e-10, 1e-8, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3)


def ranks_disagree(evidence: Evidence) -> Diagnosis | None:
    """A whole-number operand that all ranks share is another on some ranks; with one rank's the value is right."""
    if not evidence.faithful:
        return None
    for at, layout in evidence.tensors:
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


def wrong_numbers(evidence: Evidence) -> Diagnosis | None:
    """A whole-number or mask operand, the same wrong one on all ranks: what it should be gives the right value."""
    if not evidence.faithful:
        return None
    if evidence.op == "cache_write" and (found := _slots(evidence)):
        return found
    for at, _ in evidence.tensors:
        values, name = evidence.operand(at), evidence.name_of(at)
        if values[0].is_floating_point() or name == "positions" or not values[0].dim():
            continue
        for words, other in _numbers(evidence, name, values):
            if evidence.is_right(evidence.run(evidence.replaced(at, other))):
                ranks = [r for r in evidence.ranks if not torch.equal(other[r], values[r])]
                mine, right = values[ranks[0]], other[ranks[0]]
                where = f"{len(mine)} entries for {len(right)} rows"
                if mine.shape == right.shape:
                    where = rows_text((mine != right).nonzero()[:, 0].unique().tolist(), "entry")
                where = f"{ranks_text(ranks, evidence.mesh.size).lower()}, {where}"
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
        if not (found := evidence.used_and_right(own, eps, result)):
            continue
        used, right = found
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
            if not (found := evidence.used_and_right(constant, other, result)):
                continue
            used, right = found
            text = f"{evidence.op} is computed with {name} = {_value(used)}; {_value(right)} gives the right values."
            return Diagnosis("wrong_constant", text, {"argument": name, "used": used, "right": right})
    return None


# --- candidates ------------------------------------------------------------------------------------------------------


def _numbers(evidence: Evidence, name: str, values: list[Tensor]) -> Iterator[tuple[str, list[Tensor]]]:
    """(words, operand by rank) of what a whole-number or mask operand may have been meant to be."""
    ids = evidence.scene.ids
    if values[0].dtype == torch.bool:
        if all(i is not None and len(i) == len(v) for i, v in zip(ids, values)):
            yield "the mask of the rows' tokens", [i >= 0 for i in ids if i is not None]
        rows = [len(a[0]) if isinstance(a[0], Tensor) and a[0].dim() else 0 for a in evidence.scene.operands]
        if all(n == evidence.tokens.per for n in rows):
            windows = [evidence.window(r) for r in evidence.ranks]
            yield "each rank's own part", [torch.arange(n) < end - start for n, (start, end) in zip(rows, windows)]
        yield "all rows", [torch.ones_like(v) for v in values]
        return
    starts = [evidence.window(r)[0] for r in evidence.ranks]
    if name == "ids":
        yield "ids plus where the rank's part begins", [moved(v, s) for v, s in zip(values, starts)]
        real = [max(0, min(evidence.tokens.real - s, len(v))) for v, s in zip(values, starts)]
        if evidence.op == "moe_dispatch" and all(len(v) == evidence.tokens.per for v in values):
            masked = [torch.cat((v[:n], torch.full_like(v[n:], -1))) for v, n in zip(values, real)]
            yield "padding rows left out", masked
    lens, keys = evidence.index_of("query_lens"), evidence.index_of("kv_lens")
    if name == "kv_lens" and lens is not None:
        yield "the query lengths", evidence.operand(lens)
    if name == "query_lens" and keys is not None:
        yield "the key lengths", evidence.operand(keys)
    for k in OFFSETS:
        yield f"{k:+d} on every entry", [moved(v, k) for v in values]
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
    elif evidence.op in ("mla_sparse_attention", "multihead_latent_attention") and name == "scale":
        given = evidence.argument_names()[: len(evidence.node.args)]  # the rest are left at their defaults
        named = {n: evidence.operand(i)[0] for i, n in enumerate(given)}
        nope, rank = named["w_uk_t"].shape[1:]
        rope = named["cache"].shape[1] - rank
        widths = (nope + rope, nope, rank + rope, rank, named["w_uv"].shape[2], rope)
        yield from dict.fromkeys(w**-0.5 for w in widths if abs(w**-0.5 - constant) > 1e-9)
        yield 1.0


def _slots(evidence: Evidence) -> Diagnosis | None:
    """cache_write: the rows stand in other slots than in the reference."""
    reference = evidence.scene.reference
    cache, rows, slots, start = evidence.scene.operands[evidence.wrong[0]]
    if reference is None or not len(rows):
        return None
    written = rows[:, start : start + cache.shape[1]]
    right = locate(written, reference, len(reference), Tolerance(0.0, evidence.scene.tolerance))
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
    has = "has" if len(ranks) == 1 else "have"
    text = f"{ranks_text(ranks, evidence.mesh.size)} {has} another `{name}` than the other ranks: {where}{more}."
    return Diagnosis(kind, text, {"operand": name, "ranks": ranks})


def _value(constant: Any) -> str:
    return f"{constant:.6g}" if isinstance(constant, float) else str(constant)
