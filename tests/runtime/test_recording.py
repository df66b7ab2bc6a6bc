"""record(): every c10d and functional call of a rank's own code, with group, shapes, bytes, place and module."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from emulator.runtime.comm_call import kept_bytes
from emulator.runtime.world import World
from emulator.testing.record import record

SIZE = 4
X = 24 * 4  # bytes of an [8, 3] float32 tensor


def x(rows: int = 8) -> torch.Tensor:
    return torch.ones(rows, 3)


def new(rows: int, count: int = SIZE) -> list[torch.Tensor]:
    return [torch.empty(rows, 3) for _ in range(count)]


@pytest.fixture(scope="module")
def world():
    with World(SIZE, timeout=20.0) as world:
        yield world


def recorded(world: World, body) -> list[list]:
    """Each rank's recorded calls of body(rank, group)."""

    def on_rank(rank: int, tp_group) -> list:
        with record() as trace:
            body(rank, tp_group)
        assert all(c.start_ns <= c.end_ns for c in trace.calls), "every call has ended"
        return trace.calls

    return world.run(on_rank)


def shapes(described: list) -> list:
    return [d["shape"] for d in described]


def facts(call) -> tuple:
    return call.op, call.api, shapes(call.inputs), shapes(call.outputs), call.bytes


# One line an API: what is called, and what a rank of four records. Bytes by hand: X = 8 * 3 * 4 = 96.
COLLECTIVES = {
    # 2 * 3/4 of 96
    "all_reduce": (lambda r: dist.all_reduce(x()), ("all_reduce", "all_reduce", [[8, 3]], [[8, 3]], 144)),
    # 3 * 96
    "all_gather list": (
        lambda r: dist.all_gather(new(8), x()),
        ("all_gather", "all_gather", [[8, 3]], [[8, 3]] * 4, 288),
    ),
    "all_gather single": (
        lambda r: dist.all_gather_single(torch.empty(32, 3), x()),
        ("all_gather", "all_gather_single", [[8, 3]], [[32, 3]], 288),
    ),
    "all_gather into": (
        lambda r: dist.all_gather_into_tensor(torch.empty(32, 3), x()),
        ("all_gather", "all_gather_into_tensor", [[8, 3]], [[32, 3]], 288),
    ),
    # 3/4 of 96
    "reduce_scatter list": (
        lambda r: dist.reduce_scatter(torch.empty(2, 3), [x(2) for _ in range(4)]),
        ("reduce_scatter", "reduce_scatter", [[2, 3]] * 4, [[2, 3]], 72),
    ),
    "reduce_scatter single": (
        lambda r: dist.reduce_scatter_single(torch.empty(2, 3), x()),
        ("reduce_scatter", "reduce_scatter_single", [[8, 3]], [[2, 3]], 72),
    ),
    "reduce_scatter tensor": (
        lambda r: dist.reduce_scatter_tensor(torch.empty(2, 3), x()),
        ("reduce_scatter", "reduce_scatter_tensor", [[8, 3]], [[2, 3]], 72),
    ),
    # 96 less the quarter kept
    "all_to_all list": (
        lambda r: dist.all_to_all(new(2), [x(2) for _ in range(4)]),
        ("all_to_all", "all_to_all", [[2, 3]] * 4, [[2, 3]] * 4, 72),
    ),
    "all_to_all single": (
        lambda r: dist.all_to_all_single(torch.empty(8, 3), x()),
        ("all_to_all", "all_to_all_single", [[8, 3]], [[8, 3]], 72),
    ),
    "barrier": (lambda r: dist.barrier(), ("barrier", "barrier", [], [], 0)),
    "functional all_gather": (
        lambda r: functional.all_gather_tensor(x(), 0, dist.group.WORLD) + 1,
        ("all_gather", "all_gather_tensor", [[8, 3]], [[32, 3]], 288),
    ),
    "functional all_reduce": (
        lambda r: functional.all_reduce(x(), "sum", dist.group.WORLD) + 1,
        ("all_reduce", "all_reduce", [[8, 3]], [[8, 3]], 144),
    ),
    "functional reduce_scatter": (
        lambda r: functional.reduce_scatter_tensor(x(), "sum", 0, dist.group.WORLD) + 1,
        ("reduce_scatter", "reduce_scatter_tensor", [[8, 3]], [[2, 3]], 72),
    ),
    "functional all_to_all": (
        lambda r: functional.all_to_all_single(x(), None, None, dist.group.WORLD) + 1,
        ("all_to_all", "all_to_all_single", [[8, 3]], [[8, 3]], 72),
    ),
}


