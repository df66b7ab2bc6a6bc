"""Ranks that raise, die or stall end the run for all, with a culprit, and leave nothing behind."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest
import torch

from emulator.errors import RankError, UsageError
from emulator.runtime.collectives import Collectives
from emulator.runtime.mesh import Mesh
from emulator.runtime.rank_process import RankContext
from emulator.runtime.world import World

TIMEOUT = 2.0


def _reduce(context: RankContext) -> float:
    collectives = Collectives(context.mesh, context.rank, context.board, context.transport, context.timeout)
    names = {"node": "all_reduce_7", "module": "model.layers.3.mlp", "layout": "partial"}
    return float(collectives.call("all_reduce", torch.ones(2), "tp", context.mesh.tp, **names)[0])


def _faulty(fault):
    def body(context: RankContext) -> float:
        context.board.set_status(context.rank, "running linear (linear_9) of model.layers.3.self_attn.o_proj")
        if context.rank == 1:
            fault()
        return _reduce(context)

    return body


def _raise() -> None:
    raise FloatingPointError("bad value")


def _exit() -> None:
    os._exit(7)


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def _sleep() -> None:
    time.sleep(60)


def _spin() -> None:
    while True:
        pass


def test_results_come_in_rank_order_and_ranks_share_memory():
    big = torch.arange(1000)
    results = World(Mesh(tp=4)).run(lambda context: (context.rank, int(big.sum()), _reduce(context)))
    assert results == [(r, 499500, 4.0) for r in range(4)]


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (_raise, "rank 1: FloatingPointError: bad value"),
        (_exit, "rank 1: Died: exited with code 7"),
        (_kill, "rank 1: Died: killed by SIGKILL"),
        (_stop, "rank 1"),
        (_sleep, "rank 1"),
        (_spin, "rank 1"),
    ],
)
def test_a_failing_rank_ends_the_run_with_its_name(fault, message):
    before = set(psutil.Process().children(recursive=True))  # other tests' ranks, which live on
    started = time.monotonic()
    with pytest.raises(RankError, match=message) as caught:
        World(Mesh(tp=3), timeout=TIMEOUT).run(_faulty(fault))
    assert time.monotonic() - started < 20  # not the 60 s of a sleeping rank; the exact bound: test_world_run_matrix
    assert "model.layers.3.self_attn.o_proj" in str(caught.value)
    new = set(psutil.Process().children(recursive=True)) - before
    assert not [p for p in new if p.status() != psutil.STATUS_ZOMBIE]
    left = [p for folder in ("/dev/shm", tempfile.gettempdir()) for p in Path(folder).glob(f"emulator-{os.getpid()}-*")]
    assert not left


def test_a_skipped_collective_names_the_rank_that_did_not_come():
    def body(context: RankContext) -> float:
        if context.rank == 2:
            context.board.set_status(2, "running swiglu (swiglu_3) of model.layers.0.mlp")
            time.sleep(30)
        return _reduce(context)

    with pytest.raises(RankError, match=r"rank 2.*swiglu_3") as caught:
        World(Mesh(tp=3), timeout=TIMEOUT).run(body)
    # what the others were doing is part of the report
    assert "all_reduce_7" in str(caught.value) + str(caught.value.report["others"])


def test_a_users_mistake_inside_a_rank_stays_a_users_mistake():
    def body(context: RankContext) -> None:
        raise UsageError("wrong size 3 (allowed: 4)")

    with pytest.raises(UsageError, match=r"^wrong size 3 \(allowed: 4\)$"):
        World(Mesh(tp=2)).run(body)


def test_ranks_die_with_their_parent():
    # a parent that is killed cannot clean up: the ranks must notice by themselves
    read, write = os.pipe()
    parent = os.fork()
    if parent == 0:

        def body(context: RankContext) -> None:
            os.write(write, f"{os.getpid()}\n".encode())
            time.sleep(60)

        World(Mesh(tp=2), communicate=False).run(body)
        os._exit(0)
    pids = b""
    while pids.count(b"\n") < 2:
        pids += os.read(read, 100)
    os.kill(parent, signal.SIGKILL)
    os.waitpid(parent, 0)
    deadline = time.monotonic() + 5
    ranks = [int(p) for p in pids.split()]

    def alive(pid: int) -> bool:
        return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE

    while any(alive(p) for p in ranks) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(alive(p) for p in ranks)


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_command_that_is_ended_leaves_nothing(how, tmp_path):
    command = [sys.executable, "-m", "emulator", "run", "glm-5.1", "--tp", "4", "--ep", "4", "--out", str(tmp_path)]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    parent = psutil.Process(process.pid)
    deadline = time.monotonic() + 30
    while len(parent.children()) < 4 and time.monotonic() < deadline:
        time.sleep(0.05)
    ranks = parent.children()
    assert len(ranks) == 4
    process.send_signal(how)
    process.wait(timeout=10)
    _, alive = psutil.wait_procs(ranks, timeout=5)
    assert not [p for p in alive if p.status() != psutil.STATUS_ZOMBIE]
    folders = ("/dev/shm", tempfile.gettempdir())
    assert not [p for folder in folders for p in Path(folder).glob(f"emulator-{process.pid}-*")]


def test_closures_objects_and_tensors_travel(tmp_path):
    offset = torch.arange(6.0).reshape(2, 3)

    class Local:
        def __init__(self, value: torch.Tensor):
            self.value = value

    def body(scale, rank, mesh, dp_group, tp_group):
        return Local(offset * scale + rank), mesh.describe(), dp_group.size(), tp_group.size()

    with World(4, mesh={"dp": 2, "tp": 2}) as world:
        for scale in (1, 10):  # ranks persist: the second call starts nothing
            pids = [p.pid for p in world._processes]
            for rank, (found, mesh, dp, tp) in enumerate(world.run(body, scale)):
                assert torch.equal(found.value, offset * scale + rank)
                assert (mesh, dp, tp) == ({"dp": 2, "tp": 2, "ep": 1}, 2, 2)
            assert [p.pid for p in world._processes] == pids
        world.run(lambda: sum(range(5_000_000)))
        assert all(u["peak_rss_mb"] > 50 and u["cpu_s"] > 0.03 for u in world.usage)


def test_exceptions_come_in_rank_order_and_the_world_goes_on():
    def body(rank):
        if rank % 2:
            raise KeyError(f"rank {rank}")
        return rank

    with World(4) as world:
        outcomes = world.run(body, return_exceptions=True)
        assert [isinstance(o, Exception) for o in outcomes] == [False, True, False, True]
        assert "rank 3" in str(outcomes[3])
        with pytest.raises(RankError, match=r"rank 1: KeyError: 'rank 1'") as caught:
            world.run(body)
        assert caught.value.outcomes[2] == 2
        assert world.run(lambda rank: rank) == [0, 1, 2, 3]


def test_a_memory_limit_makes_an_error_of_a_leak():
    with World(2, memory_limit=1 << 30) as world, pytest.raises(RankError, match="rank 1"):
        world.run(lambda rank: torch.ones(1 << 30, dtype=torch.int8).sum() if rank else None)


@pytest.mark.parametrize(
    ("size", "mesh", "axis"),
    [(4, {"dp": 1, "tp": 4}, "tp"), (4, {"dp": 4}, "dp"), (4, {"cp": 4}, "cp"), (4, {"dp": 2, "tp": 2, "ep": 2}, "tp")],
)
def test_groups_are_named_by_the_first_axis_that_has_their_ranks(size, mesh, axis):
    with World(size, mesh=mesh) as world:
        labels = world.run(lambda context: context.groups[axis].label)
    assert labels == [axis] * size


def test_a_call_on_many_tensors_fits_the_board():
    def body(rank):
        size = torch.distributed.get_world_size()
        outputs = [torch.zeros(1, 1, 64, dtype=torch.bfloat16) for _ in range(size)]
        inputs = [torch.full((1, 1, 64), float(rank), dtype=torch.bfloat16) for _ in range(size)]
        torch.distributed.all_to_all(outputs, inputs)
        return [float(o[0, 0, 0]) for o in outputs]

    assert World(24).run(body) == [[float(r) for r in range(24)]] * 24
