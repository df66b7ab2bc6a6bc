"""Hypotheses about values in the right place: stale rows, NaN, constant factors."""

import torch
from torch import Tensor

from emulator.layout.placement import Layout
from emulator.ops.registry import LOCAL
from emulator.verify.hypotheses_rerun import Evidence
from emulator.verify.hypotheses_rows import wrong_rows
from emulator.verify.hypotheses_words import constant_factor, factor_text, ranks_text, rows_text, verb
from emulator.verify.scene import Diagnosis


def stale_rows(evidence: Evidence) -> Diagnosis | None:
    """All wrong rows hold another known value."""
    if not evidence.all_compared():
        return None
    for name, whole in evidence.scene.related.items():
        rows: dict[int, list[int]] = {}
        for rank, held, want in evidence.wrong_ranks():
            part = evidence.share(whole, rank) if whole.dim() else None
            if part is None or part.shape != held.shape or part.dtype != held.dtype:
                break
            wrong = wrong_rows(evidence, rank, held, want)
            close = evidence.tolerance(rank).close_rows(held[wrong], part[wrong])
            if not close.all() or not held[wrong].any() or held[wrong].isnan().all():
                break
            rows[rank] = [evidence.start(rank) + i for i in wrong]
        else:
            ranks = list(rows)
            unit = "slot" if evidence.layout.kind == "cache" else "row"
            first = rows_text(rows[ranks[0]], unit)
            text = (
                f"{ranks_text(ranks, evidence.mesh.size)} {verb(ranks, 'hold')} another value in {first}"
                f"{f' (rank {ranks[0]})' if len(ranks) > 1 else ''}: that of {name}."
            )
            return Diagnosis("stale_rows", text, {"value": name, "rows": {str(r): v for r, v in rows.items()}})
    return None


def stale_operand(evidence: Evidence) -> Diagnosis | None:
    """With another known value in an operand's place the value is right."""
    if not evidence.faithful:
        return None
    for at, layout in evidence.tensors:
        values = evidence.operand(at)
        if layout.kind != "token" or not any(v.nan_to_num().any() for v in values):
            continue
        for name, whole in evidence.scene.related.items():
            rows = [slice(*evidence.window(r)) if layout.on("tp") == LOCAL else slice(None) for r in evidence.ranks]
            parts = [whole[r] if whole.dim() else whole for r in rows]
            if any(p.shape[1:] != v.shape[1:] or len(p) > len(v) or p.dtype != v.dtype for p, v in zip(parts, values)):
                continue
            filled = [torch.cat((p, v[len(p) :])) for p, v in zip(parts, values)]
            if evidence.gives_expected(evidence.run(evidence.replaced(at, filled))):
                text = f"Operand {evidence.operand_text(at)} is another value than meant: {name} gives the right one."
                return Diagnosis("stale_rows", text, {"operand": at, "right": name})
    return None


def pad_leaked(evidence: Evidence) -> Diagnosis | None:
    """NaN in real rows."""
    rows: dict[int, list[int]] = {}
    for rank, held, want in evidence.wrong_ranks():
        if held.is_floating_point():
            bad = (held.isnan() & ~want.isnan()).reshape(len(held), -1).any(-1).nonzero().flatten().tolist()
            if bad:
                rows[rank] = [evidence.start(rank) + i for i in bad]
    if not rows:
        return None
    ranks = list(rows)
    if evidence.layout.kind == "cache":
        slots = rows_text(rows[ranks[0]], "slot")
        text = f"{ranks_text(ranks, evidence.mesh.size)} did not write {slots}, which should hold rows: they are NaN."
        return Diagnosis("pad_leaked", text, {"slots": {str(r): v for r, v in rows.items()}})
    unit = "token row" if evidence.layout.kind == "token" else "row"
    text = (
        f"{ranks_text(ranks, evidence.mesh.size)} {verb(ranks, 'hold')} NaN in {rows_text(rows[ranks[0]], unit)}"
        f"{f' (rank {ranks[0]})' if len(ranks) > 1 else ''}; {_nan_source(evidence, ranks[0])}."
    )
    return Diagnosis("pad_leaked", text, {"rows": {str(r): v for r, v in rows.items()}})


