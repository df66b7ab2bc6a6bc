"""communication.json and communication_matrix.json of an Ascend profiler folder.

Form: Ascend's documentation of torch_npu.profiler, and msprof-analyze, which reads these files. Sizes are in MB of 1e6
bytes, so that size over time in ms is GB/s.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from emulator.cost.kernel import Slice
from emulator.export.run import Run
from emulator.export.slice_args import group_name, micros

_TYPES = {
    "all_gather": "allGather", "reduce_scatter": "reduceScatter", "all_reduce": "allReduce", "broadcast": "broadcast",
}  # fmt: skip
_TRANSPORTS = ("RDMA", "HCCS", "PCIE", "SDMA", "SIO")
_LARGE_MB = {"RDMA": 0.5}  # packets from here on count as large; other transports
_LARGE_MB_ELSE = 32.0


@dataclass(frozen=True)
class Call:
    """One rank's part in one collective. name: hcom_<type>__<group>_<number>_1. kind: hcom_<type>_. group: digits, see
    group_id. start: seconds from the start of the run, when the rank is ready. megabytes: that it sends."""

    step: int
    name: str
    kind: str
    group: str
    start: float
    wait: float
    seconds: float
    megabytes: float
    members: tuple[int, ...]
    rank: int
    transport: str

    @property
    def peers(self) -> int:
        return max(1, len(self.members) - 1)

    @property
    def key(self) -> str:
        return f"{self.name}@{self.group}"


def group_id(name: str) -> str:
    """The digits that stand for a group in the files: two 32-bit hashes of its name side by side, with the factors 29
    and 131, by which msprof-analyze finds the group in profiler_metadata.json."""
    high = low = 0
    for letter in name.encode():
        high = (high * 29 + letter) & 0xFFFFFFFF
        low = (low * 131 + letter) & 0xFFFFFFFF
    return str(high << 32 | low)


def calls_of(run: Run, rank: int) -> dict[tuple[int, int], Call]:
    """(step, index of the slice) -> the rank's collectives, in order."""
    calls: dict[tuple[int, int], Call] = {}
    counts: dict[str, int] = defaultdict(int)
    for at, timeline in run.starts():
        for piece in timeline.slices[rank]:
            if piece.stream != "comm":
                continue
            members = run.members(piece)
            group, kind = group_id(group_name(piece.record["group"], members)), f"hcom_{_type(piece)}_"
            calls[timeline.step, piece.index] = Call(
                timeline.step, f"{kind}_{group[-3:]}_{counts[group]}_1", kind, group, at + piece.start - piece.wait,
                piece.wait, piece.seconds, piece.record["bytes"] / 1e6, members, rank, _transport(run, members),
            )  # fmt: skip
            counts[group] += 1
    return calls


def _type(piece: Slice) -> str:
    if piece.record["op"] == "all_to_all":
        return "alltoallv" if "splits" in piece.record["attrs"] else "alltoall"
    op: str = piece.record["op"]
    return _TYPES.get(op, op)


def _transport(run: Run, members: tuple[int, ...]) -> str:
    """By the name of the link level that the group spans; without a device, the level inside a server."""
    name = run.device.level(members).name.lower() if run.device else "hccs"
    if "sio" in name:
        return "SIO"
    return "RDMA" if any(word in name for word in ("roce", "rdma", "uboe")) else "HCCS"


def communication(run: Run, calls: Mapping[tuple[int, int], Call]) -> dict[str, Any]:
    """{step: {p2p, collective: {op: times and bandwidth, Total Op Info}}}. Synchronization is the wait of the call (all
    of it passes before data moves), Idle is nothing."""
    found: dict[str, Any] = {}
    for timeline in run.timelines:
        mine = [call for call in calls.values() if call.step == timeline.step]
        ops = {call.key: _info([call]) for call in mine}
        found[f"step{timeline.step}"] = {"p2p": {}, "collective": {**ops, "Total Op Info": _info(mine)}}
    return found


