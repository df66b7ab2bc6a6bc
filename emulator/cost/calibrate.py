"""Fits a device's coefficients to measured rows, family by family, with errors on rows left out."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from emulator.cost.device import Coefficients, Device
from emulator.cost.fit import Column, Fit, Sample, Table, pairs, setting_of
from emulator.cost.forms import fit_key, form
from emulator.cost.forms import start as first
from emulator.cost.price import BENCHMARK, keys, work
from emulator.cost.rows import Row
from emulator.cost.vector import TRAFFIC
from emulator.cost.work import Unpriceable

ENOUGH = 4  # rows of a setting for coefficients of its own


@dataclass(frozen=True)
class Errors:
    """Absolute relative errors in percent. rows: how many they are over."""

    rows: int
    mape: float
    median: float
    p90: float


@dataclass(frozen=True)
class Calibrated:
    """key: of the coefficients, several joined by + where rows ran several kernels. in_sample: of the fit itself;
    left_out: each shape left out in turn; held_out: a quarter of the shapes at a time."""

    key: str
    coefficients: dict[str, dict[str, float]]
    in_sample: Errors
    left_out: Errors | None
    held_out: Errors | None
    sources: tuple[str, ...]


def errors(values: Sequence[float]) -> Errors | None:
    """None where no value is known."""
    known = 100 * np.array([v for v in values if not math.isnan(v)])
    if not len(known):
        return None
    return Errors(len(known), float(known.mean()), float(np.median(known)), float(np.percentile(known, 90)))


def measured_seconds(row: Row, device: Device) -> float | None:
    """The measured time, or from a measured rate the time of the row's own flops or bytes."""
    if row.seconds is not None or row.rate is None:
        return row.seconds
    done = [work(kernel, device) for kernel in row.kernels]
    amount = sum(w.flops if row.rate_of == "flops" else w.bytes for w in done)
    return amount / row.rate if amount else None


def samples(rows: Sequence[Row], device: Device) -> tuple[list[Sample], list[tuple[Row, str]]]:
    """(rows with the ideal work of their kernels, rows that cannot be used and why)."""
    used, left = [], []
    both = _in_both_settings(rows)
    for row in rows:
        why = row.why
        try:
            works = tuple((_key(row, fit_key(kernel), both), work(kernel, device)) for kernel in row.kernels)
            seconds = measured_seconds(row, device)
        except Unpriceable as error:
            why = str(error)
        if not why and not seconds:
            why = "no measured time"
        if why:
            left.append((row, why))
        else:
            used.append(Sample(row, works, seconds or 0.0))
    return used, left


def _in_both_settings(rows: Sequence[Row]) -> set[str]:
    """Keys with enough rows both inside a model and alone for a fit of each: kernels run slower inside a model."""
    found: dict[str, Counter[str]] = {}
    for row in rows:
        for key in {fit_key(kernel) for kernel in row.kernels}:
            found.setdefault(key, Counter())[row.setting] += 1
    return {key for key, counts in found.items() if len(counts) == 2 and min(counts.values()) >= ENOUGH}


def _key(row: Row, key: str, both: set[str]) -> str:
    return key + BENCHMARK if row.setting == "benchmark" and key in both else key


def calibrate(rows: Sequence[Row], device: Device, *, evaluate: bool = True) -> list[Calibrated]:
    """One fit per op family (and variant, and dtype of products) of the rows, which are all of this device.

    Starts from the device's coefficients where it has them. evaluate: with the errors on rows left out.
    """
    used, _ = samples(rows, device)
    groups: dict[tuple[str, ...], list[Sample]] = {}
    for sample in used:
        groups.setdefault(tuple(sorted({key for key, _ in sample.works})), []).append(sample)
    results: list[Calibrated] = []
    found: dict[str, dict[str, float]] = {}
    vector = [s for s in used if len(s.works) == 1 and s.row.kernels[0].family in TRAFFIC and not s.row.kernels[0].name]
    families = {s.works[0][0] for s in vector}
    if len(families) > 1:  # for families without rows
        groups = {("vector",): _pool(vector), **groups}
    for names in sorted(groups, key=lambda n: (n != ("vector",), len(n))):
        start: Mapping[str, float] = {}
        if len(families - {*names}) > 1 and names[0].split(".")[0] in TRAFFIC:
            start = _common(_pool([s for s in vector if s.works[0][0] not in names]))
        result = _fit_group(names, groups[names], device, found, start, evaluate)
        results.append(result)
        found |= result.coefficients
    return results


def _pool(group: Sequence[Sample]) -> list[Sample]:
    return [Sample(s.row, (("vector", s.works[0][1]),), s.seconds) for s in group]


def _common(group: Sequence[Sample]) -> dict[str, float]:
    """launch and fill that vector ops of a device have in common: the start of a family, from the rows of others."""
    table = Table(group)
    fit = Fit(table, {}, {})
    factors = dict(zip(table.columns, fit.factors(fit.all)))
    return {term: float(factors["vector", term]) for term in ("launch", "fill")}


def _fit_group(
    names: tuple[str, ...],
    group: list[Sample],
    device: Device,
    found: Mapping[str, Mapping[str, float]],
    common: Mapping[str, float],
    evaluate: bool,
) -> Calibrated:
    """Keys that single-kernel rows have settled stay as they are."""
    table = Table(group)
    fixed = {key: values for key, values in found.items() if key in names}
    start = {column: _start(column, group, device, common) for column in table.columns}
    fit = Fit(table, start, fixed)
    factors = fit.factors(fit.all)
    fitted = {table.columns[c]: float(factors[c]) for c in fit.free}
    for key in names:  # a term that no row exercises keeps its start
        for term in form(key):
            if (key, term) not in table.columns and key not in fixed:
                fitted[key, term] = _start((key, term), group, device, common)
    inside = errors(np.abs(table.errors(factors, fit.all)).tolist())
    assert inside is not None
    return Calibrated(
        "+".join(names),
        pairs(fitted),
        inside,
        errors(fit.left_out().tolist()) if evaluate else None,
        errors(fit.held_out().tolist()) if evaluate else None,
        tuple(dict.fromkeys(s.row.source for s in group)),
    )


def _start(column: Column, group: list[Sample], device: Device, common: Mapping[str, float]) -> float:
    """The device's own value, that of other vector ops, or the general one."""
    key, term = column
    kernels = [k for s in group for k in s.row.kernels if key.startswith(fit_key(k))]
    for name in [key, *(keys(kernels[0]) if kernels else [])]:
        value = device.coefficients[name].values.get(term) if name in device.coefficients else None
        if value:
            return value
    return common.get(term, first(key, term, setting_of(group)))


def with_coefficients(device: Device, results: Sequence[Calibrated]) -> Device:
    """The device with these fits in place of its own coefficients of the same names, each with its provenance."""
    coefficients = dict(device.coefficients)
    for result in results:
        for key, values in result.coefficients.items():
            error = None if result.left_out is None else round(result.left_out.mape, 1)
            source = f"fitted to {result.in_sample.rows} rows of: {'; '.join(result.sources)}"
            rounded = {term: float(f"{value:.4g}") for term, value in values.items()}
            coefficients[key] = Coefficients(values=rounded, rows=result.in_sample.rows, error=error, source=source)
    return device.model_copy(update={"coefficients": coefficients})
