"""torch's own torchfrtrace opens the dumps, finds nothing in a matching run, and names the rank at fault otherwise."""

import contextlib
import gc
import logging
import pickle
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.flight_recorder import fr_trace

from emulator.errors import RankError, UsageError
from emulator.runtime.comm_call import CommCall
from emulator.runtime.mesh import Mesh
from emulator.runtime.world import World
from emulator.testing.record import record
from emulator.trace.flight_recorder import write_flight_records

SIZE = 4
CULPRIT = re.compile(r"Culprit rank (\d)")


def x(rows: int = 4) -> torch.Tensor:
    return torch.ones(rows, 3)


@pytest.fixture
def analyse(tmp_path: Path, caplog):
    """Writes the calls and returns what torchfrtrace says; empty when it has nothing to say."""

    def run(calls: dict, groups=None) -> str:
        write_flight_records(tmp_path / "dumps", calls, groups)
        with caplog.at_level(logging.INFO, logger="Flight Recorder"):
            caplog.clear()
            try:
                fr_trace.main([str(tmp_path / "dumps"), "-p", "flight_"])
            finally:
                gc.enable()  # the loader turns it off
        return "\n".join(r.getMessage() for r in caplog.records if "tabulate is not installed" not in r.getMessage())

    return run


@pytest.fixture(scope="module")
def worlds():
    with World(SIZE, timeout=10.0) as flat, World(SIZE, mesh={"dp": 2, "tp": 2}, timeout=10.0) as grid:
        yield {"flat": flat, "grid": grid}


def calls_of(world: World, folder: Path, body) -> dict[int, list[CommCall]]:
    """The calls of every rank, whether or not the run fails."""

    def on_rank(context, rank: int) -> None:
        with record() as trace:
            try:
                body(rank, context.groups)
            finally:
                (folder / f"calls{rank}").write_bytes(pickle.dumps(trace.calls))

    with contextlib.suppress(RankError):
        world.run(on_rank)
    return {rank: pickle.loads((folder / f"calls{rank}").read_bytes()) for rank in range(world.size)}