@pytest.mark.parametrize("name", COLLECTIVES)
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_collective_with_op_shapes_and_bytes(world, name):
    call_it, expected = COLLECTIVES[name]
    for calls in recorded(world, lambda rank, group: call_it(rank)):
        (call,) = calls
        assert facts(call) == expected
        assert (call.group, call.members) == ("tp", [0, 1, 2, 3])
        assert {d["dtype"] for d in call.inputs} <= {"float32"}
        assert call.is_async == name.startswith("functional")
        assert call.waited
        assert call.traffic == "payload"
        assert call.site.rpartition(":")[0] == __file__


# from the root or to the root only: (rank, root) -> inputs, outputs, bytes. Root is rank 1.
ROOTED = {
    "broadcast": (lambda r: dist.broadcast(x(), 1), lambda root: ([[8, 3]], [[8, 3]], 3 * X if root else 0)),
    "reduce": (lambda r: dist.reduce(x(), 1), lambda root: ([[8, 3]], [[8, 3]], 0 if root else X)),
    "gather": (
        lambda r: dist.gather(x(), new(8) if r == 1 else None, 1),
        lambda root: ([[8, 3]], [[8, 3]] * 4 if root else [], 0 if root else X),
    ),
    # the root sends 3 of its 4 tensors
    "scatter": (
        lambda r: dist.scatter(torch.empty(2, 3), [x(2) for _ in range(4)] if r == 1 else None, 1),
        lambda root: ([[2, 3]] * 4 if root else [], [[2, 3]], 72 if root else 0),
    ),
}


@pytest.mark.parametrize("op", ROOTED)
def test_a_rooted_collective_counts_bytes_where_they_are_sent(world, op):
    call_it, expected = ROOTED[op]
    for rank, (call,) in enumerate(recorded(world, lambda rank, group: call_it(rank))):
        inputs, outputs, sent = expected(rank == 1)
        assert facts(call) == (op, op, inputs, outputs, sent)
        assert call.root == 1


def test_an_uneven_all_to_all_records_its_splits(world):
    # rank r sends j rows to rank j: 0 + 1 + 2 + 3 = 6 rows of 12 bytes, and keeps r of them
    def body(rank: int, group) -> None:
        dist.all_to_all_single(torch.empty(4 * rank, 3), x(6), [rank] * 4, [0, 1, 2, 3])

    for rank, (call,) in enumerate(recorded(world, body)):
        assert call.splits == ([0, 1, 2, 3], [rank] * 4)
        assert facts(call) == ("all_to_all", "all_to_all_single", [[6, 3]], [[4 * rank, 3]], (6 - rank) * 12)


def test_kept_bytes_of_an_uneven_list():
    assert kept_bytes([x(1), x(5)], 1, 2) == 60


@pytest.mark.parametrize(
    ("call_it", "ops"),
    [
        # sizes travel first: metadata, not counted
        (lambda r: dist.all_gather_object([None] * 4, "a"), [("all_gather", "metadata"), ("all_gather", "payload")]),
        (lambda r: dist.broadcast_object_list(["a"], 0), [("broadcast", "metadata"), ("broadcast", "payload")]),
        (
            lambda r: dist.gather_object("a", [None] * 4 if r == 0 else None, 0),
            [("all_gather", "metadata"), ("gather", "payload")],
        ),
        (
            lambda r: dist.scatter_object_list([None], list("abcd") if r == 0 else None, 0),
            [("broadcast", "metadata"), ("scatter", "payload"), ("scatter", "metadata")],
        ),
        (
            lambda r: dist.send_object_list(["a"], r + 1) if r % 2 == 0 else dist.recv_object_list([None], r - 1),
            [("message", "metadata"), ("message", "payload")],
        ),
    ],
)
def test_pickled_objects_count_once(world, call_it, ops):
    for calls in recorded(world, lambda rank, group: call_it(rank)):
        found = [("message" if c.op in ("send", "recv") else c.op, c.traffic) for c in calls]
        assert found == ops


def test_send_and_receive(world):
    def body(rank: int, group) -> None:
        if rank == 0:
            dist.send(x(), 2, tag=7)
        if rank == 2:
            dist.recv(x(), 0, tag=7)

    first, second, third, _ = recorded(world, body)
    assert not second
    assert [(*facts(c), c.peer, c.tag) for c in first] == [("send", "send", [[8, 3]], [], X, 2, 7)]
    assert [(*facts(c), c.peer, c.tag) for c in third] == [("recv", "recv", [], [[8, 3]], 0, 0, 7)]


def test_a_ring_of_batched_messages(world):
    def body(rank: int, group) -> None:
        ops = [dist.P2POp(dist.isend, x(), (rank + 1) % 4), dist.P2POp(dist.irecv, x(), (rank - 1) % 4)]
        for work in dist.batch_isend_irecv(ops):
            work.wait()

    for rank, calls in enumerate(recorded(world, body)):
        assert [(c.op, c.api, c.peer) for c in calls] == [
            ("send", "batch_isend_irecv", (rank + 1) % 4),
            ("recv", "batch_isend_irecv", (rank - 1) % 4),
        ]
        assert all(c.is_async and c.waited for c in calls)


