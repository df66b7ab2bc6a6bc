"""A world of ranks: processes forked once from this one (which has torch imported), to run functions on all of them."""

import contextlib
import gc
import multiprocessing
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping
from multiprocessing.connection import wait
from typing import Any

import cloudpickle
import torch.distributed._functional_collectives  # noqa: F401  (imported once here, not by each rank)

from emulator.errors import RankError, UsageError
from emulator.runtime.board import DONE, FAILED, Board
from emulator.runtime.codec import Channel, encode
from emulator.runtime.failure import failure_of
from emulator.runtime.mesh import Mesh
from emulator.runtime.rank_process import RankContext, serve

_GRACE_S = 1.0  # a failing run gives the other ranks this long to report
_START_TIMEOUT_S = 60.0
_SILENT = ("Died", "Stalled")  # kinds of failure after which a rank does not answer


class World:
    """Persistent ranks.

        with World(8, mesh={"dp": 2, "tp": 4}) as world:
            results = world.run(fn, x)

    fn(x) runs on every rank, with torch.distributed initialised; fn may also ask, by parameter name, for `rank`,
    `mesh`, `<axis>_group` (tp_group, dp_group, ep_group, ...) and `context`. It may be a closure or a local function.
    Results come back in rank order, tensors through shared memory. Outside a `with`, run() starts a world for one call.

    size: number of ranks, or a Mesh. timeout: seconds a rank may give no sign of life, or be waited for. communicate:
    False starts ranks without process groups. shared: objects the ranks inherit without a copy; fn asks for them by
    name. memory_limit: bytes of address space a rank may use beyond what it inherits.
    """

    def __init__(
        self,
        size: int | Mesh,
        mesh: Mapping[str, int] | None = None,
        *,
        timeout: float = 60.0,
        communicate: bool = True,
        shared: Mapping[str, Any] | None = None,
        memory_limit: int | None = None,
    ):
        self.mesh = size if isinstance(size, Mesh) else Mesh.of(size, mesh)
        self.timeout, self.communicate, self.memory_limit = timeout, communicate, memory_limit
        self.shared = dict(shared or {})
        self.usage: list[dict[str, Any]] = []
        self._processes: list[Any] = []
        self._channels: list[Channel] = []
        self._joins = 0
        self._known_modules: frozenset[str] = frozenset()

    @property
    def size(self) -> int:
        return self.mesh.size

    @property
    def pids(self) -> list[int]:
        """Process ids of the ranks, in order; empty while the world is not started."""
        return [process.pid for process in self._processes]

    # -- life ---------------------------------------------------------------------------------------------------------

    def __enter__(self) -> "World":
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def start(self, first: tuple[Callable, tuple] | None = None) -> None:
        """Forks the ranks and waits until all have joined their groups. first: (fn, args) that they inherit and run
        at once (run() uses it to spare a one-call world the transport of fn)."""
        self.board = Board(self.size)
        self._store = os.memfd_create("emulator-rendezvous")  # no file that a killed parent could leave behind
        self._known_modules = frozenset(sys.modules)
        context = multiprocessing.get_context("fork")
        sys.stdout.flush()
        sys.stderr.flush()
        join = self._next_join()
        gc.freeze()  # else each rank's collector would touch, and so copy, every inherited page
        try:
            for rank in range(self.size):
                ours, theirs = socket.socketpair()
                args = (rank, theirs, ours, join, os.getpid(), first)
                process = context.Process(target=self._rank_main, args=args, daemon=True, name=f"rank {rank}")
                process.start()
                theirs.close()
                self._processes.append(process)
                self._channels.append(Channel(ours))
        finally:
            gc.unfreeze()
        started = self._gather(_START_TIMEOUT_S)
        if any(status != "ready" for status, _ in started):
            doing = [self.board.status(r)[1] for r in range(self.size)]
            error = failure_of([value for status, value in started if status != "ready"], doing)
            self.kill()
            raise error

    def _rank_main(
        self, rank: int, theirs: socket.socket, ours: socket.socket, join: str | None, parent: int, first: Any
    ) -> None:
        for channel in self._channels:  # the parent's ends: a rank must not keep a dead parent's sockets open
            channel.close()
        ours.close()
        if self.memory_limit is not None:
            import resource

            import psutil

            limit = psutil.Process().memory_info().vms + self.memory_limit
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        store = f"/proc/self/fd/{self._store}"
        context = RankContext(self.mesh, rank, self.board, self.timeout)
        serve(context, Channel(theirs), store, join, parent, self.shared, first)

    def _next_join(self) -> str | None:
        """Name under which the ranks meet; None when they have no groups."""
        if not self.communicate:
            return None
        self._joins += 1
        return f"join{self._joins}"

    def close(self) -> None:
        """Ends all ranks and removes every trace of them. A closed world starts again at the next run."""
        for channel in self._channels:
            with contextlib.suppress(OSError):
                channel.send(encode(("exit", None)))
        self._end(_GRACE_S)

    def kill(self) -> None:
        """Ends all ranks at once, whatever they are doing."""
        self._end(0.0)

    def _end(self, grace: float) -> None:
        if not self._processes:
            return
        self.board.abort()
        deadline = time.monotonic() + grace
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
            if process.is_alive():
                process.kill()  # SIGKILL ends a stopped process too
            process.join()
            process.close()
        for channel in self._channels:
            channel.close()
        self._processes, self._channels = [], []
        os.close(self._store)

    # -- calls --------------------------------------------------------------------------------------------------------

    def run(
        self,
        fn: Callable,
        *args: Any,
        timeout: float | None = None,
        return_exceptions: bool = False,
        on_progress: Callable[[Board], None] | None = None,
    ) -> list[Any]:
        """fn(*args) on every rank; results in rank order.

        timeout: seconds for this call (default: the world's) without a sign of life of a rank. return_exceptions: give
        the exceptions in place of results instead of raising. on_progress(board) is called now and then.
        Raises RankError when a rank raises, dies or stalls; its report names rank, op and call site, and its `outcomes`
        hold every rank's result or exception. The world can be used again afterwards.
        """
        limit = self.timeout if timeout is None else timeout
        if not self._processes:
            self.start((fn, args))
            try:
                return self._results(limit, return_exceptions, on_progress)
            finally:
                self.close()
        message = self._encode_call(fn, args)
        for rank in range(self.size):  # "done" of the function before must not be taken for the end of this one
            self.board.set_status(rank, "starting")
        for channel in self._channels:
            channel.send(message)
        if message[1] is not None:
            os.close(message[1])
        return self._results(limit, return_exceptions, on_progress)

    def _encode_call(self, fn: Callable, args: tuple) -> tuple[bytes, int | None]:
        """fn travels by name where the ranks know its module, else by value."""
        module = sys.modules.get(getattr(fn, "__module__", None) or "")
        foreign = module is not None and module.__name__ not in self._known_modules and module.__name__ != "__main__"
        if foreign:
            cloudpickle.register_pickle_by_value(module)
        try:
            return encode(("run", (fn, args)))
        except Exception as error:
            raise UsageError(f"{getattr(fn, '__name__', fn)}: cannot be sent to the ranks: {error}") from error
        finally:
            if foreign:
                cloudpickle.unregister_pickle_by_value(module)

    def _results(self, limit: float, return_exceptions: bool, on_progress: Callable | None) -> list[Any]:
        replies = self._gather(limit, on_progress)
        failed = [r for r in replies if r[0] != "ok"]
        if not failed:
            self.usage = [value[1] for _, value in replies]
            return [value[0] for _, value in replies]
        outcomes = [value[0] if status == "ok" else _exception(value) for status, value in replies]
        error = failure_of([value for _, value in failed], [self.board.status(r)[1] for r in range(self.size)])
        if isinstance(error, RankError):
            error.report["calls"] = self._calls(replies)
        if any(value["kind"] in _SILENT for _, value in failed):
            self.kill()
        else:
            self.recover()
        if return_exceptions:
            return outcomes
        if isinstance(error, RankError):
            error.outcomes = outcomes
        raise error

    def _calls(self, replies: list[tuple[str, Any]]) -> dict[int, list[dict[str, Any]]]:
        """Every communication call of the function that just ended, from the ranks that still answer."""
        answering = [r for r, (status, v) in enumerate(replies) if status == "ok" or v["kind"] not in _SILENT]
        calls = {}
        for rank in answering:
            with contextlib.suppress(OSError, EOFError):
                self._channels[rank].send(encode(("calls", None)))
                calls[rank] = self._channels[rank].receive()[1]
        return calls

    def recover(self) -> None:
        """After exceptions all ranks are idle again; fresh groups keep half-done calls from the next function."""
        self.board.reset()
        join = self._next_join()
        if join is None:
            return
        for channel in self._channels:
            channel.send(encode(("rejoin", join)))
        if any(status != "ready" for status, _ in self._gather(_START_TIMEOUT_S)):
            self.kill()

    def _gather(self, limit: float, on_progress: Callable | None = None) -> list[tuple[str, Any]]:
        """One reply from every rank, in order. A rank that dies or gives no sign of life for `limit` seconds gets a
        reply of ("error", ...) here, and so do the ranks that never answer because of it."""
        replies: dict[int, tuple[str, Any]] = {}
        now = time.monotonic()
        alive = {r: (now, -1) for r in range(self.size)}
        hopeless: float | None = None
        waiting: dict[Any, int] = {channel: rank for rank, channel in enumerate(self._channels)}
        while waiting:
            for channel in wait(list(waiting), timeout=0.05 if on_progress or hopeless else 0.2):
                rank = waiting.pop(channel)  # type: ignore[arg-type]
                try:
                    replies[rank] = channel.receive()  # type: ignore[union-attr]
                except (EOFError, OSError):
                    replies[rank] = ("error", self._death(rank))
                    self.board.abort()
            if on_progress is not None:
                on_progress(self.board)
            now = time.monotonic()
            for rank in waiting.values():
                count, doing = self.board.status(rank)
                if count != alive[rank][1] or doing.startswith("waiting"):
                    alive[rank] = (now, count)
            if hopeless is None and any(status == "error" and v["kind"] == "Died" for status, v in replies.values()):
                hopeless = now + _GRACE_S
            silent = [rank for rank in waiting.values() if now - alive[rank][0] > limit]
            if silent:
                for rank in silent:
                    doing = self.board.status(rank)[1]
                    replies[rank] = ("error", _stall(rank, f"no sign of life for {limit:g} s", doing))
                    waiting = {c: r for c, r in waiting.items() if r != rank}
                self.board.abort()
                hopeless = min(hopeless or now + _GRACE_S, now + _GRACE_S)
            if hopeless is None and any(status == "error" for status, _ in replies.values()):
                # an exception: the others meet the abort flag at their next wait, or never
                hopeless = now + max(limit, _GRACE_S) if self._busy(waiting) else now + _GRACE_S
            if hopeless is not None and now > hopeless:
                for rank in waiting.values():
                    doing = self.board.status(rank)[1]
                    replies[rank] = ("error", {**_stall(rank, "did not answer", doing), "secondary": True})
                break
        return [replies[rank] for rank in range(self.size)]

    def _busy(self, waiting: Mapping[Any, int]) -> bool:
        return any(self.board.status(r)[1] not in (DONE, FAILED) for r in waiting.values())

    def _death(self, rank: int) -> dict[str, Any]:
        process = self._processes[rank]
        process.join(1.0)
        code = process.exitcode
        how = f"killed by {signal.Signals(-code).name}" if code and code < 0 else f"exited with code {code}"
        return {**_stall(rank, how, self.board.status(rank)[1]), "kind": "Died"}


def _stall(rank: int, message: str, doing: str) -> dict[str, Any]:
    return {"rank": rank, "kind": "Stalled", "message": message, "doing": doing, "secondary": False, "calls": []}


def _exception(value: Mapping[str, Any]) -> Exception:
    error = UsageError(value["message"]) if value.get("usage_error") else RankError(value["message"], dict(value))
    return error
