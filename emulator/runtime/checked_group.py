"""A torch.distributed process group that checks every call on the board, and records it, before gloo runs it.

It stands where c10d looks for a group, so the c10d functions, functional collectives and DTensor all pass through it.
A call is posted when it is made. gloo runs it once all members have posted the same call: at wait() (at once for a
blocking call), or when a later call of the group is about to run, in the order of the calls.
"""

import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from emulator.errors import UsageError
from emulator.runtime.board import AXES, NUM_GROUPS, Board, compare_calls, compare_pairs
from emulator.runtime.comm_call import (
    ASYNC_APIS,
    CommCall,
    caller,
    describe_tensors,
    group_label,
    kept_bytes,
    sent_bytes,
    traffic_of,
)
from emulator.runtime.comm_log import CommLog
from emulator.runtime.point_to_point import PointToPoint

BACKEND = "emulator"

# c10d method -> (canonical op, position of the inputs, position of the outputs)
_METHODS: dict[str, tuple[str, int, int]] = {
    "allreduce": ("all_reduce", 0, 0),
    "allreduce_coalesced": ("all_reduce", 0, 0),
    "reduce": ("reduce", 0, 0),
    "broadcast": ("broadcast", 0, 0),
    "allgather": ("all_gather", 1, 0),
    "allgather_coalesced": ("all_gather", 1, 0),
    "_allgather_base": ("all_gather", 1, 0),
    "all_gather_single": ("all_gather", 1, 0),
    "allgather_into_tensor_coalesced": ("all_gather", 1, 0),
    "all_gather_single_coalesced": ("all_gather", 1, 0),
    "gather": ("gather", 1, 0),
    "scatter": ("scatter", 1, 0),
    "reduce_scatter": ("reduce_scatter", 1, 0),
    "_reduce_scatter_base": ("reduce_scatter", 1, 0),
    "reduce_scatter_single": ("reduce_scatter", 1, 0),
    "reduce_scatter_tensor_coalesced": ("reduce_scatter", 1, 0),
    "reduce_scatter_single_coalesced": ("reduce_scatter", 1, 0),
    "alltoall": ("all_to_all", 1, 0),
    "alltoall_base": ("all_to_all", 1, 0),
    "all_to_all_single": ("all_to_all", 1, 0),
}
# fields on which all members must agree; all_to_all is compared pair by pair
_SAME = {
    "all_reduce": ("op", "reduce_op", "inputs"),
    "reduce": ("op", "reduce_op", "root", "inputs"),
    "broadcast": ("op", "root", "inputs"),
    "all_gather": ("op", "inputs"),
    "gather": ("op", "root", "inputs"),
    "scatter": ("op", "root", "outputs"),
    "reduce_scatter": ("op", "reduce_op", "inputs"),
    "all_to_all": ("op",),
    "barrier": ("op",),
}


class PendingWork(dist.Work):
    """A posted call. gloo runs it when the group has agreed on it."""

    def __init__(self, group: "CheckedGroup", call: CommCall, number: int, launch: Callable[[], Any]):
        super().__init__()
        self.group, self.call, self.number, self.launch = group, call, number, launch
        self.inner: Any = None

    def wait(self, timeout: Any = None) -> bool:
        self.call.waited = True
        self.group.run_until(self)
        await_inner(self.inner)
        self.group.log.finish(self.call)
        return True

    def is_completed(self) -> bool:
        if self.inner is None and self.group.can_run(self):
            self.group.run_until(self)
        return self.inner is not None and self.inner.is_completed()

    def get_future(self) -> Any:
        self.group.run_until(self)
        return self.inner.get_future()

    def result(self) -> Any:
        self.wait()
        return self.inner.result()

    def synchronize(self) -> None:
        self.wait()