def scaled(evidence: Evidence) -> Diagnosis | None:
    """found = c * expected with one constant c per rank, on all that differs."""
    factors: dict[int, float] = {}
    if not evidence.all_compared():
        return None
    for rank, held, want in evidence.wrong_ranks():
        if not held.is_floating_point():
            return None
        differ = ~evidence.tolerance(rank).close(held, want)
        factor = constant_factor(held[differ], want[differ], evidence.limits[rank])
        if factor is None:
            return None
        factors[rank] = factor
    ranks, values = list(factors), list(factors.values())
    factor = values[0]
    who = f"{ranks_text(ranks, evidence.mesh.size)} {verb(ranks, 'hold')}"
    where = _where(evidence, ranks[0])
    want = next(want for _, _, want in evidence.wrong_ranks())
    slack = min(0.02, max(1e-6, 4 * evidence.scene.tolerance / float(want[want.isfinite()].abs().max())))
    if any(abs(v - factor) > slack * abs(factor) for v in values):
        words = ", ".join(f"{factor_text(v)} on rank {r}" for r, v in list(factors.items())[:6])
        return Diagnosis("scaled", f"The value is a multiple of the expected one: {words}.", {"factors": values})
    for axis in evidence.axes() if not where else ():
        size = len(evidence.mesh.groups(axis)[0])
        if abs(factor - size) < slack * size:
            text = (
                f"{who} {size} x the expected value, {size} being the size of the {axis} group: summed once too often."
            )
            return Diagnosis("reduced_twice", text, {"factor": size, "group": axis})
        if abs(factor * size - 1) < slack:
            text = f"{who} 1/{size} of the expected value, {size} being the size of the {axis} group: never reduced."
            return Diagnosis("not_reduced", text, {"factor": 1 / size, "group": axis})
    sign = " (the sign is wrong)" if abs(factor + 1) < 1e-6 else ""
    text = f"{who} {factor_text(factor)} x the expected value{where}{sign}."
    return Diagnosis("scaled", text, {"factor": factor})


def _where(evidence: Evidence, rank: int) -> str:
    """Which rows and columns of a rank are wrong, if not all are; zeros and unwritten slots do not count."""
    _, held, want = next(found for found in evidence.wrong_ranks() if found[0] == rank)
    counted = want.isfinite() & (want.abs() > 5 * evidence.limits[rank])
    differ = ~evidence.tolerance(rank).close(held, want) & counted
    unit, where = ("slot" if evidence.layout.kind == "cache" else "row"), ""
    rows, all_rows = _lines(differ, 0), _lines(counted, 0)
    if rows != all_rows:
        where = f" in {rows_text([evidence.start(rank) + i for i in rows], unit)}"
    if held.dim() > 1 and _lines(differ, -1) != _lines(counted, -1):
        where += f" in {rows_text(_lines(differ, -1), 'column')}"
    return f"{where} (rank {rank})" if where and len(evidence.wrong) > 1 else where


def _lines(mask: Tensor, dim: int) -> list[int]:
    """Rows, or columns, that hold a True."""
    return mask.movedim(dim, 0).reshape(mask.shape[dim], -1).any(-1).nonzero().flatten().tolist()


def _nan_source(evidence: Evidence, rank: int) -> str:
    """Which operand of a rank holds NaN, and where."""
    for at, layout in evidence.tensors:
        value = evidence.operand(at)[rank]
        if not value.is_floating_point() or not value.dim() or not value.isnan().any():
            continue
        rows = value.isnan().reshape(len(value), -1).any(-1).nonzero().flatten().tolist()
        unit, what = "row", ""
        if layout.kind == "cache":
            unit, what = "slot", " (slots that nobody wrote)"
        elif layout.kind == "token" and min(rows) >= _num_real(evidence, layout, rank, len(value)):
            what = " (its padding)"
        return f"it comes in by operand `{evidence.name_of(at)}`, with NaN in {rows_text(rows, unit)}{what}"
    return "no operand holds NaN"


def _num_real(evidence: Evidence, layout: Layout, rank: int, rows: int) -> int:
    if rows == evidence.tokens.per and evidence.tokens.per < evidence.tokens.real:
        start, end = evidence.window(rank)
        return end - start
    return evidence.tokens.real
