"""Communication calls as Flight Recorder dumps, which torch's own `torchfrtrace` opens and compares between ranks.

One pickle `<prefix><rank>` per rank. The analyser takes the first rank it reads to be right, so where the ranks
disagree, the calls of the minority carry a note in their stack trace that says so.
"""

import math
import pickle
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from emulator.errors import UsageError

_VERSION = "2.10"
_TIMEOUT_MS = 600_000
# all_to_all is written as such even when it is on one tensor: only under this name may sizes differ between ranks
_NAMES = {"all_gather": "_all_gather_base", "reduce_scatter": "_reduce_scatter_base"}
_DTYPES = {
    "bfloat16": "BFloat16", "float16": "Half", "float32": "Float", "float64": "Double", "int64": "Long", "int32": "Int",
    "int16": "Short", "int8": "Char", "uint8": "Byte", "bool": "Bool",
}  # fmt: skip

Call = Mapping[str, Any]
Group = tuple[str, tuple[int, ...]]  # name, members
Slots = dict[tuple[Group, int], dict[int, Call]]  # the n-th call of a group -> each rank's


def write_flight_records(
    folder: Path | str,
    calls_by_rank: Mapping[int, Sequence[Any]],
    groups: Mapping[str, Sequence[Sequence[int]]] | None = None,
    prefix: str = "flight_",
    only: int | None = None,
) -> list[Path]:
    """Writes one dump per rank and returns their paths in rank order; read them with `torchfrtrace -p <prefix> folder`.

    calls_by_rank: each rank's calls in order, CommCall objects or dictionaries of their fields. A member of a group
    that is missing here gets an empty dump: no call of it is known. groups: {name: lists of members} (Mesh.groups), for
    groups in which no rank made a call. only: write this rank's dump alone (each rank of a launch writes its own).
    Raises UsageError when the folder cannot be written.
    """
    calls = {rank: [c if isinstance(c, Mapping) else vars(c) for c in listed] for rank, listed in calls_by_rank.items()}
    slots = _slots(calls)
    found: set[Group] = {(name, tuple(line)) for name, lines in (groups or {}).items() for line in lines}
    ids = {group: str(i) for i, group in enumerate(sorted(found | {group for group, _ in slots}))}
    place = {id(call): i for listed in calls.values() for i, call in enumerate(listed)}
    entries: dict[int, list[tuple[int, dict[str, Any]]]] = {
        rank: [] for rank in {*calls, *(r for _, line in ids for r in line)}
    }
    for (group, number), made in slots.items():
        state, notes = _shared_state(group, made), _notes(group, made)
        for rank, call in made.items():
            entry = _entry(call, rank, group, number, state, notes.get(rank))
            entry.update(pg_id=int(ids[group]), process_group=(ids[group], group[0]))
            entries[rank].append((place[id(call)], entry))
    paths = []
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        for rank in sorted(entries if only is None else {only}):
            config = {
                n: {"name": n, "desc": name, "ranks": str(list(line))}
                for (name, line), n in ids.items()
                if rank in line
            }
            ordered = [entry for _, entry in sorted(entries[rank], key=lambda placed: placed[0])]
            dump = {
                "version": _VERSION,
                "pg_config": config,
                "entries": [{**entry, "record_id": i, "op_id": i} for i, entry in enumerate(ordered)],
            }
            path = Path(folder) / f"{prefix}{rank}"
            path.write_bytes(pickle.dumps(dump))
            paths.append(path)
    except OSError as error:
        raise UsageError(f"{folder}: cannot be written ({error.strerror})") from None
    return paths


# -- which calls of different ranks belong together --------------------------------------------------------------------


def _slots(calls: Mapping[int, Sequence[Call]]) -> Slots:
    """Calls that only some ranks still remember are left out; so are messages to a rank that receives from anyone (it
    is not known which one each receive took)."""
    anyone = {(c["group"], rank) for rank, listed in calls.items() for c in listed if _from_anyone(c)}
    slots: Slots = {}
    first = Counter[Group]()
    for rank, listed in calls.items():
        seen = Counter[Group]()
        for call in listed:
            if _from_anyone(call) or (call["op"] == "send" and (call["group"], call["peer"]) in anyone):
                continue
            group = _group_of(call, rank)
            seen[group] += 1
            number = call["number"] or seen[group]
            if seen[group] == 1:
                first[group] = max(number, first[group])
            slots.setdefault((group, number), {})[rank] = call
    return {(group, number): made for (group, number), made in slots.items() if number >= first[group]}


def _from_anyone(call: Call) -> bool:
    return call["op"] == "recv" and call["peer"] is None