class CheckedGroup(dist.ProcessGroup):
    """members: global ranks of the group, in order; slot: its place on the board; label: the mesh axis, or a name."""

    def __init__(
        self, inner: Any, board: Board, log: CommLog, members: list[int], rank: int, slot: int, timeout: float
    ):
        super().__init__(members.index(rank), len(members))  # type: ignore[call-arg]
        self.inner, self.board, self.log, self.members = inner, board, log, members
        self.global_rank, self.slot, self.timeout = rank, slot, timeout
        self.label = "world" if len(members) == board.world_size else "group"
        self.queue: deque[PendingWork] = deque()
        self.point_to_point = PointToPoint(self)

    def getBackendName(self) -> str:
        return BACKEND

    @property
    def group_name(self) -> Any:  # functional collectives and DeviceMesh find a group by this name
        return dist.distributed_c10d._world.pg_names[self]

    # -- calls --------------------------------------------------------------------------------------------------------

    def describe(self, op: str, inputs: Any, outputs: Any, opts: Any, splits: Any = None) -> CommCall:
        """A CommCall with everything known before it runs."""
        api, site, module, is_object = caller()
        ins, outs = describe_tensors(inputs), describe_tensors(outputs)
        root = getattr(opts, "rootRank", None) if op in ("reduce", "broadcast", "gather", "scatter") else None
        reduce_op = getattr(opts, "reduceOp", None) if op in ("all_reduce", "reduce", "reduce_scatter") else None
        kept = kept_bytes(inputs, self.rank(), self.size(), splits and splits[0]) if op == "all_to_all" else 0
        return CommCall(
            op=op,
            api=api or op,
            group=group_label(self.group_desc, self.label),
            members=self.members,
            inputs=ins,
            outputs=outs,
            splits=splits,
            root=None if root is None else self.members[root],
            reduce_op=None if reduce_op is None else str(reduce_op.op).rpartition(".")[2].lower(),
            is_async=api in ASYNC_APIS or bool(getattr(opts, "asyncOp", False)),
            traffic=traffic_of((inputs, outputs), is_object),
            site=site,
            module=module,
            bytes=sent_bytes(op, inputs, self.size(), is_root=root in (None, self.rank()), kept=kept),
        )

    def submit(self, call: CommCall, launch: Callable[[], Any]) -> PendingWork:
        """Posts a collective; the returned work runs it."""
        self.log.start(call)
        doing = f"in {call.api} ({call.op} on {call.group}) at {call.site}"
        self.board.set_status(self.global_rank, f"waiting {doing}")
        number = self.board.post(self.slot, self.global_rank, call.post())
        work = PendingWork(self, call, number, launch)
        self.queue.append(work)
        self.board.set_status(self.global_rank, f"running after {call.op} at {call.site}")
        if len(self.queue) > 8:  # the board's ring is finite
            self.run_until(self.queue[0])
        return work

    def can_run(self, work: PendingWork) -> bool:
        return self.board.all_posted(self.slot, self.members, work.number)

    def run_until(self, work: PendingWork) -> None:
        """Runs the posted calls up to `work`, each once all members have posted the same."""
        while work.inner is None:
            first = self.queue[0]
            call = first.call
            self.board.set_status(self.global_rank, f"waiting in {call.api} ({call.op} on {call.group}) at {call.site}")
            posts = self.board.collect(
                self.slot, self.members, self.global_rank, first.number, call.post(), self.timeout
            )
            if first.inner is not None:  # run while waiting
                continue
            compare_calls(call.group, self.members, posts, _SAME[call.op])
            if call.op == "all_to_all":
                sends, receives = zip(*map(pair_table, posts))
                compare_pairs(call.group, self.members, sends, receives, call.site)
            self.queue.popleft()
            first.inner = first.launch()
            self.board.set_status(self.global_rank, f"running after {call.op} at {call.site}")

    def barrier(self, opts: Any = None) -> PendingWork:
        return self.submit(self.describe("barrier", [], [], opts), lambda: self.inner.barrier(opts))

    def send(self, tensors: Any, dst: int, tag: int) -> Any:
        return self.point_to_point.send(tensors, dst, tag)

    def recv(self, tensors: Any, src: int, tag: int) -> Any:
        return self.point_to_point.recv(tensors, src, tag)

    def finish(self) -> dict[str, Any]:
        """At the end of a function: runs what was posted and never waited for, and says what was called."""
        while self.queue:
            self.run_until(self.queue[-1])
        return {"members": self.members, "label": self.label, **self.point_to_point.counts()}


