"""Words that all diagnoses use: ranks, rows and factors."""

from collections.abc import Sequence

from torch import Tensor

from emulator.verify.rows import spans


def ranks_text(ranks: Sequence[int], size: int) -> str:
    """Rank 1; Ranks 1, 3; Ranks 1-6; All ranks, of `size` ranks."""
    if len(ranks) == size > 1:
        return "All ranks"
    if len(ranks) == 1:
        return f"Rank {ranks[0]}"
    if len(ranks) > 2 and list(ranks) == list(range(ranks[0], ranks[-1] + 1)):
        return f"Ranks {ranks[0]}-{ranks[-1]}"
    return "Ranks " + ", ".join(map(str, ranks))


def verb(ranks: Sequence[int], plural: str) -> str:
    """hold -> holds for one rank."""
    return plural + ("s" if len(ranks) == 1 else "")


def rows_text(rows: Sequence[int], unit: str = "row") -> str:
    """row 3; rows 4..8 (without the end)."""
    many = f"{unit.removesuffix('y')}ies" if unit.endswith("y") else f"{unit}s"
    return f"{unit if len(rows) == 1 else many} {spans(rows)}"


def factor_text(factor: float) -> str:
    """4; 1/4; 2.35."""
    if abs(factor - round(factor)) < 1e-6 * abs(factor):
        return str(round(factor))
    if 0 < abs(factor) < 1 and abs(1 / factor - round(1 / factor)) < 1e-4:
        return f"{'-' if factor < 0 else ''}1/{abs(round(1 / factor))}"
    return f"{factor:.6g}"


def constant_factor(found: Tensor, want: Tensor, tolerance: float) -> float | None:
    """c where found = c * want, c no 1, proved by at least three values that rounding does not drown; else None."""
    found, want = found.double().flatten(), want.double().flatten()
    finite = want.isfinite()
    if found.shape != want.shape or not found[finite].isfinite().all() or not want[~finite].isnan().all():
        return None
    found, want = found[finite], want[finite]
    telling = want.abs() > 5 * tolerance
    if int(telling.sum()) < 3 or want[telling].unique().numel() < 3:
        return None
    factor = float((found * want).sum() / (want * want).sum())
    rounding = tolerance * (1 + abs(factor)) + 1e-12 * float(want.abs().max())
    if abs(factor - 1) * float(want.abs().max()) <= 2 * rounding or not factor:
        return None
    return factor if bool(((found - factor * want).abs() <= rounding).all()) else None
