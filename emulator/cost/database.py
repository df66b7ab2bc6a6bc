"""A performance database in TensorCast's CSV layout: measured times of kernels, and times between measured ones.

`<device>/<stack version>/<kernel type>.csv`, and `<device>/hccl/<version>/hcom_allGather_.csv` and so on. A kernel is
looked up in the file of its name, among rows of its dtype:

* measured: a row has the same sizes (mean of such rows);
* interpolated: rows differ from it in one size only, on both sides of it. Time is taken as a power of that size between
  the nearest two (a straight line over logarithms). With several such sizes, the one whose neighbours are closest.
  Per-request lengths compare as tokens, requests and mean keys; nothing is extrapolated.
"""

import csv
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from emulator.cost.database_rows import DURATIONS, Features, dtype, of_kernel, of_row
from emulator.cost.kernel import Kernel, Source
from emulator.errors import UsageError

_POINTER = "version https://git-lfs"


@dataclass(frozen=True)
class Row:
    """A measured call. dtype: "" where it does not matter (collectives count bytes)."""

    features: Features
    dtype: str
    seconds: float


class Database:
    """Kernel files of one stack version, and communication files beside them.

    folder: a stack version's, or a device's that holds exactly one. UsageError for a folder without kernel files, and,
    once a file is needed, for one that cannot be read.
    """

    def __init__(self, folder: Path):
        self.folder = _stack_folder(folder)
        self._files = {path.stem: path for path in self.folder.glob("*.csv")}
        for parent in (self.folder, self.folder.parent):
            self._files.update({path.stem: path for path in sorted(parent.glob("hccl/*/*.csv"))})
        self._rows: dict[tuple[str, str], list[Row]] = {}

    def lookup(self, kernel: Kernel) -> tuple[float, Source] | None:
        """(seconds, measured or interpolated); None when the database has neither the kernel nor neighbours of it."""
        wanted = of_kernel(kernel) if kernel.name in self._files else None
        if wanted is None:
            return None
        rows = [r for r in self._read(kernel) if r.dtype in ("", kernel.dtype)]
        same = [r for r in rows if r.features.numbers == wanted.numbers]
        hits = [r.seconds for r in same if r.features.exact == wanted.exact]
        if hits:
            return sum(hits) / len(hits), "measured"
        if same:  # other lengths or another spread of the same sums
            return sum(r.seconds for r in same) / len(same), "interpolated"
        between = _between(wanted.numbers, rows)
        return None if between is None else (between, "interpolated")

    def _read(self, kernel: Kernel) -> list[Row]:
        key = kernel.name, kernel.family
        if key not in self._rows:
            path = self._files[kernel.name]
            rows = _collective_rows(path) if kernel.family == "collective" else _kernel_rows(path, kernel.family)
            self._rows[key] = list(rows)
        return self._rows[key]


def _between(wanted: Mapping[str, float], rows: list[Row]) -> float | None:
    """Time on the line between the nearest rows below and above in the one size that they differ in."""
    best: tuple[float, float] | None = None  # (how far apart, seconds)
    for name, value in wanted.items():
        along = [
            (r.features.numbers[name], r.seconds)
            for r in rows
            if all(v == wanted[n] for n, v in r.features.numbers.items() if n != name) and r.features.numbers[name] > 0
        ]
        below = max((p for p in along if p[0] < value), default=None)
        above = min((p for p in along if p[0] > value), default=None)
        if below is None or above is None:
            continue
        apart = math.log(above[0] / below[0])
        share = math.log(value / below[0]) / apart
        seconds = math.exp((1 - share) * math.log(below[1]) + share * math.log(above[1]))
        if best is None or apart < best[0]:
            best = apart, seconds
    return None if best is None else best[1]


def _stack_folder(folder: Path) -> Path:
    if not folder.is_dir():
        raise UsageError(f"database {folder}: no such folder")
    if any(folder.glob("*.csv")):
        return folder
    stacks = sorted(p for p in folder.iterdir() if p.is_dir() and p.name != "hccl" and any(p.glob("*.csv")))
    if len(stacks) != 1:
        names = ", ".join(p.name for p in stacks) or "none"
        raise UsageError(
            f"database {folder}: expected kernel files (*.csv) or one stack version's folder; found {names}"
        )
    return stacks[0]


def _kernel_rows(path: Path, family: str) -> Iterator[Row]:
    for number, row in _lines(path, ("Input Shapes", "Input Data Types", "Output Shapes")):
        try:
            seconds = _seconds(row)
            if seconds is not None:
                yield Row(of_row(family, row), dtype(row["Input Data Types"]), seconds)
        except (ValueError, IndexError, KeyError, ZeroDivisionError) as error:
            raise UsageError(f"{path}, line {number}: not a row of {family}: {error}") from None


def _collective_rows(path: Path) -> Iterator[Row]:
    """Rows of a communication file; those of a group size that was measured on several topology tiers are left out, as
    nothing tells which one a group of ranks is on."""
    rows: list[Row] = []
    tiers: dict[int, set[str | None]] = {}
    for number, row in _lines(path, ("message_bytes", "num_devices")):
        try:
            seconds, ranks = _seconds(row), int(row["num_devices"])
            if seconds is None:
                continue
            rows.append(Row(Features({"message": float(row["message_bytes"]), "ranks": ranks}), "", seconds))
            tiers.setdefault(ranks, set()).add(row.get("topology_tier"))
        except ValueError as error:
            raise UsageError(f"{path}, line {number}: {error}") from None
    yield from (r for r in rows if len(tiers[int(r.features.numbers["ranks"])]) == 1)


def _lines(path: Path, needed: tuple[str, ...]) -> Iterator[tuple[int, dict[str, str]]]:
    text = path.read_text()
    if text.startswith(_POINTER):
        raise UsageError(f"{path}: a Git LFS pointer, not the file itself (fetch it with `git lfs pull`)")
    reader = csv.DictReader(text.splitlines())
    columns = reader.fieldnames or []
    missing = [name for name in needed if name not in columns]
    if missing or not any(name in columns for name in DURATIONS):
        raise UsageError(f"{path}: no column {missing[0] if missing else ' or '.join(DURATIONS)!r}")
    for row in reader:
        yield reader.line_num, {k: v or "" for k, v in row.items() if k is not None}


def _seconds(row: Mapping[str, str]) -> float | None:
    """The row's time; None for a row that was not measured."""
    text = next((row[name] for name in DURATIONS if row.get(name, "").strip()), None)
    if text is None:
        return None
    taken = float(text) * 1e-6
    if not 0 < taken < math.inf:
        raise ValueError(f"a time of {text} us")
    return taken
