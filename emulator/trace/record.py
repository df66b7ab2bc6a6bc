"""Trace schema: one JSON object a line, one file per rank, appended as it happens.

The first line is a header {schema, rank, mesh, scenario, model, mode, dtype}. Then, by `kind`:

step: what the records up to the next one belong to: step (number), phase, plan, variants, symbols, order (in which the
tokens are dealt out to tp ranks), requests ([query, context] of each).

op: seq, node (graph name), op, module (qualified name), layer, phase, group (mesh axis or null), inputs and outputs
(lists of {shape, dtype, layout}), attrs (static arguments; async {start, wait}: the nodes where this collective starts
and where it is waited for, null for the next step; of: the
collective that a wait waits for), window ([start, end) of this rank's real tokens, for local values in contiguous
order), traffic (payload is counted; metadata, such as split sizes and masks, and verification, token ids, are not),
bytes (sent by this rank), start and duration (seconds of wall time).

memory: at the end of a step, the peak of activations and communication buffers on this rank: peak_bytes, node, op,
module, by_category, live (the largest values then), modules (peak while each module ran); weight_bytes and cache_bytes
beside them.

boundary: seq, node, module, port (input, output, output1), value (token, rows or cache), layer, phase, shape, dtype,
layout, window: a value crossing a module's edge.
"""

import gc
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from emulator.errors import UsageError

SCHEMA = 1


def steps_of(records: Sequence[dict[str, Any]]) -> list[tuple[dict[str, Any], list[dict[str, Any]]]]:
    """(step record, records of the step), in order."""
    found: list[tuple[dict[str, Any], list[dict[str, Any]]]] = []
    for record in records:
        if record["kind"] == "step":
            found.append((record, []))
        elif found:
            found[-1][1].append(record)
    return found


class TraceWriter:
    """Appends records to a file, each line at once; with path None it only keeps them in memory."""

    def __init__(self, path: Path | None, header: dict[str, Any]):
        self.records: list[dict[str, Any]] = []
        self._file: TextIO | None = None
        if path is not None:
            self._file = path.open("w", buffering=1)
            self._file.write(json.dumps({"schema": SCHEMA, **header}) + "\n")

    def append(self, record: dict[str, Any]) -> None:
        record["seq"] = len(self.records)
        self.records.append(record)
        if self._file is not None:
            self._file.write(json.dumps(record) + "\n")

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


@contextmanager
def no_collector() -> Iterator[None]:
    """Without the cycle collector, for work on many records: they make no cycles, and it would walk all of them again
    and again."""
    on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if on:
            gc.enable()


def fresh_folder(folder: Path) -> Path:
    """Makes the folder for a run's traces and removes those of an earlier run. UsageError when it cannot be made."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for old in (*folder.glob("rank_*.jsonl"), *folder.glob("flight_*"), folder / "summary.json"):
            old.unlink(missing_ok=True)
    except OSError as error:
        raise UsageError(f"--out {folder}: not a folder that can be written ({error.strerror})") from None
    return folder


def trace_files(folder: Path) -> list[Path]:
    """The rank files of a trace folder, in rank order."""
    named = [p for p in folder.glob("rank_*.jsonl") if p.stem.removeprefix("rank_").isdigit()]
    files = sorted(named, key=lambda p: int(p.stem.removeprefix("rank_")))
    if not files:
        raise UsageError(f"{folder}: no trace here (expected rank_0.jsonl, rank_1.jsonl, ...)")
    return files


def read_trace(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """(header, records) of one rank's file. A last line cut short by a crash is left out."""

    lines = path.read_text().splitlines()

    def parsed() -> Iterator[Any]:
        for number, line in enumerate(lines, 1):
            try:
                yield json.loads(line)
            except json.JSONDecodeError:
                if number == 1:
                    raise UsageError(f"{path}: line 1 is not a trace header") from None
                if number < len(lines):
                    raise UsageError(f"{path}: line {number} is not JSON, and it is not the last one") from None

    header, *records = list(parsed()) or [{}]
    if not lines or not isinstance(header, dict):
        raise UsageError(f"{path}: line 1 is not a trace header")
    if header.get("schema") != SCHEMA:
        raise UsageError(f"{path}: trace schema {header.get('schema')!r}, this version reads {SCHEMA}")
    return header, records
