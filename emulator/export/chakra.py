"""Chakra execution traces (MLCommons, schema/protobuf/et_def.proto), which ASTRA-sim 2 reads.

<name>.<rank>.et per rank: a stream of length-delimited messages, GlobalMetadata first, then a Node per op; and
comm_group.json, ASTRA-sim's table of the groups that pg_name names (it counts them from 1).
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from emulator.cost.kernel import Slice, Timeline
from emulator.errors import UsageError
from emulator.export.run import Run
from emulator.export.wire import data, delimited, number, packed

VERSION = "0.0.4"
COMP_NODE, COMM_COLL_NODE = 4, 7
COMM_TYPES = {"all_reduce": 0, "all_gather": 2, "broadcast": 5, "all_to_all": 6, "reduce_scatter": 7}
_WIDTHS = {"float64": 8, "int64": 8, "float32": 4, "int32": 4, "bfloat16": 2, "float16": 2, "int16": 2}

_BOOL, _INT64, _UINT64, _STRING = 27, 9, 13, 29  # value fields of AttributeProto


def write_chakra(run: Run, folder: Path) -> list[Path]:
    """Writes the files and returns the traces in rank order. ASTRA-sim's --workload-configuration is their common
    prefix, <folder>/<scenario>."""
    groups = _groups(run)
    paths = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        table = {str(number): list(members) for members, number in groups.items()}
        (folder / "comm_group.json").write_text(json.dumps(table, indent=1) + "\n")
        for rank in run.ranks:
            paths.append(folder / f"{run.headers[0]['scenario']}.{rank}.et")
            paths[-1].write_bytes(b"".join(map(delimited, _messages(run, rank, groups))))
    except OSError as error:
        raise UsageError(f"{folder}: cannot be written ({error.strerror})") from None
    return paths


def _groups(run: Run) -> dict[tuple[int, ...], int]:
    members = dict.fromkeys(
        run.members(piece)
        for timeline in run.timelines
        for pieces in timeline.slices
        for piece in pieces
        if piece.stream == "comm"
    )
    return {group: i for i, group in enumerate(members, 1)}


def _messages(run: Run, rank: int, groups: Mapping[tuple[int, ...], int]) -> Iterator[bytes]:
    about = {**run.metadata(), "rank": rank}
    told = [
        _attribute(key, _STRING, value if isinstance(value, str) else json.dumps(value)) for key, value in about.items()
    ]
    yield data(1, VERSION) + b"".join(data(2, attribute) for attribute in told)
    first = 1
    before: list[int] = []
    for at, timeline in run.starts():
        pieces = sorted(timeline.slices[rank], key=lambda piece: piece.start - piece.wait)
        for place, piece in enumerate(pieces):
            waits_for = [first + i for i in _awaited(pieces, place)] or before
            yield _node(run, timeline, at, piece, first + place, waits_for, groups)
        first += len(pieces)
        before = [first - 1] if pieces else before


def _awaited(pieces: Sequence[Slice], place: int) -> list[int]:
    """What a slice follows: on each stream the last slice that ended before it was ready. (A trace names no producers;
    ops of one rank run in order, and only what the timeline shows side by side stays side by side.)"""
    ready = pieces[place].start - pieces[place].wait
    found: dict[str, int] = {}
    for i in range(place - 1, -1, -1):
        if pieces[i].stream not in found and pieces[i].end <= ready + 1e-12:
            found[pieces[i].stream] = i
        if len(found) == 2:
            break
    return sorted(found.values())


def _node(
    run: Run, timeline: Timeline, at: float, piece: Slice, node_id: int, waits_for: Sequence[int],
    groups: Mapping[tuple[int, ...], int],
) -> bytes:  # fmt: skip
    record, collective = piece.record, piece.stream == "comm"
    attributes = [_attribute("is_cpu_op", _BOOL, False)]
    if collective:
        attributes += [
            _attribute("comm_type", _INT64, COMM_TYPES[record["op"]]),
            _attribute("comm_size", _INT64, _bytes(record["inputs"][:1])),
            _attribute("pg_name", _STRING, str(groups[run.members(piece)])),
        ]
    else:
        attributes.append(_attribute("tensor_size", _UINT64, _moved(piece)))
        if piece.kernels:
            attributes.append(_attribute("num_ops", _INT64, round(sum(cost.flops for _, cost in piece.kernels))))
    attributes += [_attribute(key, _STRING, record[key]) for key in ("module", "op")]
    attributes += [
        _attribute("layout_in", _STRING, json.dumps([t["layout"] for t in record["inputs"]])),
        _attribute("layout_out", _STRING, json.dumps([t["layout"] for t in record["outputs"]])),
        _attribute("step", _INT64, timeline.step),
    ]
    duration = max(1, round(piece.seconds * 1e6)) if piece.seconds else 0  # whole microseconds; 0 means none is known
    return b"".join(
        [
            number(1, node_id),
            data(2, f"{record['module']}.{record['node']}"),
            number(3, COMM_COLL_NODE if collective else COMP_NODE),
            packed(5, waits_for),
            number(6, max(0, round((at + piece.start) * 1e6))),
            number(7, duration),
            data(8, _tensors(record["inputs"])),
            data(9, _tensors(record["outputs"])),
            *(data(10, attribute) for attribute in attributes),
        ]
    )


def _attribute(name: str, kind: int, value: Any) -> bytes:
    return data(1, name) + (data(kind, value) if kind == _STRING else number(kind, int(value)))


def _tensors(tensors: Sequence[Mapping[str, Any]]) -> bytes:
    """IOInfo: no values; shapes and types as PyTorch's execution traces spell them."""
    shapes = json.dumps([t["shape"] for t in tensors])
    types = json.dumps([f"Tensor({t['dtype']})" for t in tensors])
    return data(1, "[]") + data(2, shapes) + data(3, types)


def _moved(piece: Slice) -> int:
    """Bytes from and to memory: as priced, else of the op's tensors."""
    if piece.kernels:
        return round(sum(cost.bytes for _, cost in piece.kernels))
    return _bytes([*piece.record["inputs"], *piece.record["outputs"]])


def _bytes(tensors: Sequence[Mapping[str, Any]]) -> int:
    return sum(math.prod(t["shape"]) * _WIDTHS.get(t["dtype"], 1) for t in tensors)
