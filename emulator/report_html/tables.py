"""The page's tables: boundaries, collectives, time per module and rank, memory."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from emulator.cost.kernel import Timeline
from emulator.cost.totals import by_module, rank_times
from emulator.layout.plan import module_pattern

Record = Mapping[str, Any]


def boundary_rows(
    boundaries: Sequence[Sequence[Record]], layers: Sequence[int | None], broken: Iterable[Sequence[str]]
) -> list[dict[str, Any]]:
    """{layer, module, port, layout, shape, others, ok} of what crosses the edges of the modules of these layers in one
    step; boundaries: by rank. others: how the other ranks' shapes differ from rank 0's. Replicated values are left out.
    """
    wrong = {tuple(place) for place in broken}
    by_place: dict[tuple, dict[int, list[Record]]] = defaultdict(lambda: defaultdict(list))
    for rank, own in enumerate(boundaries):
        for record in own:
            if record["layer"] in layers and record["layout"] != "replicated":
                by_place[record["layer"], record["module"], record["port"]][rank].append(record)
    rows = []
    for (layer, module, port), by_rank in by_place.items():
        shown = {(r["layout"], tuple(r["shape"])): r for r in next(iter(by_rank.values()))}
        names = {(module, port), (module_pattern(module), port)}
        for layout, shape in shown:
            rows.append(
                {
                    "layer": layer, "module": module, "port": port, "layout": layout, "shape": list(shape),
                    "others": _others(layout, shape, by_rank), "ok": not names & wrong,
                }
            )  # fmt: skip
    return rows


def _others(layout: str, shape: tuple[int, ...], by_rank: Mapping[int, Sequence[Record]]) -> str:
    """Ranks whose value here has another layout or shape."""
    different: dict[str, list[int]] = defaultdict(list)
    for rank, records in by_rank.items():
        found = [(r["layout"], tuple(r["shape"])) for r in records]
        if (layout, shape) in found:
            continue
        alike = [f"{list(s)}" for other, s in found if other == layout and len(s) == len(shape)]
        different[alike[0] if alike else f"{found[0][0]} {list(found[0][1])}"].append(rank)
    return "; ".join(f"{text} on {ranks_text(ranks)}" for text, ranks in different.items())


def ranks_text(ranks: Sequence[int]) -> str:
    """`rank 3`, `ranks 0-3, 7`."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    text = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
    return f"rank {text}" if len(ranks) == 1 else f"ranks {text}"


def collective_rows(timelines: Sequence[Timeline], priced: bool) -> list[dict[str, Any]]:
    """{group, op, module, input, output, count, bytes, seconds, wait} of payload collectives over all steps and layers.

    count and bytes sent: of rank 0. seconds: [least, most] over ranks of the sum of its calls, wait alike; None when
    the timelines are not priced. A dimension that differs between calls or ranks is null.
    """
    rows: dict[tuple, dict[str, Any]] = {}
    sums: dict[tuple, dict[int, list[float]]] = defaultdict(lambda: defaultdict(lambda: [0.0, 0.0]))
    for piece in (p for timeline in timelines for pieces in timeline.slices for p in pieces):
        record = piece.record
        if piece.stream != "comm" or record["traffic"] != "payload":
            continue
        module = module_pattern(record["module"])
        key = (record["group"], record["op"], record["attrs"].get("dim"), module, record["attrs"].get("leg"))
        shapes = {"input": record["inputs"][0]["shape"], "output": record["outputs"][0]["shape"]}
        row = rows.setdefault(
            key, {"group": key[0], "op": key[1], "dim": key[2], "module": module, **shapes, "count": 0, "bytes": 0}
        )
        for side, shape in shapes.items():
            row[side] = [a if a == b else None for a, b in zip(row[side], shape)]
        if piece.rank == 0:
            row["count"] += 1
            row["bytes"] += record["bytes"]
        total = sums[key][piece.rank]
        total[0] += piece.seconds
        total[1] += piece.wait
    for key, row in rows.items():
        for i, name in enumerate(("seconds", "wait")):
            values = [total[i] for total in sums[key].values()]
            row[name] = [min(values), max(values)] if priced else None
    return list(rows.values())


def module_rows(timelines: Sequence[Timeline], num_ranks: int) -> list[dict[str, Any]]:
    """{module, stream, seconds: by rank} over all steps and layers, longest first."""
    times: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0.0] * num_ranks)
    for group in (group for timeline in timelines for group in by_module(timeline)):
        for rank, seconds in group.ranks.items():
            times[group.key, group.stream][rank] += seconds
    ordered = sorted(times.items(), key=lambda item: -max(item[1]))
    return [{"module": module, "stream": stream, "seconds": seconds} for (module, stream), seconds in ordered]


def rank_rows(timelines: Sequence[Timeline]) -> list[dict[str, float]]:
    """{compute, communication, wait, idle} of each rank, seconds over all steps, which sum up to the steps' time:
    communication is what no compute hides."""
    rows = []
    for own in zip(*(rank_times(timeline) for timeline in timelines)):
        rows.append(
            {
                "compute": sum(t.compute for t in own),
                "communication": sum(t.comm - t.overlapped for t in own),
                "wait": sum(t.wait for t in own),
                "idle": sum(t.idle for t in own),
            }
        )
    return rows


def shares(timelines: Sequence[Timeline], seconds: Callable[[Timeline], dict[str, float]]) -> dict[str, float]:
    """Parts of the time of all ranks and steps, largest first; they sum up to 1."""
    found: dict[str, float] = defaultdict(float)
    for name, value in (item for timeline in timelines for item in seconds(timeline).items()):
        found[name] += value
    whole = sum(found.values()) or 1.0
    return {name: value / whole for name, value in sorted(found.items(), key=lambda item: -item[1])}


def memory_rows(memory: Any, name: str = "") -> list[list[Any]]:
    """[name, value] of whatever the summary's memory holds, nested names joined by dots."""
    if isinstance(memory, Mapping):
        return [row for key, value in memory.items() for row in memory_rows(value, f"{name}.{key}" if name else key)]
    return [[name, memory]]
