"""Whole sessions: under xdist, with -x, with --pdb, and with failures planted among many tests."""

import re

import pytest

COUNTING = """
import os
from pathlib import Path
import psutil

def _count():
    return len(os.listdir("/proc/self/fd")), len(psutil.Process().children(recursive=True))

def pytest_sessionstart(session):
    session.before = _count()

def pytest_unconfigure(config):
    session = config.pluginmanager.getplugin("session")
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", None):
        name = f"count-{os.getpid()}"
        Path(config.rootpath, name).write_text(f"{session.before} {_count()}")
"""

MANY = """
import pytest, torch
import torch.distributed as dist

N, EVERY = {n}, {every}
MESHES = [(4, None), (2, None), (4, {{"dp": 2, "tp": 2}})]

def body(i, rank, size):
    x = torch.full((8,), float(rank + i))
    dist.all_reduce(x)
    y = [torch.empty(8) for _ in range(size)]
    dist.all_gather(y, x)
    assert torch.equal(y[0], torch.full((8,), float(sum(range(size)) + i * size)))
    if i % EVERY == EVERY // 2:
        kind = i // EVERY % 4
        if kind == 0:
            assert rank != 1, "planted"
        elif kind == 1 and rank == 0:
            dist.all_reduce(x)
        elif kind == 2:
            dist.all_reduce(x[: 4 + rank])
        elif kind == 3:
            raise ValueError("planted")

@pytest.mark.ranks(4)
@pytest.mark.parametrize("i", range(0, N, 3))
def test_tp(i, rank):
    body(i, rank, 4)

@pytest.mark.ranks(2)
@pytest.mark.parametrize("i", range(1, N, 3))
def test_two(i, rank):
    body(i, rank, 2)

@pytest.mark.ranks(4, mesh={{"dp": 2, "tp": 2}})
@pytest.mark.parametrize("i", range(2, N, 3))
def test_mesh(i, rank):
    body(i, rank, 4)
"""


def planted(n: int, every: int) -> set[str]:
    names = ["test_tp", "test_two", "test_mesh"]
    return {f"{names[i % 3]}[{i}]" for i in range(n) if i % every == every // 2}


def check(session, n: int, every: int) -> None:
    failed = {name for name, outcome in session.outcomes.items() if outcome == "FAILED"}
    assert failed == planted(n, every)
    assert session.count() == {"PASSED": n - len(failed), "FAILED": len(failed)}
    assert session.left == []


def counts(session_folder) -> list[list[int]]:
    return [list(map(int, re.findall(r"\d+", p.read_text()))) for p in session_folder.glob("count-*")]


@pytest.fixture
def run_counted(start, finish):
    """(session, [fds before, children before, fds after, children after] of each pytest process)."""
    import time

    def run(n: int, every: int, *args: str, limit: float = 100):
        started = time.monotonic()
        process, folder = start({"test_it.py": MANY.format(n=n, every=every), "conftest.py": COUNTING}, *args)
        return finish(process, folder, started, limit), counts(folder)

    return run


def test_planted_failures_are_the_only_ones(run_counted):
    session, ((files, children, files_after, children_after),) = run_counted(60, 10)
    check(session, 60, 10)
    assert len(planted(60, 10)) == 6
    assert children == children_after == 0
    assert files_after <= files + 2  # torch and psutil keep one open


def test_xdist(run_counted):
    session, found = run_counted(60, 10, "-n", "2")
    check(session, 60, 10)
    assert len(found) == 2
    for _, children, _, children_after in found:
        assert children == children_after == 0


@pytest.mark.slow
def test_five_hundred_tests_on_two_workers(run_counted):
    session, found = run_counted(500, 25, "-n", "2", limit=600)
    check(session, 500, 25)
    assert len(planted(500, 25)) == 20
    for files, children, files_after, children_after in found:
        assert children == children_after == 0
        assert files_after <= files + 2
    print(f"500 tests, 20 planted failures, -n 2: {session.seconds:.1f} s")


STOPPING = """
import pytest
import torch.distributed as dist

@pytest.fixture(scope="module")
def lasting(rank):
    yield
    print("module ended on", rank)

@pytest.mark.ranks(2)
def test_first(lasting):
    dist.barrier()

@pytest.mark.ranks(2)
def test_second(rank, lasting):
    assert rank == 0
    dist.barrier()

@pytest.mark.ranks(2)
def test_third():
    pass
"""


@pytest.mark.parametrize("option", ["-x", "--pdb"])
def test_stops_at_the_first_failure_and_starts_no_debugger(run_suite, option):
    session = run_suite(STOPPING, option)
    last = {"test_third": "PASSED"} if option == "--pdb" else {}
    assert session.outcomes == {"test_first": "PASSED", "test_second": "FAILED", **last}
    assert "failed on rank 1 of 2" in session.text
    assert "(Pdb)" not in session.text
    assert session.left == []


OTHERS = {
    "conftest.py": """
import sys

def pytest_unconfigure(config):
    print("torch was imported:", "torch" in sys.modules)
""",
    "test_it.py": "def test_plain(tmp_path): pass",
}


def test_a_session_without_ranks_does_not_import_torch(run_suite):
    session = run_suite(OTHERS)
    assert session.outcomes == {"test_plain": "PASSED"}
    assert "torch was imported: False" in session.text


LEAVING = """
import pytest

@pytest.fixture(scope="session")
def lasting(rank):
    yield
    raise RuntimeError(f"no end of rank {rank}")

@pytest.mark.ranks(2)
def test_uses(lasting):
    pass

@pytest.mark.ranks(3)
def test_leaves(rank):
    if rank == 0:
        pytest.exit("enough", returncode=9)

def test_never():
    pass
"""


def test_exit_on_a_rank_ends_the_session(run_suite):
    session = run_suite(LEAVING)
    assert session.code == 9
    assert "_pytest.outcomes.Exit: enough" in session.text
    assert "test_never" not in session.outcomes
    assert session.left == []


@pytest.mark.parametrize("option", ["-s", "--capture=sys", "--setup-show", "--tb=native", "--tb=line"])
@pytest.mark.slow
def test_options(run_suite, option):
    session = run_suite(STOPPING, option)
    assert "FAILED test_it.py::test_second - rank 1 of 2: " in session.text
    assert "rank 1 of 2" in session.text
    assert session.left == []
