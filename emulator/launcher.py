"""The same job under torchrun: each process is a rank; what a host shares is prepared by its first process."""

import contextlib
import json
import mmap
import os
import signal
import sys
import time
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
from torch import distributed as dist

from emulator.errors import RankError, UsageError
from emulator.jobs.prepare import Prepared, add_batches, add_weights, prepare
from emulator.jobs.rank import run_on_rank
from emulator.jobs.verdict import summarise
from emulator.runtime.board import Board, StoreBoard
from emulator.runtime.failure import explain, failure_of
from emulator.runtime.mesh import Mesh
from emulator.runtime.rank_process import RankContext, attempt, join_groups, leave_groups
from emulator.runtime.shared import map_shared, remove_shared, shared_folder, write_shared
from emulator.runtime.threads import single_thread
from emulator.runtime.transport import gather_objects
from emulator.scenario import Scenario
from emulator.trace.flight_recorder import write_flight_records
from emulator.verify.reference import Tolerance

_JOIN_TIMEOUT_S = 300.0
_GRACE_S = 0.3


def under_torchrun() -> bool:
    """Whether this process is one rank of a torchrun launch."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def is_reporter() -> bool:
    """Whether this process may print: the only one, or rank 0."""
    return not under_torchrun() or os.environ["RANK"] == "0"


def sizes_from_world(given: dict[str, int]) -> dict[str, int]:
    """Parallel sizes filled up from torchrun's world size; UsageError when they contradict it."""
    world = int(os.environ["WORLD_SIZE"])
    dp = max(given.get("dp", 1), 1)
    tp = given.get("tp", world // dp)
    if tp * dp != world:
        raise UsageError(f"dp {dp} * tp {tp} needs {tp * dp} ranks, torchrun started {world}")
    return {**given, "tp": tp, "dp": dp}


def run_under_torchrun(scenario: Scenario, out_dir: Path | None) -> dict[str, Any] | None:
    """Runs this process's rank. Rank 0 returns the summary, the others None. Raises as job.run does."""
    started = time.perf_counter()
    rank = int(os.environ["RANK"])
    with single_thread():
        mesh = scenario.mesh(scenario.config())
        prepared, context = _share(scenario, out_dir, mesh, rank)
        context.board.pids[rank] = os.getpid()
        # torchrun ends the other ranks as soon as one has died: that is the moment to say which, and where it was
        signal.signal(signal.SIGTERM, lambda *_: _leave_after_death(context))
        status, outcome = attempt(_run_and_gather, (prepared,), context, {})
        if status == "error":
            _fail(outcome, context, out_dir)
        reports = outcome[0]
        leave_groups(context)
    return summarise(prepared, reports, time.perf_counter() - started) if reports else None


def _run_and_gather(prepared: Prepared, context: RankContext) -> list | None:
    report = run_on_rank(prepared, context)
    return gather_objects(report, context.mesh, context.rank)


def _share(scenario: Scenario, out_dir: Path | None, mesh: Mesh, rank: int) -> tuple[Prepared, RankContext]:
    """Everything that is the same on all ranks; weights, reference and board exist once per host, mapped."""
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(address, port, is_master=False, timeout=timedelta(seconds=_JOIN_TIMEOUT_S))
    key = f"emulator/{os.environ['TORCHELASTIC_RUN_ID']}/host{os.environ['GROUP_RANK']}"
    one_host = os.environ["LOCAL_WORLD_SIZE"] == os.environ["WORLD_SIZE"]
    is_leader = os.environ["LOCAL_RANK"] == "0"
    folder: Path | None = None
    try:
        if is_leader:
            prepared = prepare(scenario, out_dir)
            folder = shared_folder()
            _publish(prepared, folder)
            store.set(key, str(folder))
        else:
            prepared = prepare(scenario, out_dir, graph_only=True)
            folder = Path(store.get(key).decode())
            if scenario.mode == "real":
                add_batches(prepared)
                _map(prepared, folder)
        context = RankContext(mesh, rank, _board(mesh, folder if one_host else None, store), scenario.timeout)
        join_groups(context, dist.PrefixStore("groups", store))
        context.transport = context.transport if scenario.mode == "real" else None
        dist.barrier()  # everyone has mapped the files: they can go
    finally:
        if is_leader and folder is not None:
            remove_shared(folder)
    return prepared, context


def _publish(prepared: Prepared, folder: Path) -> None:
    write_shared([dict(prepared.weights)], _made(folder / "weights"))
    for number, part in enumerate(prepared.parts):
        write_shared([dict(part.reference)], _made(folder / f"reference{number}"))
        (folder / f"tolerance{number}.json").write_text(json.dumps(asdict(part.tolerance)))
    for dp, part in enumerate(prepared.schedule[0]):
        if part.batch is not None:
            layers = enumerate(zip(part.batch.latent_caches, part.batch.index_caches))
            caches = {f"{kind}.{n}": c for n, pair in layers for kind, c in zip(("latent", "index"), pair)}
            write_shared([caches], _made(folder / f"caches{dp}"))
    with (folder / "board").open("wb") as file:
        file.truncate(Board.size_of(prepared.mesh.size))


def _map(prepared: Prepared, folder: Path) -> None:
    """What the host's leader published."""
    add_weights(prepared, map_shared(folder / "weights"))
    for number, part in enumerate(prepared.parts):
        part.reference = map_shared(folder / f"reference{number}")
        part.tolerance = Tolerance(**json.loads((folder / f"tolerance{number}.json").read_text()))
    for dp, part in enumerate(prepared.schedule[0]):
        assert part.batch is not None
        caches, layers = map_shared(folder / f"caches{dp}"), range(len(part.batch.latent_caches))
        latent, index = ([caches[f"{kind}.{n}"] for n in layers] for kind in ("latent", "index"))
        part.batch = replace(part.batch, latent_caches=latent, index_caches=index)


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder


def _board(mesh: Mesh, folder: Path | None, store: dist.Store) -> Board:
    """Shared memory when all ranks are on this host, else the rendezvous store."""
    if folder is None:
        return StoreBoard(mesh.size, store)
    with (folder / "board").open("r+b") as file:
        return Board(mesh.size, mmap.mmap(file.fileno(), 0))


def _fail(info: dict[str, Any], context: RankContext, out_dir: Path | None) -> None:
    """The rank that failed reports and ends the launch; ranks that only follow leave without a word."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun sends it when another rank leaves first
    board = context.board
    if out_dir is not None:
        groups = {axis: context.mesh.groups(axis) for axis in context.mesh.names}
        with contextlib.suppress(UsageError):
            write_flight_records(out_dir, {context.rank: context.log.calls}, groups, only=context.rank)
    if info["secondary"]:
        time.sleep(2 * _GRACE_S)  # the rank that failed reports first
        os._exit(3)
    if info["kind"] == "RuntimeError" and _dead_ranks(context):  # gloo noticed the death before torchrun did
        _leave_after_death(context)
    error = failure_of([info], [board.status(r)[1] for r in range(context.mesh.size)])
    if not isinstance(error, RankError):
        raise error
    if out_dir is not None:
        error.report["flight_records"] = f"torchfrtrace -p flight_ {out_dir}"
    print(explain(error), flush=True, file=sys.stderr)
    time.sleep(_GRACE_S)
    for pid in board.pids.tolist():  # torchrun's own SIGTERM does not end a rank that is stopped or loops
        if pid not in (0, os.getpid()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    os._exit(3)


def _dead_ranks(context: RankContext) -> list[int]:
    """Ranks of this host whose process is gone."""
    pids = context.board.pids.tolist()
    return [r for r, pid in enumerate(pids) if pid and not _is_alive(pid)]


def _is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _leave_after_death(context: RankContext) -> None:
    """Ends this rank; the first survivor says which rank died and what everyone was doing."""
    board, dead = context.board, _dead_ranks(context)
    survivors = [r for r in range(context.mesh.size) if r not in dead]
    if dead and context.rank == survivors[0] and not board.aborted:
        board.abort()
        doing = {r: board.status(r)[1] for r in range(context.mesh.size)}
        print(f"error: rank {dead[0]}: Died (while {doing[dead[0]]})", file=sys.stderr)
        for rank in survivors:
            print(f"  rank {rank} was {doing[rank]}", flush=True, file=sys.stderr)
    os._exit(3)