def _info(calls: Sequence[Call]) -> dict[str, Any]:
    transit, wait = (1e3 * sum(times) for times in ([c.seconds for c in calls], [c.wait for c in calls]))
    ratio = round(_ratio(wait, wait + transit), 4)
    return {
        "Communication Time Info": {
            "Start Timestamp(us)": micros(min((call.start for call in calls), default=0.0)),
            "Elapse Time(ms)": round(transit + wait, 6),
            "Transit Time(ms)": round(transit, 6),
            "Wait Time(ms)": round(wait, 6),
            "Synchronization Time(ms)": round(wait, 6),
            "Idle Time(ms)": 0.0,
            "Wait Time Ratio": ratio,
            "Synchronization Time Ratio": ratio,
        },
        "Communication Bandwidth Info": {
            transport: _bandwidth(transport, [call for call in calls if call.transport == transport])
            for transport in _TRANSPORTS
        },
    }


def _bandwidth(transport: str, calls: Sequence[Call]) -> dict[str, Any]:
    size, time = sum((call.megabytes for call in calls), 0.0), 1e3 * sum(call.seconds for call in calls)
    limit = _LARGE_MB.get(transport, _LARGE_MB_ELSE)
    distribution: dict[str, list[float]] = {}
    for call in calls:  # a packet: what goes to one peer
        entry = distribution.setdefault(f"{call.megabytes / call.peers:.6g}", [0, 0.0])
        entry[0] += call.peers
        entry[1] = round(entry[1] + 1e3 * call.seconds, 6)
    number = sum(entry[0] for entry in distribution.values())
    large = sum(entry[0] for packet, entry in distribution.items() if float(packet) > limit)
    return {
        "Transit Size(MB)": round(size, 6),
        "Transit Time(ms)": round(time, 6),
        "Bandwidth(GB/s)": round(_ratio(size, time), 4),
        "Large Packet Ratio": round(_ratio(large, number), 4),
        "Size Distribution": distribution,
    }


def communication_matrix(run: Run, calls: Mapping[tuple[int, int], Call]) -> dict[str, Any]:
    """{step: {p2p, collective: {<type>-<which>@<group>: {src-dst: link}}}}: per type and group the fastest, middle and
    three slowest calls of each link, and all together. src and dst count inside the group; its link to itself tells
    readers which rank it is. What a rank sends is taken to go to its peers in equal parts."""
    found: dict[str, Any] = {}
    for timeline in run.timelines:
        links: dict[tuple[str, str], dict[str, list[dict[str, Any]]]] = defaultdict(lambda: defaultdict(list))
        for call in (call for call in calls.values() if call.step == timeline.step):
            kind = call.kind.removeprefix("hcom_").removesuffix("_").lower()
            mine = call.members.index(call.rank)
            for peer in range(len(call.members)):
                entry = _link(call) if peer != mine else _entry("LOCAL", 0.0, 0.0, call.key)
                links[kind, call.group][f"{mine}-{peer}"].append(entry)
        matrix: dict[str, dict[str, Any]] = defaultdict(dict)
        for (kind, group), by_link in links.items():
            for link, entries in by_link.items():
                for which, entry in _chosen(entries).items():
                    matrix[f"{kind}-{which}@{group}"][link] = entry
        found[f"step{timeline.step}"] = {"p2p": {}, "collective": dict(matrix)}
    return found


def _link(call: Call) -> dict[str, Any]:
    size, time = call.megabytes / call.peers, 1e3 * call.seconds
    return _entry(call.transport, size, time, call.key)


def _entry(transport: str, size: float, time: float, name: str) -> dict[str, Any]:
    return {
        "Transport Type": transport,
        "Transit Size(MB)": round(size, 6),
        "Transit Time(ms)": round(time, 6),
        "Bandwidth(GB/s)": round(_ratio(size, time), 4),
        "Op Name": name,
    }


def _chosen(entries: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """With fewer than three calls, the slowest ones repeat the fastest."""
    ranked = sorted(entries, key=lambda entry: -entry["Bandwidth(GB/s)"])
    size, time = (sum(entry[key] for entry in ranked) for key in ("Transit Size(MB)", "Transit Time(ms)"))
    return {
        "top1": ranked[0],
        "middle": ranked[len(ranked) // 2],
        "bottom1": ranked[-1],
        "bottom2": ranked[max(-2, -len(ranked))],
        "bottom3": ranked[max(-3, -len(ranked))],
        "total": _entry(ranked[0]["Transport Type"], size, time, ""),
    }


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
