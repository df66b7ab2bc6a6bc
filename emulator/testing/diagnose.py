"""What a wrong value looks like: compares rows by value and says which rows they are, or how they are off.

Rows are indices of dim 0, in spans "24..48" without the end. Nothing here talks to other ranks.
"""

import torch
from torch import Tensor

from emulator.verify.rows import Tolerance, locate, spans


def explain(found: Tensor, reference: Tensor, start: int, parts: int, tolerance: Tolerance, unit: str = "rows") -> str:
    """How `found` differs from the rows of `reference` that begin at `start`; empty when it does not.

    parts: ranks in the group. unit: what an index of dim 0 is called.
    """
    expected = reference[start : start + len(found)]
    if not found.numel():
        return ""
    wrong = (~tolerance.close_rows(found, expected)).nonzero().flatten().tolist()
    if not wrong:
        return ""
    rows = [start + i for i in wrong]
    where = f" in {unit} {spans(rows)}" if len(wrong) < len(found) else ""
    bad, want = found[wrong].double(), expected[wrong].double()
    if (nan := bad.isnan() & ~want.isnan()).any():
        hit = [wrong[i] for i in nan.reshape(len(bad), -1).any(-1).nonzero().flatten().tolist()]
        told = f"has NaN in real {unit} {spans([start + i for i in hit])}"
        others = found.to(torch.promote_types(found.dtype, expected.dtype), copy=True)
        others[hit] = expected[hit].to(others.dtype)
        rest = explain(others, reference, start, parts, tolerance, unit)
        return f"{told}; {rest}" if rest else told
    if not bad.any():
        return f"holds all zeros in {unit} {spans(rows)}"
    if factor := _factor(bad, want, parts, tolerance):
        return f"holds {factor} the expected values{where}"
    if moved := _moved(found, reference, start, wrong, tolerance, unit):
        return moved
    return _first_difference(found, expected, start, wrong, tolerance, unit)


def recognise(found: Tensor, reference: Tensor, parts: int, tolerance: Tolerance) -> str:
    """What a value of an unexpected shape is, in words of layout; empty when it is nothing known."""
    total = len(reference)
    if tolerance.same(found, reference):
        return f"holds all {total} rows (full-token)"
    if found.shape[1:] == reference.shape[1:]:
        at = locate(found, reference, 0, tolerance)
        rows = [row for row in at if row is not None]
        # the rest, at the end, may be padding
        if rows and at[: len(rows)] == list(range(rows[0], rows[0] + len(rows))):
            per = -(-total // parts)
            local = rows[0] % per == 0 and len(rows) == min(per, total - rows[0])
            return f"holds rows {spans(rows)}{f' (local-token of rank index {rows[0] // per})' if local else ''}"
    for dim in range(1, reference.dim()):
        width = reference.shape[dim] // parts
        for i in range(parts if width else 0):
            if tolerance.same(found, reference.narrow(dim, i * width, width)):
                return f"holds a feature slice ({spans(range(i * width, (i + 1) * width))} of dim {dim}) of all tokens"
    return ""


def _factor(bad: Tensor, want: Tensor, parts: int, tolerance: Tolerance) -> str:
    """`4 x` or `1/4 of` when all values are off by one factor."""
    size = float((want * want).sum())
    factor = float((bad * want).sum()) / size if size else 0.0
    # a factor is measured, so it is a little off: compare with twice the tolerance
    if not factor or not torch.isclose(bad, factor * want, 2 * tolerance.rtol + 1e-9, tolerance.atol).all():
        return ""
    for name, value in ((f"{parts} (the group's size) x", parts), (f"1/{parts} (1 / group size) of", 1 / parts)):
        if parts > 1 and abs(factor / value - 1) < 1e-3:
            return name
    if 0 < factor < 1 and abs(1 / factor - round(1 / factor)) < 1e-3:
        return f"1/{round(1 / factor)} of"
    return f"{round(factor) if abs(factor - round(factor)) < 1e-3 else f'{factor:.4g}'} x"


def _moved(found: Tensor, reference: Tensor, start: int, wrong: list[int], tolerance: Tolerance, unit: str) -> str:
    """Rows that are right, but in the wrong place."""
    at = locate(found, reference, start, tolerance)
    moved = [at[i] for i in wrong if at[i] is not None]
    if not moved:
        return ""
    stop = start + len(found)
    known = [i for i in at if i is not None]
    if len(known) == len(found):
        if at == list(range(known[0], known[0] + len(at))):
            return f"holds {unit} {known[0]}..{known[0] + len(at)}, expected {start}..{stop}"
        if sorted(known) == list(range(start, stop)):
            return f"holds {unit} permuted: {spans(at)} in place of {start}..{stop}"
        if len(wrong) == len(found):
            return f"holds {unit} {spans(at)}, expected {start}..{stop}"
    places = [start + i for i in wrong if at[i] is not None]
    rest = [start + i for i in wrong if at[i] is None]
    other = f"; {unit} {spans(rest)} are not in the reference" if rest else ""
    return f"holds {unit} {spans(moved)} in place of {spans(places)}{other}"


def _first_difference(
    found: Tensor, expected: Tensor, start: int, wrong: list[int], tolerance: Tolerance, unit: str
) -> str:
    first = (~tolerance.close(found, expected)).nonzero()[0].tolist()
    value, want = found[tuple(first)].item(), expected[tuple(first)].item()
    largest = float((found.double() - expected.double()).abs().nan_to_num(0.0).max())
    return (
        f"differs in {unit} {spans([start + i for i in wrong])} ({len(wrong)} of {len(found)}), first at "
        f"{[first[0] + start, *first[1:]]}: found {value:.6g}, expected {want:.6g}; largest difference {largest:.4g}"
    )
