"""Ranks as processes: forked from this process (which has torch imported), or the processes of a torchrun launch."""

import ctypes
import gc
import multiprocessing
import os
import pickle
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from emulator.errors import RankError, UsageError
from emulator.runtime.board import Board, PeerFailed
from emulator.runtime.mesh import Mesh
from emulator.runtime.transport import Gloo, Transport, one_thread

_GRACE_S = 1.0  # a failing run gives the other ranks this long to write their last records
_PR_SET_PDEATHSIG = 1


@dataclass
class RankContext:
    """What a rank's function gets: who it is, the board, and its transport (None when no tensors move)."""

    mesh: Mesh
    rank: int
    board: Board
    transport: Transport | None
    timeout: float


class World:
    """Forks mesh.size ranks, runs one function on all of them, and ends them whatever happens.

    timeout: seconds without a sign of life after which a rank counts as stalled.
    """

    def __init__(self, mesh: Mesh, *, timeout: float = 60.0, communicate: bool = True):
        self.mesh, self.timeout, self.communicate = mesh, timeout, communicate

    def run(
        self, fn: Callable[[RankContext], Any], on_progress: Callable[[Board], None] = lambda board: None
    ) -> list[Any]:
        """fn(context) on every rank; results in rank order. The ranks inherit this process's memory.

        Raises RankError, naming rank, op and module, when a rank raises, dies or stalls.
        """
        board = Board(self.mesh.size)
        folder = Path(tempfile.mkdtemp(prefix=f"emulator-{os.getpid()}-"))
        context = multiprocessing.get_context("fork")
        processes, pipes = [], []
        sys.stdout.flush()
        sys.stderr.flush()
        gc.freeze()  # else each rank's collector would touch, and so copy, every inherited page
        try:
            for rank in range(self.mesh.size):
                receiver, sender = context.Pipe(duplex=False)
                init = f"file://{folder}/store" if self.communicate and self.mesh.size > 1 else None
                args = (fn, RankContext(self.mesh, rank, board, None, self.timeout), init, sender, os.getpid())
                process = context.Process(target=_rank_main, args=args, daemon=True, name=f"rank {rank}")
                process.start()
                sender.close()
                processes.append(process)
                pipes.append(receiver)
            return _collect(processes, pipes, board, self.timeout, on_progress)
        finally:
            gc.unfreeze()
            board.abort()
            _end(processes)
            shutil.rmtree(folder, ignore_errors=True)


def _rank_main(fn: Callable, context: RankContext, init: str | None, sender: Connection, parent: int) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # a rank never outlives its parent
    if os.getppid() != parent:
        os._exit(3)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent, which ends the ranks
    one_thread()
    outcome = run_rank(fn, context, init)
    sender.send_bytes(pickle.dumps(outcome))
    sender.close()
    if outcome[0] == "error":
        time.sleep(_GRACE_S)  # keep sockets open: the others should read the board, not a broken connection
        os._exit(3)


def run_rank(fn: Callable[[RankContext], Any], context: RankContext, init: str | None) -> tuple[str, Any]:
    """("ok", result), or ("error", {rank, kind, message, doing, traceback}) with the board's abort flag set."""
    transport: Gloo | None = None
    try:
        if init is not None:
            context.board.set_status(context.rank, "joining the process group")
            transport = Gloo(context.mesh, context.rank, init_method=init, timeout=context.timeout)
            context.transport = transport
        result = fn(context)
        context.board.set_status(context.rank, "done")
        if transport is not None:
            transport.close()
        return "ok", result
    except BaseException as error:
        doing = context.board.status(context.rank)[1]
        secondary = isinstance(error, PeerFailed) or context.board.aborted
        context.board.abort()
        info = {
            "rank": context.rank,
            "kind": type(error).__name__,
            "message": str(error),
            "doing": doing,
            "secondary": secondary,
            "usage": isinstance(error, UsageError),
            "traceback": traceback.format_exc(),
        }
        return "error", info


def _collect(
    processes: list, pipes: list[Connection], board: Board, timeout: float, on_progress: Callable
) -> list[Any]:
    """Waits for all ranks, watching for deaths and for ranks without a sign of life."""
    results: dict[int, Any] = {}
    errors: list[dict[str, Any]] = []
    seen = [(time.monotonic(), -1)] * len(processes)
    open_ranks: dict[Any, int] = {pipe: rank for rank, pipe in enumerate(pipes)}
    while open_ranks and not errors:
        for pipe in wait(list(open_ranks), timeout=0.1):
            rank = open_ranks.pop(pipe)
            _take(pipe, rank, processes, board, results, errors)
        on_progress(board)
        now = time.monotonic()
        for rank in open_ranks.values():
            count, doing = board.status(rank)
            if count != seen[rank][1] or doing.startswith("waiting"):
                seen[rank] = (now, count)
            elif now - seen[rank][0] > timeout:
                message = f"no sign of life for {timeout:g} s"
                errors.append({"rank": rank, "kind": "Stalled", "message": message, "doing": doing, "secondary": False})
    if errors:
        board.abort()
        deadline = time.monotonic() + _GRACE_S
        while open_ranks and time.monotonic() < deadline:
            for pipe in wait(list(open_ranks), timeout=0.05):
                _take(pipe, open_ranks.pop(pipe), processes, board, results, errors)
        raise rank_error(errors, board)
    return [results[rank] for rank in range(len(processes))]


def _take(pipe: Any, rank: int, processes: list, board: Board, results: dict, errors: list) -> None:
    try:
        status, value = pickle.loads(pipe.recv_bytes())
    except EOFError:
        processes[rank].join(1.0)
        code = processes[rank].exitcode
        how = f"killed by {signal.Signals(-code).name}" if code and code < 0 else f"exited with code {code}"
        doing = board.status(rank)[1]
        errors.append({"rank": rank, "kind": "Died", "message": how, "doing": doing, "secondary": False})
        return
    if status == "ok":
        results[rank] = value
    else:
        errors.append(value)


def rank_error(errors: list[dict[str, Any]], board: Board) -> Exception:
    """The error of the run: the first cause, and what every other rank was doing."""
    causes = [e for e in errors if not e["secondary"]] or errors
    # a rank that died or stalled explains the ranks that waited for it
    cause = min(causes, key=lambda e: (e["kind"] == "PeerStalled", e["kind"] == "CallMismatch", e["rank"]))
    if cause.get("usage"):
        return UsageError(cause["message"])
    others = {r: board.status(r)[1] for r in range(board.world_size) if r != cause["rank"]}
    message = f"rank {cause['rank']}: {cause['kind']}: {cause['message']} (while {cause['doing'] or 'starting'})"
    return RankError(message, {**cause, "others": others})


def _end(processes: list) -> None:
    deadline = time.monotonic() + _GRACE_S
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
        if process.is_alive():
            process.kill()
            process.join()
        process.close()
