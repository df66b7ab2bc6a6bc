"""Ascend profiler folders, one per rank, which MindStudio Insight and msprof-analyze import.

Columns and folder: Ascend's documentation of torch_npu.profiler and torch_npu's own CSV headers. As in a measured
profile, a communication op begins when its rank is ready, so its time holds the wait for the other ranks.
"""

import csv
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from emulator.cost.intervals import length, overlap, union
from emulator.cost.kernel import Kernel, Slice
from emulator.errors import UsageError
from emulator.export.communication import Call, calls_of, communication, communication_matrix
from emulator.export.kernel_tensors import kernel_tensors
from emulator.export.run import Run
from emulator.export.slice_args import group_name, kernel_names, micros
from emulator.export.trace_view import trace_view

KERNEL_COLUMNS = (
    "Step Id", "Device_id", "Name", "Type", "Accelerator Core", "Start Time(us)", "Duration(us)", "Wait Time(us)",
    "Block Num", "Mix Block Num", "Input Shapes", "Input Data Types", "Input Formats", "Output Shapes",
    "Output Data Types", "Output Formats",
)  # fmt: skip
STEP_COLUMNS = (
    "Device_id", "Step", "Computing", "Communication(Not Overlapped)", "Overlapped", "Communication", "Free", "Stage",
    "Bubble", "Communication(Not Overlapped and Exclude Receive)", "Preparing",
)  # fmt: skip
DTYPES = {
    "bfloat16": "DT_BF16", "float16": "FLOAT16", "float32": "FLOAT", "float64": "DOUBLE", "int64": "INT64",
    "int32": "INT32", "int16": "INT16", "int8": "INT8", "uint8": "UINT8", "bool": "BOOL",
}  # fmt: skip
_ON_CUBE = ("matmul", "grouped_matmul")
_ON_BOTH = ("sparse_attention", "dense_attention", "indexer", "moe_dispatch", "moe_combine")


def write_mindstudio(run: Run, folder: Path) -> list[Path]:
    """Writes <folder>/rank<r>_<scenario>_ascend_pt per rank and returns those folders in rank order."""
    label = "".join(c if c.isalnum() else "-" for c in run.headers[0]["scenario"])
    paths = []
    try:
        for rank in run.ranks:
            path = folder / f"rank{rank}_{label}_ascend_pt"
            (path / "ASCEND_PROFILER_OUTPUT").mkdir(parents=True, exist_ok=True)
            _write_rank(run, rank, path)
            paths.append(path)
    except OSError as error:
        raise UsageError(f"{folder}: cannot be written ({error.strerror})") from None
    return paths


def _write_rank(run: Run, rank: int, path: Path) -> None:
    calls = calls_of(run, rank)
    output = path / "ASCEND_PROFILER_OUTPUT"
    _csv(output / "kernel_details.csv", KERNEL_COLUMNS, kernel_rows(run, rank, calls))
    _csv(output / "step_trace_time.csv", STEP_COLUMNS, step_rows(run, rank))
    _json(output / "communication.json", communication(run, calls))
    _json(output / "communication_matrix.json", communication_matrix(run, calls))
    _json(output / "trace_view.json", trace_view(run, rank, calls))
    _json(path / f"profiler_info_{rank}.json", _profiler_info(run, rank))
    _json(path / "profiler_metadata.json", {"parallel_group_info": _groups(run, rank), "emulation": run.metadata()})


def _csv(path: Path, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        writer.writerows(rows)


def _json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, separators=(",", ":")))


def kernel_rows(run: Run, rank: int, calls: dict[tuple[int, int], Call]) -> list[list[Any]]:
    """Rows of kernel_details.csv in the order of their start: one per kernel, or per op where it has no price.

    Wait Time is the gap since the task before on the same stream. Block Num is not known, and 0.
    """
    rows: list[list[Any]] = []
    dtype = run.headers[rank]["dtype"]
    for at, timeline in run.starts():
        ends = {"compute": at, "comm": at}
        for piece in timeline.slices[rank]:
            start, stream = at + piece.start - piece.wait, piece.stream
            parts: Sequence[tuple[Kernel | None, float]] = [(k, cost.seconds) for k, cost in piece.kernels]
            if stream == "comm" or not parts:
                parts = [(piece.kernels[0][0] if piece.kernels else None, piece.wait + piece.seconds)]
            for (kernel, seconds), name in zip(parts, kernel_names(piece)):
                if stream == "comm":
                    call = calls[timeline.step, piece.index]
                    named = [call.name, call.kind, "HCCL"]
                else:
                    named = [f"{piece.record['module']}/{name}", name, _core(kernel)]
                gap = max(0.0, micros(start - ends[stream]))
                rows.append(
                    [
                        timeline.step,
                        rank,
                        *named,
                        micros(start),
                        micros(seconds),
                        gap,
                        0,
                        0,
                        *_tensors(piece, kernel, dtype),
                    ]
                )
                ends[stream] = start = start + seconds
    return sorted(rows, key=lambda row: row[5])


def _core(kernel: Kernel | None) -> str:
    if kernel is None:
        return "N/A"
    return "AI_CORE" if kernel.family in _ON_CUBE else "MIX_AIC" if kernel.family in _ON_BOTH else "AI_VECTOR_CORE"


def _tensors(piece: Slice, kernel: Kernel | None, run_dtype: str) -> list[str]:
    """Shapes, types and formats of inputs and outputs, `;` between tensors."""
    found = []
    for tensors in kernel_tensors(piece, kernel, run_dtype):
        found += [
            '"' + ";".join(",".join(map(str, t["shape"])) for t in tensors) + '"',
            ";".join(DTYPES.get(t["dtype"], t["dtype"].upper()) for t in tensors),
            ";".join("ND" for _ in tensors),
        ]
    return found


def step_rows(run: Run, rank: int) -> list[list[Any]]:
    """Rows of step_trace_time.csv, microseconds. A step lasts until its last rank is done: Stage is the same on all
    ranks, and Computing + Communication(Not Overlapped) + Free = Stage."""
    rows = []
    for _, timeline in run.starts():
        pieces = timeline.slices[rank]
        computing = union((p.start, p.end) for p in pieces if p.stream == "compute")
        talking = union((p.start - p.wait, p.end) for p in pieces if p.stream == "comm")
        both = length(overlap(computing, talking))
        busy, alone = length(computing), length(talking) - both
        first = min((p.start - p.wait for p in pieces), default=0.0)
        row = [
            busy,
            alone,
            both,
            length(talking),
            max(0.0, timeline.seconds - busy - alone),
            timeline.seconds,
            0.0,
            alone,
            first,
        ]
        rows.append([rank, timeline.step, *map(micros, row)])
    return rows


def _profiler_info(run: Run, rank: int) -> dict[str, Any]:
    return {
        "config": {
            "common_config": {"record_shapes": True, "profile_memory": False, "with_stack": False},
            "experimental_config": {"_profiler_level": "Level1", "_export_type": "text"},
        },
        "rank_id": rank,
        "device_id": rank,
        "emulation": run.metadata(),
    }


def _groups(run: Run, rank: int) -> dict[str, Any]:
    return {
        group_name(axis, members): {
            "group_name": axis,
            "group_rank": members.index(rank),
            "global_ranks": list(members),
        }
        for axis in run.mesh.names
        for members in [tuple(run.mesh.members(axis, rank))]
        if len(members) > 1
    }