def _group_of(call: Call, rank: int) -> Group:
    """A message has a group of its own, its two ends: the analyser expects every member of a group at every call."""
    if call["op"] not in ("send", "recv"):
        return call["group"], tuple(call["members"])
    source, target = (rank, call["peer"]) if call["op"] == "send" else (call["peer"], rank)
    return f"{call['group']} {source}->{target}", tuple(sorted({source, target}))


def _shared_state(group: Group, made: Mapping[int, Call]) -> str | None:
    """State of a call that all members made alike: it ended for all when one saw it end, though others may never have
    awaited it. None when they did not."""
    if len(made) < len(group[1]) or len({_look(call) for call in made.values()}) > 1:
        return None
    return "completed" if any(call["end_ns"] for call in made.values()) else "scheduled"


def _notes(group: Group, made: Mapping[int, Call]) -> dict[int, str]:
    """What to say of each rank whose call differs from that of most."""
    looks = {rank: _look(call) for rank, call in made.items()}
    usual, times = Counter(looks.values()).most_common(1)[0]
    if 2 * times <= len(group[1]):
        return {}
    most = ", ".join(str(rank) for rank in sorted(looks) if looks[rank] == usual)
    return {r: f"rank {r} calls {look}; ranks {most} call {usual}" for r, look in looks.items() if look != usual}


def _look(call: Call) -> str:
    """What all ranks should have alike."""
    described = call["outputs"] if call["op"] in ("scatter", "recv") else call["inputs"]
    op = "message" if call["op"] in ("send", "recv") else call["op"]
    sizes = "" if op == "all_to_all" else " ".join(str(d["shape"]) for d in described)
    return " ".join(filter(None, (op, sizes, *sorted({d["dtype"] for d in described}))))


# -- one entry ---------------------------------------------------------------------------------------------------------


def _entry(call: Call, rank: int, group: Group, number: int, state: str | None, note: str | None) -> dict[str, Any]:
    message = call["op"] in ("send", "recv")
    inputs, outputs = _sizes(call)
    return {
        "frames": _frames(call, note),
        "collective_seq_id": number,
        "p2p_seq_id": number if message else 0,
        "profiling_name": f"hccl:{_name(call, rank, group)}",
        "time_created_ns": call["start_ns"],
        "time_discovered_started_ns": call["start_ns"],
        "time_discovered_completed_ns": call["end_ns"] or None,
        "input_sizes": inputs,
        "output_sizes": outputs,
        "input_dtypes": _dtypes(call["inputs"]),
        "output_dtypes": _dtypes(call["outputs"]),
        "state": state or ("completed" if call["end_ns"] else "scheduled"),
        "retired": bool(call["end_ns"]),
        "is_p2p": message,
        "timeout_ms": _TIMEOUT_MS,
    }


def _frames(call: Call, note: str | None) -> list[dict[str, Any]]:
    """The module (or API) at the user's call site; before it, the note."""
    file, _, line = call["site"].rpartition(":")
    place = {"filename": file or call["site"], "line": int(line) if line.isdigit() else 0}
    who = f"{call['module']} ({call['api']})" if call["module"] else call["api"]
    return [{"name": name, **place} for name in ([note] if note else []) + [who]]


def _name(call: Call, rank: int, group: Group) -> str:
    if call["op"] not in ("send", "recv"):
        op: str = call["op"]
        return _NAMES.get(op, op)
    mine, peer = group[1].index(rank), group[1].index(call["peer"])
    return f"send {mine}->{peer}" if call["op"] == "send" else f"recv {mine}<-{peer}"


def _sizes(call: Call) -> tuple[list[list[int]], list[list[int]]]:
    """Sizes of inputs and outputs. A list of tensors that stands for one tensor is written as that one."""
    inputs, outputs = ([d["shape"] for d in call[side]] for side in ("inputs", "outputs"))
    op = call["op"]
    if op == "all_to_all" or (op == "reduce_scatter" and len(outputs) == 1):
        inputs = _joined(inputs)
    if op == "all_to_all" or (op == "all_gather" and len(inputs) == 1):
        outputs = _joined(outputs)
    return inputs or [[]], outputs or [[]]


def _joined(shapes: Sequence[Sequence[int]]) -> list[list[int]]:
    """One shape for tensors laid end to end on dim 0."""
    if len(shapes) == 1:
        return [list(shapes[0])]
    if all(shape and list(shape[1:]) == list(shapes[0][1:]) for shape in shapes):
        return [[sum(shape[0] for shape in shapes), *shapes[0][1:]]]
    return [[sum(math.prod(shape) for shape in shapes)]]


def _dtypes(described: Sequence[Mapping[str, Any]]) -> list[str]:
    return [_DTYPES.get(d["dtype"], d["dtype"]) for d in described]
