"""Ascend profiler folders: exact columns and keys, and each number of the made run."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from emulator.export.mindstudio import write_mindstudio

from .chrome_events import check_events
from .timelines import hand_run

KERNEL_DETAILS = (
    "Step Id,Device_id,Name,Type,Accelerator Core,Start Time(us),Duration(us),Wait Time(us),Block Num,Mix Block Num,"
    "Input Shapes,Input Data Types,Input Formats,Output Shapes,Output Data Types,Output Formats"
)
STEP_TRACE = (
    "Device_id,Step,Computing,Communication(Not Overlapped),Overlapped,Communication,Free,Stage,Bubble,"
    "Communication(Not Overlapped and Exclude Receive),Preparing"
)
TIMES = {
    "Start Timestamp(us)", "Elapse Time(ms)", "Transit Time(ms)", "Wait Time(ms)", "Synchronization Time(ms)",
    "Idle Time(ms)", "Wait Time Ratio", "Synchronization Time Ratio",
}  # fmt: skip
BANDWIDTHS = {
    "Transit Size(MB)", "Transit Time(ms)", "Bandwidth(GB/s)", "Large Packet Ratio", "Size Distribution",
}  # fmt: skip
LINK = {"Transport Type", "Transit Size(MB)", "Transit Time(ms)", "Bandwidth(GB/s)", "Op Name"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return write_mindstudio(hand_run(), tmp_path_factory.mktemp("insight"))


def table(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def load(folder: Path, name: str) -> Any:
    return json.loads((folder / "ASCEND_PROFILER_OUTPUT" / name).read_text())


def test_the_folder_that_insight_looks_for(folders: list[Path]) -> None:
    assert [f.name for f in folders] == ["rank0_by-hand_ascend_pt", "rank1_by-hand_ascend_pt"]
    assert sorted(p.name for p in folders[1].iterdir()) == [
        "ASCEND_PROFILER_OUTPUT", "profiler_info_1.json", "profiler_metadata.json",
    ]  # fmt: skip
    assert sorted(p.name for p in (folders[1] / "ASCEND_PROFILER_OUTPUT").iterdir()) == [
        "communication.json", "communication_matrix.json", "kernel_details.csv", "step_trace_time.csv",
        "trace_view.json",
    ]  # fmt: skip
    assert json.loads((folders[1] / "profiler_info_1.json").read_text())["rank_id"] == 1
    metadata = json.loads((folders[1] / "profiler_metadata.json").read_text())
    assert metadata["parallel_group_info"] == {"tp0": {"group_name": "tp", "group_rank": 1, "global_ranks": [0, 1]}}
    assert metadata["emulation"]["times"].startswith("predicted for Ascend 910C")


def test_kernel_details(folders: list[Path]) -> None:
    path = folders[0] / "ASCEND_PROFILER_OUTPUT" / "kernel_details.csv"
    assert path.read_text().splitlines()[0] == KERNEL_DETAILS
    rows = table(path)
    times = [(r["Type"], *(float(r[k]) for k in ("Start Time(us)", "Duration(us)", "Wait Time(us)"))) for r in rows]
    # the gather stands from 10, when its rank is ready, until 21; attention follows 11 after the linear ended at 10
    assert times == [
        ("MatMulV2", 0, 10, 0), ("hcom_allGather_", 10, 11, 10), ("BatchMatMulV2", 21, 3, 11),
        ("mla_sparse_attention", 24, 5, 0), ("MatMulV2", 29, 4, 0),
    ]  # fmt: skip
    linear, gather, absorb, sparse, later = rows
    assert linear["Name"] == "model.layers.0.mlp.gate/MatMulV2"
    assert gather["Name"].startswith("hcom_allGather__")
    assert [r["Accelerator Core"] for r in rows] == ["AI_CORE", "HCCL", "AI_CORE", "MIX_AIC", "AI_CORE"]
    assert (linear["Step Id"], later["Step Id"], linear["Device_id"]) == ("0", "1", "0")
    # a matmul as the kernel sees it, [m, k] and [k, n]; quotes are part of the text
    assert (linear["Input Shapes"], linear["Output Shapes"]) == ('"4,8;8,6"', '"4,6"')
    assert (absorb["Input Shapes"], absorb["Output Shapes"]) == ('"2,8,2;2,2,3"', '"2,8,3"')
    # absorbed: 2 heads of width 3 over 8 keys, 4 of them chosen, no rope part
    assert (sparse["Input Shapes"], sparse["Output Shapes"]) == ('"8,2,3;8,1,3;8,1,3;8,1,4;8,2,0;8,1,0"', '"8,2,3"')
    assert sparse["Input Data Types"] == "DT_BF16;DT_BF16;DT_BF16;INT32;DT_BF16;DT_BF16"
    assert (linear["Input Data Types"], linear["Input Formats"]) == ("DT_BF16;DT_BF16", "ND;ND")


def test_step_trace_time(folders: list[Path]) -> None:
    path = folders[0] / "ASCEND_PROFILER_OUTPUT" / "step_trace_time.csv"
    assert path.read_text().splitlines()[0] == STEP_TRACE
    rows = [[float(value) for value in row.values()] for row in table(path)]
    # rank 0: 10 + 8 computing, 6 + 5 in the collective, nothing free of 29; rank 1: 16 + 8 and 5
    assert rows == [[0, 0, 18, 11, 0, 11, 0, 29, 0, 11, 0], [0, 1, 4, 0, 0, 0, 0, 4, 0, 0, 0]]
    rows = [[float(value) for value in row.values()] for row in table(folders[1] / path.relative_to(folders[0]))]
    assert rows[0] == [1, 0, 24, 5, 0, 5, 0, 29, 0, 5, 0]


def test_communication(folders: list[Path]) -> None:
    found = load(folders[0], "communication.json")
    assert list(found) == ["step0", "step1"]
    assert found["step0"]["p2p"] == {}
    key, total = found["step0"]["collective"]
    assert key.startswith("hcom_allGather__")
    # msprof-analyze's hash of "tp0": ((116 * 29 + 112) * 29 + 48) and ((116 * 131 + 112) * 131 + 48)
    assert key.partition("@")[2] == str(100852 << 32 | 2005396)
    assert total == "Total Op Info"
    info = found["step0"]["collective"][key]
    assert info == found["step0"]["collective"][total]
    assert info.keys() == {"Communication Time Info", "Communication Bandwidth Info"}
    times = info["Communication Time Info"]
    assert times.keys() == TIMES
    assert (times["Start Timestamp(us)"], times["Elapse Time(ms)"]) == (10.0, 0.011)
    assert (times["Transit Time(ms)"], times["Wait Time(ms)"], times["Wait Time Ratio"]) == (0.005, 0.006, 0.5455)
    bands = info["Communication Bandwidth Info"]
    assert bands.keys() == {"RDMA", "HCCS", "PCIE", "SDMA", "SIO"}
    assert all(band.keys() == BANDWIDTHS for band in bands.values())
    # ranks 0 and 1 share a package: 48 bytes over SIO in 5 us
    assert (bands["SIO"]["Transit Size(MB)"], bands["SIO"]["Bandwidth(GB/s)"]) == (48e-6, 0.0096)
    assert bands["SIO"]["Size Distribution"] == {"4.8e-05": [1, 0.005]}
    assert (bands["HCCS"]["Transit Size(MB)"], bands["HCCS"]["Size Distribution"]) == (0.0, {})


def test_both_ranks_name_a_call_alike(folders: list[Path]) -> None:
    zero, one = (load(folder, "communication.json")["step0"]["collective"] for folder in folders)
    assert list(zero) == list(one)


def test_communication_matrix(folders: list[Path]) -> None:
    matrix = load(folders[1], "communication_matrix.json")
    links = matrix["step0"]["collective"]
    (group,) = {key.partition("@")[2] for key in links}
    assert set(links) == {
        f"allgather-{which}@{group}" for which in ("top1", "middle", "bottom1", "bottom2", "bottom3", "total")
    }
    for link in links.values():
        assert set(link) == {"1-0", "1-1"}
        assert link["1-0"].keys() == link["1-1"].keys() == LINK
        assert (link["1-1"]["Transport Type"], link["1-1"]["Transit Size(MB)"]) == ("LOCAL", 0.0)
        assert (link["1-0"]["Transport Type"], link["1-0"]["Transit Size(MB)"]) == ("SIO", 48e-6)
    assert matrix["step1"] == {"p2p": {}, "collective": {}}


def test_trace_view(folders: list[Path]) -> None:
    events = load(folders[0], "trace_view.json")
    check_events(events)
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    tracks = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert set(names.values()) == {"Ascend Hardware", "Communication", "Overlap Analysis"}
    found: dict[tuple[str, str], list[tuple[str, float, float]]] = {}
    for e in events:
        if e["ph"] == "X":
            place = names[e["pid"]], tracks[e["pid"], e["tid"]].partition(" ")[0]
            found.setdefault(place, []).append((e["name"].partition("__")[0], e["ts"], e["dur"]))
    assert found["Ascend Hardware", "Stream"] == [
        ("MatMulV2", 0, 10), ("BatchMatMulV2", 21, 3), ("mla_sparse_attention", 24, 5), ("MatMulV2", 29, 4),
    ]  # fmt: skip
    assert found["Communication", "Group"] == [("hcom_allGather", 10, 11)]
    assert found["Overlap Analysis", "Computing"] == [("Computing", 0, 10), ("Computing", 21, 8), ("Computing", 29, 4)]
    assert found["Overlap Analysis", "Communication(Not"] == [("Communication(Not Overlapped)", 10, 11)]
    assert ("Overlap Analysis", "Free") not in found
