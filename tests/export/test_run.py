"""Runs from trace folders: with a device and without, in every format."""

import json
from pathlib import Path

import pytest

from emulator.cost.replay import Options, replay
from emulator.errors import UsageError
from emulator.export.chakra import write_chakra
from emulator.export.communication import calls_of
from emulator.export.mindstudio import kernel_rows
from emulator.export.perfetto import chrome_trace
from emulator.export.run import Target, find_target, load_run, load_traces, make_run
from emulator.export.trace_view import trace_view

from .chrome_events import check_events

OVERLAPPED = Options(overlap=True)


@pytest.mark.parametrize("target", [None, find_target("910C_752T"), find_target("910B3", OVERLAPPED)])
def test_real_runs_keep_every_rule(traced: Path, target: Target | None, tmp_path: Path) -> None:
    run = load_run(traced, target)
    trace = chrome_trace(run)
    check_events(trace["traceEvents"])
    for rank in run.ranks:
        check_events(trace_view(run, rank, calls_of(run, rank)))
        rows = kernel_rows(run, rank, calls_of(run, rank))
        assert {len(row) for row in rows} == {16}
        assert [row[5] for row in rows] == sorted(row[5] for row in rows)
    assert len(write_chakra(run, tmp_path)) == 4
    assert json.loads((tmp_path / "comm_group.json").read_text())  # tp groups of both dp ranks, and the ep group
    flows = {e["id"] for e in trace["traceEvents"] if e["ph"] == "s"}
    assert len(flows) == sum(len(timeline.meetings) for timeline in run.timelines)


def test_a_replayed_run_is_the_replay(traced: Path) -> None:
    target = find_target("910C_752T")
    assert target is not None
    run = load_run(traced, target)
    assert list(run.timelines) == replay(load_traces(traced), target.device)
    assert [at for at, _ in run.starts()] == [0.0, run.timelines[0].seconds]
    assert [run.step(timeline)["phase"] for timeline in run.timelines] == ["prefill", "decode"]
    assert run.metadata()["replay"]["overlap"] is False


def test_members_of_a_collective(traced: Path) -> None:
    run = load_run(traced)
    groups = {run.members(p) for own in run.timelines[0].slices for p in own if p.stream == "comm"}
    assert groups == {(0, 1), (2, 3), (0, 1, 2, 3)}
    linear = next(p for p in run.timelines[0].slices[2] if p.record["op"] == "linear")
    assert run.members(linear) == (2,)


def test_without_a_device_the_files_say_so(traced: Path) -> None:
    run = load_run(traced)
    assert run.times.startswith("wall clock of a shape-only emulation")
    about = chrome_trace(run)
    assert about["metadata"]["device"] is None
    assert about["metadata"]["times"] == run.times
    assert about["distributedInfo"]["backend"] == "gloo"


def test_refusals(traced: Path) -> None:
    traces = load_traces(traced)
    with pytest.raises(UsageError, match="the mesh has 4 ranks, and there is no trace of 1, 3"):
        make_run([traces[0], traces[2]])
    with pytest.raises(UsageError, match="holds no step"):
        make_run([(header, []) for header, _ in traces])
    with pytest.raises(UsageError, match="give --device"):
        find_target(None, OVERLAPPED)
    with pytest.raises(UsageError, match="unknown device 'nothing'"):
        find_target("nothing")
