"""Every fault on one rank of a marked test: named, in time, and the next test is not affected."""

import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest

FAULTS = """
import os, signal, time
import pytest, torch, torch.distributed as dist

TIMEOUT = 3

def exception(): raise FloatingPointError("planted")
def exit(): os._exit(9)
def sigkill(): os.kill(os.getpid(), signal.SIGKILL)
def sigstop(): os.kill(os.getpid(), signal.SIGSTOP)
def out_of_memory(): torch.empty(1 << 50)
def loop():
    while True: pass
def skipped(): pass
def extra(): [dist.all_reduce(torch.ones(4)) for _ in range(2)]
def other_op(): dist.all_gather_single(torch.ones(4 * dist.get_world_size()), torch.ones(4))
def swapped(): dist.broadcast(torch.ones(3), 0), dist.all_reduce(torch.ones(4))
def shape(): dist.all_reduce(torch.ones(2, 2))
def dtype(): dist.all_reduce(torch.ones(4, dtype=torch.float64))

FAULTS = [exception, exit, sigkill, sigstop, out_of_memory, loop, skipped, extra, other_op, swapped, shape, dtype]

@pytest.mark.ranks({size}, timeout=TIMEOUT)
@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f.__name__)
def test_fault(fault, rank):
    dist.barrier()
    if rank == 1:
        fault()
    else:
        dist.all_reduce(torch.ones(4))
        if fault is swapped:
            dist.broadcast(torch.ones(3), 0)

@pytest.mark.ranks({size}, timeout=TIMEOUT)
@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f.__name__)
def test_healthy(fault, rank):
    x = torch.ones(2)
    dist.all_reduce(x)
    assert x[0] == {size}
"""
NUM_FAULTS = 12


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4, 8])
def test_matrix(size, tmp_path):
    # each fault is followed by a healthy test on the same world
    source = FAULTS.replace("{size}", str(size))
    conftest = "def pytest_collection_modifyitems(items):\n    items.sort(key=lambda i: i.callspec.id)\n"
    (tmp_path / "test_faults.py").write_text(source)
    (tmp_path / "conftest.py").write_text(conftest)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-rA", "--durations=0", "-q", str(tmp_path)]
    started = time.monotonic()
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    output, _ = process.communicate(timeout=300)
    print(f"{size} ranks: {time.monotonic() - started:.1f} s")
    assert f"{NUM_FAULTS} failed, {NUM_FAULTS} passed" in output, output[-4000:]
    for name in re.findall(r"^def (\w+)\(\)", source, re.M):
        assert f"test_fault[{name}]" in output
        assert f"PASSED test_faults.py::test_healthy[{name}]" in output
        (report,) = re.findall(rf"_ test_fault\[{name}\] _+\n(.*?)(?=\n_{{4,}} |\n=+ )", output, re.S)
        assert re.search(r"\brank(s)? (0, )?1\b", report), report
    times = [float(t) for t in re.findall(r"([\d.]+)s call\s+\S*test_fault\[", output)]
    assert max(times) < 3 + 2
    assert not [p for p in psutil.process_iter(["cmdline"]) if str(tmp_path) in " ".join(p.info["cmdline"] or [])]
    for folder in ("/dev/shm", tempfile.gettempdir()):
        assert not list(Path(folder).glob(f"emulator-{process.pid}-*"))
