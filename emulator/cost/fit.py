"""Least squares of the coefficients of one form to measured times, and how well it does on rows it has not seen."""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from emulator.cost.forms import form
from emulator.cost.forms import start as first
from emulator.cost.rows import Row, Setting
from emulator.cost.work import NORMS, Work
from emulator.errors import UsageError

PULL = 0.15  # weight of a coefficient's log distance from its start, against a relative error
PULLED_ROWS = 0.8  # the weight is at most this / rows: few rows stay near the start, many speak for themselves
SPAN = 7.0  # how far, in logs, a coefficient may fall below its start; it may rise by SPAN / 2
FOLDS = 4

Column = tuple[str, str]  # key of the coefficients, term


@dataclass(frozen=True)
class Sample:
    """A measured row with the ideal work of its kernels, each under its key."""

    row: Row
    works: tuple[tuple[str, Work], ...]
    seconds: float

    @property
    def shape(self) -> str:
        """Rows of equal kernels are left out together."""
        return repr([(k.family, k.name, sorted(k.sizes.items())) for k in self.row.kernels])


def setting_of(samples: Sequence[Sample]) -> Setting:
    """Of most of the rows."""
    alone = sum(sample.row.setting == "benchmark" for sample in samples)
    return "benchmark" if 2 * alone > len(samples) else "model"


class Table:
    """The samples as a matrix of ideal times, one column per coefficient."""

    def __init__(self, samples: Sequence[Sample]):
        self.samples = list(samples)
        self.columns: list[Column] = []
        groups: dict[tuple[str, str], list[int]] = {}
        entries: list[tuple[int, int, float]] = []
        for number, sample in enumerate(samples):
            for key, work in sample.works:
                for term in work.terms:
                    if term.ideal <= 0:
                        continue
                    column = (key, term.name)
                    if column not in self.columns:
                        self.columns.append(column)
                        groups.setdefault((key, term.group or term.name), []).append(len(self.columns) - 1)
                    entries.append((number, self.columns.index(column), term.ideal))
        self.ideal = np.zeros((len(self.samples), len(self.columns)))
        for number, at, value in entries:
            self.ideal[number, at] += value
        self.groups = [(np.array(at), NORMS.get(name, math.inf)) for (_, name), at in groups.items()]
        self.seconds = np.array([s.seconds for s in samples])
        self.shapes = np.array([s.shape for s in samples])

    def predict(self, factors: NDArray[np.float64], rows: NDArray[np.bool_]) -> NDArray[np.float64]:
        parts = self.ideal[rows] * factors
        total = np.zeros(len(parts))
        for at, norm in self.groups:
            if len(at) == 1:
                total += parts[:, at[0]]
            elif math.isinf(norm):
                total += parts[:, at].max(axis=1)
            else:
                total += (parts[:, at] ** norm).sum(axis=1) ** (1 / norm)
        return total

    def errors(self, factors: NDArray[np.float64], rows: NDArray[np.bool_]) -> NDArray[np.float64]:
        """Relative errors, predicted / measured - 1."""
        return self.predict(factors, rows) / self.seconds[rows] - 1


class Fit:
    """Fits a table. start: by column, in place of forms.start. fixed: coefficients by key that are known and stay."""

    def __init__(self, table: Table, start: Mapping[Column, float], fixed: Mapping[str, Mapping[str, float]]):
        self.table = table
        self.known = np.array([fixed.get(key, {}).get(term, 0.0) for key, term in table.columns])
        self.free = [c for c, (key, term) in enumerate(table.columns)
                     if key not in fixed and term in form(key)]  # fmt: skip
        self.all = np.ones(len(table.samples), dtype=bool)
        setting = setting_of(table.samples)
        self.start = np.array([start.get(c) or first(*c, setting) for c in table.columns])

    def factors(self, rows: NDArray[np.bool_]) -> NDArray[np.float64]:
        """Coefficients by column from these rows, by robust relative errors (soft L1).

        A term that none of the rows exercises keeps its start.
        """
        least_squares = _solver()
        at = np.array(self.free, dtype=int)
        if not len(at):
            return self.known
        origin = np.log(self.start[at])
        spread = self.known.copy()
        pull = min(PULL, PULLED_ROWS / max(int(rows.sum()), 1))

        def residuals(logs: NDArray[np.float64]) -> NDArray[np.float64]:
            spread[at] = np.exp(logs)
            return np.concatenate([self.table.errors(spread, rows), pull * (logs - origin)])

        found = least_squares(residuals, origin, loss="soft_l1", f_scale=0.1, bounds=(origin - SPAN, origin + SPAN / 2))
        result = self.known.copy()
        result[at] = np.exp(found.x)
        return result

    def left_out(self) -> NDArray[np.float64]:
        """Absolute relative error of each row with its shape left out; NaN where no other shape is left."""
        return self._without([[shape] for shape in dict.fromkeys(self.table.shapes)])

    def held_out(self) -> NDArray[np.float64]:
        """Errors of each row in a split by shape, a quarter of the shapes at a time."""
        names = sorted(set(self.table.shapes))
        return self._without([names[fold::FOLDS] for fold in range(FOLDS)])

    def _without(self, parts: Sequence[Sequence[str]]) -> NDArray[np.float64]:
        errors = np.full(len(self.all), np.nan)
        for shapes in parts:
            held = np.isin(self.table.shapes, shapes)
            if held.any() and not held.all():
                errors[held] = np.abs(self.table.errors(self.factors(~held), held))
        return errors


def _solver():  # type: ignore[no-untyped-def]
    try:
        from scipy.optimize import least_squares
    except ImportError:
        raise UsageError("calibration needs scipy: pip install scipy") from None
    return least_squares


def pairs(found: Mapping[Column, float]) -> dict[str, dict[str, float]]:
    """Coefficients by key, then term."""
    ordered = sorted(found, key=lambda c: c[0])
    return {key: {c[1]: found[c] for c in group} for key, group in itertools.groupby(ordered, key=lambda c: c[0])}
