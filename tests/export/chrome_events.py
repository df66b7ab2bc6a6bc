"""A strict reader of Chrome JSON: what Perfetto's importer needs, as rules. Times are compared in whole nanoseconds."""

from collections import defaultdict
from typing import Any

FIELDS = {
    "X": {"ph", "name", "pid", "tid", "ts", "dur", "args"},
    "M": {"ph", "name", "pid", "tid", "args"},
    "s": {"ph", "bp", "id", "name", "cat", "pid", "tid", "ts"},
}
FIELDS["t"] = FIELDS["f"] = FIELDS["s"]
META = {
    "process_name": "name", "process_labels": "labels", "process_sort_index": "sort_index", "thread_name": "name",
    "thread_sort_index": "sort_index",
}  # fmt: skip


def nanos(micros: float) -> int:
    whole = round(micros * 1000)
    assert abs(micros * 1000 - whole) < 1e-3, f"{micros} is finer than a nanosecond"
    return whole


def check_events(events: list[dict[str, Any]]) -> None:
    """Raises AssertionError for the first rule that does not hold."""
    for event in events:
        assert event["ph"] in FIELDS, event
        assert FIELDS[event["ph"]] <= event.keys() <= FIELDS[event["ph"]] | {"cat", "ts"}, event
        assert {type(event["pid"]), type(event["tid"])} == {int}, event
        if event["ph"] == "M":
            assert set(event["args"]) == {META[event["name"]]}, event
        else:
            assert min(event["ts"], event.get("dur", 0)) >= 0, event
    kinds = [event["ph"] == "M" for event in events]
    assert kinds == sorted(kinds, reverse=True), "metadata comes first"
    times = [nanos(event["ts"]) for event in events if event["ph"] != "M"]
    assert times == sorted(times), "events are not in order of time"
    named = {(e["pid"], e["tid"]) for e in events if e["ph"] == "M" and e["name"] == "thread_name"}
    assert {(e["pid"], e["tid"]) for e in events if e["ph"] != "M"} <= named, "a track has no name"
    slices = _slices(events)
    for track, spans in slices.items():
        _check_nesting(track, spans)
    _check_flows(events, slices)


def _slices(events: list[dict[str, Any]]) -> dict[tuple[int, int], list[tuple[int, int]]]:
    found = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            start = nanos(event["ts"])
            found[event["pid"], event["tid"]].append((start, start + nanos(event["dur"])))
    return found


def _check_nesting(track: tuple[int, int], spans: list[tuple[int, int]]) -> None:
    """In the order of the file, a slice lies inside the one that is open, or after it."""
    open_ends: list[int] = []
    for start, end in spans:
        while open_ends and open_ends[-1] <= start:
            open_ends.pop()
        assert not open_ends or end <= open_ends[-1], f"track {track}: {start}..{end} sticks out of its parent"
        open_ends.append(end)


def _check_flows(events: list[dict[str, Any]], slices: dict[tuple[int, int], list[tuple[int, int]]]) -> None:
    """One start, any number of steps and one end per id, in this order, with one name; each inside a slice."""
    flows = defaultdict(list)
    for event in events:
        if event["ph"] in "stf":
            assert event["bp"] == "e"
            assert event["id"] in range(1, 2**53)
            flows[event["id"]].append(event)
            at = nanos(event["ts"])
            around = [1 for start, end in slices[event["pid"], event["tid"]] if start <= at < end]
            assert around, f"flow {event['id']} at {at} is in no slice of its track"
    for number, points in flows.items():
        phases = "".join(p["ph"] for p in points)
        assert phases == "s" + "t" * (len(points) - 2) + "f", f"flow {number} goes {phases}"
        assert len({(p["name"], p["cat"]) for p in points}) == 1, f"flow {number} has several names"
        assert len({p["pid"] for p in points}) == len(points), f"flow {number} meets a rank twice"
