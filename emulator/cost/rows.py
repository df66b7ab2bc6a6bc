"""Measured rows of a CSV file: what was run on which device, and how long it took.

Two layouts, told apart by their columns: id, device, op, params (JSON), measured_us, tflops, gbps, source, notes; and a
profiler's kernel_details.csv or op_summary (Type or OP Type, Duration(us), Input Shapes).
"""

import csv
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from emulator.cost.kernel import Kernel
from emulator.cost.row_params import NAMED, NoKernel
from emulator.cost.row_shapes import SHAPED, call, canonical, parse_shapes, shape_kernels
from emulator.errors import UsageError

BY_NAME = {canonical(name): parse for name, parse in NAMED.items()}

Setting = Literal["model", "benchmark"]  # inside a model's step, or alone and repeated


@dataclass(frozen=True)
class Row:
    """One measured row. device: as the file names it. kernels: what it runs, one after the other; () with a reason in
    `why` where it cannot be said. seconds: measured, or None: then rate (flop/s or bytes/s) and what it is a rate of.
    """

    id: str
    device: str
    op: str
    setting: Setting
    kernels: tuple[Kernel, ...] = ()
    why: str = ""
    seconds: float | None = None
    rate: float | None = None
    rate_of: Literal["flops", "bytes"] | None = None
    source: str = ""


def read_rows(path: str | Path) -> list[Row]:
    """Every row of a file, in order. UsageError when it is not readable or has the columns of neither layout."""
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file)
            columns = [c.strip() for c in reader.fieldnames or []]
            reader.fieldnames = columns
            lines = list(reader)
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise UsageError(f"{path}: not readable as CSV: {error}") from None
    if {"op", "params"} <= set(columns):
        return [_measured(line, number) for number, line in enumerate(lines, 2)]
    kind = next((c for c in ("Type", "OP Type") if c in columns), None)
    time = next((c for c in ("Duration(us)", "Task Duration(us)") if c in columns), None)
    if kind and time and "Input Shapes" in columns:
        return [_profiled(line, number, kind, time) for number, line in enumerate(lines, 2)]
    raise UsageError(
        f"{path}: has neither op and params columns (measured rows) nor Type, Duration(us) and Input Shapes "
        f"(kernel_details.csv, op_summary); it has {', '.join(columns) or 'none'}"
    )


def _positive(line: Mapping[str, Any], name: str) -> float | None:
    text = (line.get(name) or "").strip()
    try:
        value = float(text)
    except ValueError:
        return None
    return value if 0 < value < float("inf") else None


def _measured(line: Mapping[str, Any], number: int) -> Row:
    about = f"{line.get('source') or ''} {line.get('notes') or ''}".lower()
    setting: Setting = "benchmark" if re.search(r"bench", about) else "model"
    micros, tflops, gbps = (_positive(line, name) for name in ("measured_us", "tflops", "gbps"))
    op = (line.get("op") or "").strip()
    kernels: tuple[Kernel, ...] = ()
    why = ""
    try:
        kernels = tuple(_kernels(op, line.get("params") or "{}"))
    except NoKernel as error:
        why = str(error)
    rate = None
    rate_of: Literal["flops", "bytes"] | None = None
    if micros is None and tflops is not None:
        rate, rate_of = tflops * 1e12, "flops"
    elif micros is None and gbps is not None:
        rate, rate_of = gbps * 1e9, "bytes"
    return Row(
        line.get("id") or f"line {number}", (line.get("device") or "").strip(), op, setting, kernels, why,
        None if micros is None else micros * 1e-6, rate, rate_of, short_source(line.get("source") or ""),
    )  # fmt: skip


def short_source(text: str) -> str:
    """A source without its page or row: the first two words, of an arXiv entry the number too."""
    return " ".join(text.replace("...", " ").split()[:2])


def _kernels(op: str, text: str) -> list[Kernel]:
    try:
        params = json.loads(text)
    except json.JSONDecodeError:
        raise NoKernel(f"params is not JSON: {text[:60]!r}") from None
    if not isinstance(params, dict):
        raise NoKernel("params is not a JSON object")
    try:
        if "input_shape" in params:
            given = call(op, params["input_shape"], params.get("dtype"), params.get("attrs") or {})
            return shape_kernels(given)
        kind = canonical(op)
        if kind in BY_NAME:
            return BY_NAME[kind](params)
        if kind in SHAPED and "shape" in params:
            return shape_kernels(call(op, [params["shape"]], [params.get("dtype")], {}))
    except (TypeError, ValueError, IndexError, KeyError) as error:
        if isinstance(error, NoKernel):
            raise
        raise NoKernel(f"sizes are not readable: {error}") from None
    raise NoKernel(f"{op} without input_shape" if kind in SHAPED else f"no op family for {op!r}")


def _profiled(line: Mapping[str, Any], number: int, kind: str, time: str) -> Row:
    name = (line.get(kind) or "").strip()
    micros = _positive(line, time)
    kernels: tuple[Kernel, ...] = ()
    why = "" if micros else "no duration"
    try:
        given = call(
            name, parse_shapes(line.get("Input Shapes") or ""), (line.get("Input Data Types") or "").split(";"), {},
            parse_shapes(line.get("Output Shapes") or ""),
        )  # fmt: skip
        kernels = tuple(shape_kernels(given))
    except (NoKernel, ValueError, IndexError) as error:
        why = str(error)
    seconds = None if micros is None else micros * 1e-6
    return Row(f"line {number}", "", name, "model", kernels, why, seconds, source="profiler table")