class Attention(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(x)
        return x


def everything(rank: int, groups: dict) -> None:
    """Every op once, on two groups, with lists and single tensors, roots, objects, messages and an unawaited call."""
    group = groups["tp"]
    size, me = group.size(), group.rank()
    Attention()(x())
    dist.all_gather([torch.empty(4, 3) for _ in range(size)], x(), group=group)
    dist.all_gather_single(torch.empty(4 * size, 3), x(), group=group)
    dist.reduce_scatter(torch.empty(4, 3), [x() for _ in range(size)], group=group)
    dist.reduce_scatter_single(torch.empty(4, 3), x(4 * size), group=group)
    dist.all_to_all([torch.empty(4, 3) for _ in range(size)], [x() for _ in range(size)], group=group)
    dist.all_gather_object([None] * size, rank, group=group)
    dist.broadcast(x(), group_src=1, group=group)
    dist.reduce(x(), group_dst=1, group=group)
    dist.gather(x(), [torch.empty(4, 3) for _ in range(size)] if me == 1 else None, group_dst=1, group=group)
    dist.scatter(torch.empty(4, 3), [x() for _ in range(size)] if me == 1 else None, group_src=1, group=group)
    dist.barrier()
    if rank in (0, 3):
        dist.send(x(), 3 - rank) if rank == 0 else dist.recv(x(), 0)
    ring = [dist.P2POp(dist.isend, x(), (rank + 1) % 4), dist.P2POp(dist.irecv, x(), (rank - 1) % 4)]
    for work in dist.batch_isend_irecv(ring):
        work.wait()
    last = dist.all_reduce(x(), group=group, async_op=True)
    if rank != 2:
        last.wait()


@pytest.mark.parametrize("kind", ["flat", "grid"])
def test_a_matching_run_has_no_complaint(worlds, tmp_path, analyse, kind):
    calls = calls_of(worlds[kind], tmp_path, everything)
    assert {c.op for c in calls[0]} >= {"all_to_all", "gather", "send", "barrier"}
    assert analyse(calls) == ""


def dispatch(rank: int, groups: dict) -> None:
    """Mixture of experts: rank r sends j rows to rank j."""
    dist.all_to_all_single(torch.empty(4 * rank, 3), x(6), [rank] * 4, [0, 1, 2, 3])
    # back again
    dist.all_to_all_single(torch.empty(6, 3), x(4 * rank), [0, 1, 2, 3], [rank] * 4)
    # by chance even on rank 0 only: two rows to each; the others get as many from it
    rows = 8 if rank == 0 else 4
    dist.all_to_all_single(torch.empty(5, 3), x(rows), [2, 1, 1, 1], [rows // 4] * 4)


def test_uneven_splits_are_no_mismatch(worlds, tmp_path, analyse):
    calls = calls_of(worlds["flat"], tmp_path, dispatch)
    assert [len(c) for c in calls.values()] == [3] * SIZE
    assert analyse(calls) == ""


def skipped(rank: int, groups: dict) -> None:
    dist.barrier()
    if rank != 2:
        Attention()(x())


def swapped(rank: int, groups: dict) -> None:
    dist.barrier()
    for op in ("reduce", "gather") if rank != 2 else ("gather", "reduce"):
        if op == "reduce":
            dist.all_reduce(x())
        else:
            dist.all_gather_single(torch.empty(16, 3), x())


def added(rank: int, groups: dict) -> None:
    if rank == 2:
        dist.barrier()
    dist.all_reduce(x())


def another_size(rank: int, groups: dict) -> None:
    dist.all_reduce(x(5 if rank == 2 else 4))


def another_dtype(rank: int, groups: dict) -> None:
    dist.all_reduce(x().double() if rank == 2 else x())


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (swapped, "does not match found collective type: '_all_gather_base'"),
        (added, "Expected collective type: 'all_reduce' does not match found collective type: 'barrier'"),
        (another_size, "Expected input sizes: '[[4, 3]]' does not match found input sizes: '[[5, 3]]'"),
        (another_dtype, "COLLECTIVE_DTYPE_MISMATCH"),
    ],
)
def test_the_rank_at_fault_is_named(worlds, tmp_path, analyse, fault, said):
    found = analyse(calls_of(worlds["flat"], tmp_path, fault))
    # Which rank it reads first is the file system's choice. When that is rank 2 it takes it to be right and blames the
    # others; the note then tells.
    if set(CULPRIT.findall(found)) == {"2"}:
        assert said in found
    else:
        assert "rank 2 calls" in found
    assert f"at {__file__}:" in found


def test_a_skipped_call_names_the_rank_and_the_module(worlds, tmp_path, analyse):
    found = analyse(calls_of(worlds["flat"], tmp_path, skipped))
    assert "Not all ranks joining collective, sequence number: 2" in found
    assert "missing ranks: {2}" in found
    assert "collective state: scheduled" in found
    assert f"Attention (all_reduce) at {__file__}:" in found


# -- from calls written by hand ----------------------------------------------------------------------------------------


def call(op: str = "all_reduce", rows: int = 4, **fields) -> dict:
    sizes = [{"shape": [rows, 3], "dtype": "float32"}]
    defaults = {
        "group": "tp",
        "members": [0, 1, 2],
        "inputs": sizes,
        "outputs": sizes,
        "site": "model.py:7",
        "end_ns": 1,
    }
    return vars(CommCall(op=op, api=op, **{**defaults, **fields}))


def entries(folder: Path, rank: int) -> list[dict]:
    return pickle.loads((folder / "dumps" / f"flight_{rank}").read_bytes())["entries"]


@pytest.mark.parametrize("culprit", [0, 1, 2])
def test_the_minority_is_noted_whichever_rank_is_read_first(analyse, tmp_path, culprit):
    # the analyser blames all others when it reads the odd one first
    analyse({r: [call(), call("broadcast" if r == culprit else "all_reduce")] for r in range(3)})
    notes = {r: [f["name"] for f in entries(tmp_path, r)[1]["frames"]] for r in range(3)}
    others = ", ".join(str(r) for r in range(3) if r != culprit)
    assert notes.pop(culprit) == [
        f"rank {culprit} calls broadcast [4, 3] float32; ranks {others} call all_reduce [4, 3] float32",
        "broadcast",
    ]
    assert all(names == ["all_reduce"] for names in notes.values())


def test_a_rank_that_died_has_an_empty_dump_and_is_missing(analyse):
    found = analyse({0: [call()], 1: [call()]})
    assert "missing ranks: {2}" in found


def test_calls_that_a_rank_no_longer_remembers_are_left_out(analyse, tmp_path):
    # rank 1 kept the last two of three calls only
    whole = [call(rows=n, number=n) for n in (1, 2, 3)]
    assert analyse({0: whole, 1: whole[1:], 2: whole}) == ""
    assert [e["collective_seq_id"] for e in entries(tmp_path, 0)] == [2, 3]


def test_a_message_without_its_receiver(analyse):
    sent = call("send", outputs=[], peer=2)
    found = analyse({0: [sent], 1: [], 2: []})
    assert "collective: hccl:send 0->1" in found  # in the pair of ranks 0 and 2
    assert "missing ranks: {2}" in found
    assert "group info: 0:tp 0->2" in found


def test_a_receive_from_anyone_is_not_compared(analyse):
    sent, taken = call("send", outputs=[], peer=2), call("recv", inputs=[], peer=None)
    assert analyse({0: [sent], 1: [], 2: [taken]}) == ""


def test_groups_without_a_call_are_listed(analyse, tmp_path):
    mesh = Mesh(dp=2, tp=2)
    assert analyse({rank: [] for rank in range(4)}, {axis: mesh.groups(axis) for axis in ("dp", "tp")}) == ""
    config = pickle.loads((tmp_path / "dumps" / "flight_3").read_bytes())["pg_config"]
    assert [(c["desc"], c["ranks"]) for c in config.values()] == [("dp", "[1, 3]"), ("tp", "[2, 3]")]


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="cannot be written"):
        write_flight_records(tmp_path / "file", {0: []})


def test_the_command_line_tool_opens_the_dumps(tmp_path):
    write_flight_records(tmp_path, {0: [call()], 1: [call(rows=5)], 2: [call()]})
    command = [sys.executable, "-m", "torch.distributed.flight_recorder.fr_trace", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "SIZE_OR_SYNTAX_MISMATCH" in done.stderr
    assert "all_reduce at model.py:7" in done.stderr
