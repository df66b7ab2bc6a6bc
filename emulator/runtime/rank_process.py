"""A rank's process: joins the groups, runs the functions it is sent, and reports how each one ended."""

import ctypes
import faulthandler
import inspect
import os
import resource
import signal
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import psutil
import torch
import torch.distributed as dist

from emulator.errors import UsageError
from emulator.runtime.board import DONE, FAILED, Board, PeerFailed
from emulator.runtime.checked_group import BACKEND, CheckedGroup, own_groups, register_backend
from emulator.runtime.codec import Channel, encode
from emulator.runtime.comm_log import CommLog
from emulator.runtime.mesh import Mesh
from emulator.runtime.transport import GroupTransport, Transport

_PR_SET_PDEATHSIG = 1


@dataclass
class RankContext:
    """Who a rank is and what it works with. transport: unchecked collectives for callers that compare calls themselves
    (None when no tensors move); groups: process group of each mesh axis that has more than one rank."""

    mesh: Mesh
    rank: int
    board: Board
    timeout: float
    transport: Transport | None = None
    groups: dict[str, Any] = field(default_factory=dict)
    log: CommLog = field(default_factory=CommLog)

    def arguments(self) -> dict[str, Any]:
        """What a rank function may ask for by parameter name."""
        named = {f"{axis}_group": group for axis, group in self.groups.items()}
        return {"context": self, "rank": self.rank, "mesh": self.mesh, **named}


def call_on_rank(fn: Callable, args: tuple, offered: Mapping[str, Any]) -> Any:
    """fn(*args), with the offered values for parameters of those names that args leave open."""
    try:
        parameters = inspect.signature(fn).parameters
    except (TypeError, ValueError):
        return fn(*args)
    taken = list(parameters)[: len(args)]
    wanted = {
        name: offered[name]
        for name, parameter in parameters.items()
        if name in offered and name not in taken and parameter.kind is not inspect.Parameter.POSITIONAL_ONLY
    }
    return fn(*args, **wanted)


def join_groups(context: RankContext, store: dist.Store) -> None:
    """Initialises torch.distributed on checked groups: the world, and one group per mesh axis (shared where the ranks
    are the same, as tp and ep often are). store: where the ranks meet."""
    mesh, rank = context.mesh, context.rank
    register_backend(context.board, context.log, rank, context.timeout)
    dist.init_process_group(BACKEND, store=store, rank=rank, world_size=mesh.size)
    made: dict[tuple[int, ...], Any] = {tuple(range(mesh.size)): dist.group.WORLD}
    for axis in mesh.names:
        for ranks in mesh.groups(axis):
            if tuple(ranks) not in made:
                made[tuple(ranks)] = dist.new_group(ranks) if len(ranks) > 1 or axis in mesh.axes else None
        group = made[tuple(mesh.members(axis, rank))]
        if isinstance(group, CheckedGroup):
            is_new = group not in context.groups.values()
            if is_new and (axis != "ep" or group is not dist.group.WORLD):  # the first axis with these ranks names it
                group.label = axis
            context.groups[axis] = group
    context.transport = GroupTransport(mesh, rank, {a: g.inner for a, g in context.groups.items()})


def leave_groups(context: RankContext) -> None:
    context.groups, context.transport = {}, None
    if dist.is_initialized():
        dist.destroy_process_group()


def serve(
    context: RankContext, channel: Channel, store: str, join: str | None, parent: int, shared: dict, first: Any
) -> None:
    """Main loop of a rank process. store, join: file and name under which the ranks meet. first: (fn, args) to run at
    once, inherited rather than sent; None to wait for commands."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # a rank never outlives its parent
    if os.getppid() != parent:
        os._exit(3)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent, which ends the ranks
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    faulthandler.disable()  # inherited from pytest; a rank that crashes is reported by its parent
    torch.set_num_threads(1)
    _join(context, channel, store, join)
    if first is not None:
        channel.send(_outcome(first[0], first[1], context, shared))
    while True:
        try:
            command, payload = channel.receive()
        except (EOFError, OSError):
            os._exit(0)
        if command == "run":
            fn, args = payload
            channel.send(_outcome(fn, args, context, shared))
        elif command == "calls":
            channel.send(encode(("ready", [vars(call) for call in context.log.calls])))
        elif command == "rejoin":  # after a failure: nothing half-sent may reach the next function
            leave_groups(context)
            _join(context, channel, store, payload)
        else:
            leave_groups(context)
            os._exit(0)


def _join(context: RankContext, channel: Channel, store: str, join: str | None) -> None:
    try:
        if join is not None:
            context.board.set_status(context.rank, "joining the process groups")
            join_groups(context, dist.PrefixStore(join, dist.FileStore(store, context.mesh.size)))
    except BaseException as error:
        channel.send(encode(("error", _describe(error, context))))
        os._exit(3)
    context.board.set_status(context.rank, "ready")
    channel.send(encode(("ready", None)))


def attempt(fn: Callable, args: tuple, context: RankContext, shared: Mapping[str, Any]) -> tuple[str, Any]:
    """Runs one function: ("ok", (result, usage)) or ("error", description). An error sets the board's abort flag."""
    board, rank = context.board, context.rank
    context.log.calls.clear()
    board.set_status(rank, "running")
    try:
        result = call_on_rank(fn, args, {**shared, **context.arguments()})
        for group in own_groups():  # those the function made, too
            group.finish()
        return "ok", (result, usage())
    except BaseException as error:
        described = _describe(error, context)
        board.abort()
        return "error", described


def _outcome(fn: Callable, args: tuple, context: RankContext, shared: Mapping[str, Any]) -> tuple[bytes, int | None]:
    outcome = attempt(fn, args, context, shared)
    try:
        encoded = encode(outcome)
    except Exception as error:  # a result that cannot travel
        outcome = "error", _describe(error, context)
        encoded = encode(outcome)
    context.board.set_status(context.rank, DONE if outcome[0] == "ok" else FAILED)
    return encoded


def _describe(error: BaseException, context: RankContext) -> dict[str, Any]:
    culprits = getattr(error, "culprits", None)
    return {
        "rank": context.rank,
        "kind": type(error).__name__,
        "message": str(error),
        "doing": context.board.status(context.rank)[1],
        "secondary": isinstance(error, PeerFailed),
        "culprits": culprits,
        "usage_error": isinstance(error, UsageError),
        "traceback": "".join(traceback.format_exception(error)),
        "calls": [vars(call) for call in context.log.calls[-50:]],
    }


def usage() -> dict[str, float]:
    """Peak resident memory of this process (MiB) and its CPU time (s)."""
    times = psutil.Process().cpu_times()
    return {
        "peak_rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "cpu_s": times.user + times.system,
    }