def test_an_async_call_shows_whether_it_was_awaited(world):
    def on_rank() -> tuple:
        with record() as trace:
            work = dist.all_reduce(x(), async_op=True)
            before = trace.calls[0].waited
            work.wait()
            forgotten = dist.all_reduce(x(), async_op=True)
        told = [(c.is_async, c.waited) for c in trace.calls], before, "never awaited" in str(trace)
        forgotten.wait()
        return told

    assert world.run(on_rank) == [([(True, True), (True, False)], False, True)] * SIZE


def test_dtensor_redistribution(world):
    def on_rank(rank: int) -> list:
        mesh = init_device_mesh("cpu", (SIZE,), mesh_dim_names=("tp",))
        sharded = DTensor.from_local(x(2), mesh, [Shard(0)])
        partial = DTensor.from_local(x(), mesh, [Partial()])
        with record() as trace:
            sharded.redistribute(mesh, [Replicate()]).to_local().sum()
            partial.redistribute(mesh, [Shard(0)]).to_local().sum()
            partial.redistribute(mesh, [Replicate()]).to_local().sum()
        return [(c.op, c.api, c.group, shapes(c.inputs), shapes(c.outputs), c.waited) for c in trace.calls]

    expected = [
        ("all_gather", "DTensor.redistribute", "tp", [[2, 3]], [[8, 3]], True),
        ("reduce_scatter", "DTensor.redistribute", "tp", [[8, 3]], [[2, 3]], True),
        ("all_reduce", "DTensor.redistribute", "tp", [[8, 3]], [[8, 3]], True),
    ]
    assert world.run(on_rank) == [expected] * SIZE


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.proj = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.proj(x)
        dist.all_reduce(x)
        return x


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(3, 3)
        self.layers = nn.ModuleList([Layer(), Layer()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        dist.barrier()
        for layer in self.layers:
            x = layer(x)
        return x


def test_a_call_names_its_module(world):
    @torch.no_grad()
    def body(rank: int, group) -> None:
        Model()(x())
        dist.barrier()

    for calls in recorded(world, body):
        assert [(c.op, c.module) for c in calls] == [
            ("barrier", "Model"),
            ("all_reduce", "layers.0"),
            ("all_reduce", "layers.1"),
            ("barrier", None),
        ]


def test_counts_and_bytes_are_payload_by_group():
    def on_rank(tp_group, dp_group) -> tuple:
        mine = dist.new_group(range(4), group_desc="pipeline")
        with record() as trace:
            dist.all_reduce(x(), group=tp_group)
            dist.all_reduce(x(), group=dp_group)
            dist.all_reduce(x(), group=dp_group)
            dist.all_gather_object([None] * 2, "a", group=tp_group)
            dist.barrier(group=mine)
        return trace.counts(), trace.bytes()["dp"], trace.calls[0].members

    results = World(4, mesh={"dp": 2, "tp": 2}, timeout=20.0).run(on_rank)
    counts = {"tp": {"all_reduce": 1, "all_gather": 1}, "dp": {"all_reduce": 2}, "pipeline": {"barrier": 1}}
    # two calls, 2 * 1/2 of 96 each
    assert [r[:2] for r in results] == [(counts, {"all_reduce": 192})] * 4
    assert [r[2] for r in results] == [[0, 1], [0, 1], [2, 3], [2, 3]]


def test_nested_recorders_see_what_is_called_inside_them(world):
    def on_rank() -> tuple:
        with record() as outer:
            dist.barrier()
            with record() as inner:
                dist.all_reduce(x())
            dist.barrier()
        dist.barrier()
        return [c.op for c in outer.calls], [c.op for c in inner.calls]

    assert world.run(on_rank) == [(["barrier", "all_reduce", "barrier"], ["all_reduce"])] * SIZE


def test_a_stock_group_on_our_ranks_is_recorded_too_and_nothing_twice(world):
    def on_rank() -> list:
        stock = dist.new_group(range(4), backend="gloo", group_desc="stock")
        with record() as trace:
            dist.all_reduce(x())
            dist.all_reduce(x(), group=stock)
            functional.all_reduce(x(), "sum", dist.group.WORLD) + 1
        return [c.group for c in trace.calls]

    assert world.run(on_rank) == [["tp", "stock", "tp"]] * SIZE


# -- a process that is none of ours ------------------------------------------------------------------------------------

SCRIPT = """
import warnings
import torch, torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from emulator.testing.asserts import assert_same_on_all_ranks, assert_sums_to
from emulator.testing.record import record

warnings.simplefilter("ignore")
dist.init_process_group("gloo")
rank, x = dist.get_rank(), torch.ones(4, 3)
tp = dist.new_group([0, 1], group_desc="mesh_tp")
mesh = init_device_mesh("cpu", (2,))

class Block(torch.nn.Module):
    def forward(self, x):
        dist.all_reduce(x, group=tp)

def new(rows):
    return [torch.ones(rows, 3), torch.ones(rows, 3)]

with record() as outer, record() as trace:
    torch.nn.Sequential(Block())(x)
    work = dist.all_reduce(x, async_op=True)
    before = trace.calls[-1].waited
    work.wait()
    dist.all_reduce(x, op=dist.ReduceOp.MAX, async_op=True)
    dist.all_gather(new(4), x)
    dist.all_gather_single(torch.empty(8, 3), x)
    dist.all_gather_object([None] * 2, rank)
    dist.reduce_scatter(torch.empty(2, 3), new(2))
    dist.reduce_scatter_single(torch.empty(2, 3), x)
    dist.all_to_all(new(2), new(2))
    dist.all_to_all_single(torch.empty(2 + 4 * rank, 3), x, [1 + 2 * rank] * 2, [1, 3])
    dist.broadcast(x, 1)
    dist.reduce(x, 1)
    dist.gather(x, new(4) if rank == 0 else None, 0)
    dist.scatter(x, new(4) if rank == 0 else None, 0)
    dist.barrier()
    dist.send(x, 1) if rank == 0 else dist.recv(x, 0)
    for w in dist.batch_isend_irecv([dist.P2POp(dist.isend, x, 1 - rank), dist.P2POp(dist.irecv, x.clone(), 1 - rank)]):
        w.wait()
    functional.all_reduce(x, "sum", tp) + 1
    DTensor.from_local(x, mesh, [Shard(0)]).redistribute(mesh, [Replicate()]).to_local() + 1
    assert_same_on_all_ranks(x)  # our own traffic: not recorded
    assert_sums_to(x, 2 * x, tp)
assert [c.op for c in outer.calls] == [c.op for c in trace.calls]
assert dist.Work.wait.__name__ == "wait" and not before
if rank == 0:
    for c in trace.calls:
        shapes = [d["shape"] for d in c.inputs], [d["shape"] for d in c.outputs]
        how = ("async " if c.is_async else "") + ("awaited" if c.waited else "open")
        print(c.op, c.group, *shapes, c.bytes, how, sep="|")
    first, last = trace.calls[0], trace.calls[2]
    print(first.module, first.site.rpartition("/")[2], last.reduce_op, trace.calls[10].splits, trace.calls[10].members)
dist.destroy_process_group()
"""

# rank 0 of 2; X here is 4 * 3 * 4 = 48 bytes
EXPECTED = """
all_reduce|tp|[[4, 3]]|[[4, 3]]|48|awaited
all_reduce|world|[[4, 3]]|[[4, 3]]|48|async awaited
all_reduce|world|[[4, 3]]|[[4, 3]]|48|async open
all_gather|world|[[4, 3]]|[[4, 3], [4, 3]]|48|awaited
all_gather|world|[[4, 3]]|[[8, 3]]|48|awaited
all_gather|world|[[1]]|[[1], [1]]|8|awaited
all_gather|world|[[5]]|[[5], [5]]|5|awaited
reduce_scatter|world|[[2, 3], [2, 3]]|[[2, 3]]|24|awaited
reduce_scatter|world|[[4, 3]]|[[2, 3]]|24|awaited
all_to_all|world|[[2, 3], [2, 3]]|[[2, 3], [2, 3]]|24|awaited
all_to_all|world|[[4, 3]]|[[2, 3]]|36|awaited
broadcast|world|[[4, 3]]|[[4, 3]]|0|awaited
reduce|world|[[4, 3]]|[[4, 3]]|48|awaited
gather|world|[[4, 3]]|[[4, 3], [4, 3]]|0|awaited
scatter|world|[[4, 3], [4, 3]]|[[4, 3]]|48|awaited
barrier|world|[]|[]|0|awaited
send|world|[[4, 3]]|[]|48|awaited
send|world|[[4, 3]]|[]|48|async awaited
recv|world|[]|[[4, 3]]|0|async awaited
all_reduce|tp|[[4, 3]]|[[4, 3]]|48|async awaited
all_gather|world|[[4, 3]]|[[8, 3]]|48|async awaited
0 script.py:18 max ([1, 3], [1, 1]) [0, 1]
"""


def test_a_plain_torchrun_script_on_stock_gloo(tmp_path: Path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().splitlines() == EXPECTED.strip().splitlines()