def own_groups() -> list[CheckedGroup]:
    """Every checked group of this process."""
    return [g for g in dist.distributed_c10d._world.pg_map if isinstance(g, CheckedGroup)]


def progress() -> bool:
    """Runs the posted calls that all members have posted, in all groups: another rank may already be in them. Says
    whether some still wait."""
    groups = [g for g in own_groups() if g.queue]
    for group in groups:
        while group.queue and group.can_run(group.queue[0]):
            group.run_until(group.queue[0])
    return any(group.queue for group in groups)


def await_inner(inner: Any) -> None:
    """Waits for a call on gloo; meanwhile the calls of other groups go on, which it may depend on."""
    while progress() and not inner.is_completed():
        time.sleep(1e-4)
    inner.wait()


def pair_table(post: Mapping[str, Any]) -> tuple[list, list]:
    """What a rank's all_to_all sends to, and expects from, each rank: rows of its split lists, or tensors."""
    if post["splits"] is not None:
        return post["splits"]
    return post["inputs"], post["outputs"]


def _collective(name: str, op: str, input_at: int, output_at: int) -> Callable:
    def method(self: CheckedGroup, *args: Any, **kwargs: Any) -> PendingWork:
        opts = kwargs.get("opts", args[-1] if args else None)
        splits = None
        if name in ("all_to_all_single", "alltoall_base"):
            output, given, receive, send = args[:4]
            size = self.size()
            splits = (
                list(send) if send else [given.shape[0] // size] * size,
                list(receive) if receive else [output.shape[0] // size] * size,
            )
        call = self.describe(op, args[input_at], args[output_at], opts, splits)
        return self.submit(call, lambda: getattr(self.inner, name)(*args, **kwargs))

    method.__name__ = name
    return method


for _name, (_op, _inputs, _outputs) in _METHODS.items():
    setattr(CheckedGroup, _name, _collective(_name, _op, _inputs, _outputs))


def register_backend(board: Board, log: CommLog, rank: int, timeout: float) -> None:
    """Makes `emulator` a torch.distributed backend of this (rank) process."""
    board.idle = progress
    root: list[Any] = []  # the world's store: it deals out the groups' places on the board

    def create(opts: Any, backend_options: Any) -> CheckedGroup:
        inner = dist.ProcessGroup(opts.store, opts.group_rank, opts.group_size)
        gloo = dist.ProcessGroupGloo(opts.store, opts.group_rank, opts.group_size, timeout=opts.timeout)
        gloo._set_sequence_number_for_group()
        kind = dist.ProcessGroup.BackendType.GLOO
        inner._register_backend(torch.device("cpu"), kind, gloo)
        inner._set_default_backend(kind)
        members = list(opts.global_ranks_in_group) or list(range(opts.group_size))
        if len(members) == board.world_size and not dist.is_initialized():
            root[:] = [opts.store]
        if opts.group_rank == 0:
            number = root[0].add("emulator/groups", 1) - 1
            opts.store.set("emulator/slot", str(len(AXES) + 2 * number))
        slot = int(opts.store.get("emulator/slot"))
        if slot + 1 >= NUM_GROUPS:
            raise UsageError(f"more than {(NUM_GROUPS - len(AXES)) // 2} process groups in one run")
        return CheckedGroup(inner, board, log, members, rank, slot, timeout)

    if BACKEND.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(BACKEND, create, extended_api=True, devices=["cpu"])
