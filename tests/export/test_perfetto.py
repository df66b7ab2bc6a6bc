"""Chrome JSON: the rules of its importer on made and real runs, and each number of the made one."""

import copy
import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from emulator.errors import UsageError
from emulator.export.perfetto import COMM, COMPUTE, LAYERS, chrome_trace, write_perfetto

from .chrome_events import check_events
from .timelines import hand_run


@pytest.fixture(scope="module")
def trace() -> dict[str, Any]:
    return chrome_trace(hand_run())


def slices(trace: dict[str, Any], rank: int, track: int) -> list[tuple[str, float, float]]:
    return [
        (e["name"], e["ts"], e["dur"])
        for e in trace["traceEvents"]
        if e["ph"] == "X" and (e["pid"], e["tid"]) == (rank, track)
    ]


def test_every_slice_has_its_place(trace: dict[str, Any]) -> None:
    check_events(trace["traceEvents"])
    attention = [("mla_sparse_attention", 21, 8), ("BatchMatMulV2", 21, 3), ("sparse_attention", 24, 5)]
    assert slices(trace, 0, COMPUTE) == [("MatMulV2", 0, 10), *attention, ("MatMulV2", 29, 4)]
    assert slices(trace, 1, COMPUTE) == [("MatMulV2", 0, 16), *attention, ("MatMulV2", 29, 4)]
    assert slices(trace, 0, COMM) == [("wait", 10, 6), ("hcom_allGather_", 16, 5)]
    assert slices(trace, 1, COMM) == [("hcom_allGather_", 16, 5)]
    whole = [("step 0: prefill", 0, 29), ("layer 0", 0, 29), ("step 1: prefill", 29, 4), ("layer 0", 29, 4)]
    assert slices(trace, 0, LAYERS) == slices(trace, 1, LAYERS) == whole


def test_an_arrow_joins_the_ranks_of_a_collective(trace: dict[str, Any]) -> None:
    arrows = [e for e in trace["traceEvents"] if e["ph"] in "stf"]
    assert [(e["ph"], e["pid"], e["tid"], e["ts"]) for e in arrows] == [("s", 0, COMM, 18.5), ("f", 1, COMM, 18.5)]
    assert arrows[0]["name"].startswith("all_gather")


def test_tracks_are_named_and_ordered(trace: dict[str, Any]) -> None:
    meta = {(e["name"], e["pid"], e["tid"]): e["args"] for e in trace["traceEvents"] if e["ph"] == "M"}
    assert meta["process_name", 1, 0] == {"name": "rank 1 (dp0 tp1 ep0)"}
    assert meta["process_labels", 1, 0] == {"labels": "NPU 1"}
    assert meta["process_sort_index", 1, 0] == {"sort_index": 1}
    assert meta["thread_name", 0, COMM] == {"name": "comm"}
    assert len(meta) == 2 * (3 + 2 * 3)


def test_the_file_says_what_its_times_are(trace: dict[str, Any]) -> None:
    assert trace["displayTimeUnit"] == "ns"
    assert trace["distributedInfo"] == {"backend": "hccl", "world_size": 2}
    assert trace["metadata"]["device"] == "910C_752T"
    assert trace["metadata"]["times"].startswith("predicted for Ascend 910C")


def test_written_plain_and_compressed(tmp_path: Path, trace: dict[str, Any]) -> None:
    plain = write_perfetto(hand_run(), tmp_path / "new" / "a.json")
    packed = write_perfetto(hand_run(), tmp_path / "a.json.gz")
    assert json.loads(plain.read_text()) == trace
    assert json.loads(gzip.decompress(packed.read_bytes())) == trace
    with pytest.raises(UsageError, match="cannot be written"):
        write_perfetto(hand_run(), tmp_path)


def _first(events: list[dict[str, Any]], phase: str) -> dict[str, Any]:
    return next(e for e in events if e["ph"] == phase)


@pytest.mark.parametrize(
    ("break_it", "why"),
    [
        (lambda e: next(x for x in e if x["name"] == "layer 0").update(dur=100.0), "sticks out"),
        (lambda e: _first(e, "s").update(ts=12.0), "order of time"),
        (lambda e: _first(e, "f").update(tid=COMPUTE), "in no slice"),
        (lambda e: _first(e, "f").update(id=7), "flow 1 goes s"),
        (lambda e: _first(e, "f").update(name="another"), "several names"),
        (lambda e: e.append(e.pop(0)), "metadata"),
        (lambda e: _first(e, "X").update(ph="B"), "B"),
        (lambda e: _first(e, "X").pop("args"), "X"),
        (lambda e: _first(e, "X").update(tid=9), "no name"),
        (lambda e: _first(e, "X").update(ts=0.0001), "finer"),
    ],
)
def test_the_strict_reader_is_strict(trace: dict[str, Any], break_it: Any, why: str) -> None:
    events = copy.deepcopy(trace["traceEvents"])
    break_it(events)
    with pytest.raises(AssertionError, match=why):
        check_events(events)
