"""Ranks that hang, die or leave a call open: the test that did it fails by name, in time, and the next one passes."""

import os
import re
import signal
import time

import pytest

UNMATCHED = """
import pytest, torch
import torch.distributed as dist

x = torch.ones(3)
# lines that the reports must name are marked with their test's name

def after():
    y = torch.ones(1)
    dist.all_reduce(y)
    assert y.item() == 4

@pytest.mark.ranks(4)
def test_skipped_one(rank):
    if rank != 2:
        dist.all_reduce(x)  # skipped_one

@pytest.mark.ranks(4)
def test_ok_1():
    after()

@pytest.mark.ranks(4)
def test_extra_one(rank):
    dist.all_reduce(x)
    if rank == 1:
        dist.all_reduce(x)  # extra_one

@pytest.mark.ranks(4)
def test_ok_2():
    after()

@pytest.mark.ranks(4)
def test_never_waited(rank):
    if rank == 1:
        dist.all_reduce(x, async_op=True)  # never_waited

@pytest.mark.ranks(4)
def test_ok_3():
    after()

@pytest.mark.ranks(4)
def test_other_op(rank):
    dist.broadcast(x, 0) if rank == 3 else dist.all_reduce(x)  # other_op

@pytest.mark.ranks(4)
def test_other_shape(rank):
    dist.all_reduce(x[: 2 if rank == 3 else 3])  # other_shape

@pytest.mark.ranks(4)
def test_other_dtype(rank):
    dist.all_reduce(x.double() if rank == 3 else x)  # other_dtype

@pytest.mark.ranks(4)
def test_other_root(rank):
    dist.broadcast(x, rank // 3)  # other_root

@pytest.mark.ranks(4)
def test_ok_4():
    after()

@pytest.mark.ranks(4, mesh={"dp": 2, "tp": 2}, timeout=1)
def test_other_group(rank, tp_group, dp_group):
    dist.all_reduce(x, group=dp_group if rank == 3 else tp_group)  # other_group

@pytest.mark.ranks(4)
def test_lost_message(rank):
    if rank == 0:
        dist.isend(x, 1)  # lost_message

@pytest.mark.ranks(4)
def test_no_message(rank):
    if rank == 1:
        dist.irecv(x, 0)  # no_message

@pytest.mark.ranks(4)
def test_ok_5(rank):
    y = torch.zeros(3)
    if rank == 0:
        dist.send(torch.full((3,), 2.0), 1)
    elif rank == 1:
        dist.recv(y, 0)
        assert y.tolist() == [2.0] * 3
    after()

@pytest.mark.ranks(4)
def test_destroyed():
    dist.destroy_process_group()

@pytest.mark.ranks(4)
def test_ok_6():
    after()
"""


@pytest.fixture(scope="module")
def unmatched(run_suite):
    return run_suite(UNMATCHED)


def test_the_next_test_is_not_poisoned(unmatched):
    good = {name: outcome for name, outcome in unmatched.outcomes.items() if "ok" in name or "destroyed" in name}
    assert len(good) == 7
    assert set(good.values()) == {"PASSED"}
    assert set(unmatched.outcomes.values()) == {"PASSED", "FAILED"}
    assert len(unmatched.outcomes) == 17
    assert unmatched.left == []


@pytest.mark.parametrize(
    ("test", "text"),
    [
        ("skipped_one", "rank 2 finished without making this call"),
        ("extra_one", "rank 0, 2, 3 finished without making this call"),
        ("never_waited", "left a call unmatched: all_reduce on tp in"),
        ("other_op", "disagree on op"),
        ("other_shape", "disagree on inputs"),
        ("other_dtype", "disagree on inputs"),
        ("other_root", "disagree on root"),
        ("other_group", "stopped while waiting in all_reduce"),
        ("lost_message", "rank 0 sent 1 message to rank 1 (the last one at"),
        ("no_message", "posted for rank 0 and never waited for"),
    ],
)
def test_an_unmatched_call_is_named_with_its_site(unmatched, test, text):
    line = 1 + next(i for i, line in enumerate(UNMATCHED.splitlines()) if line.endswith(f"# {test}"))
    report = unmatched.report(f"test_{test}")
    assert "failed on " in report
    assert text in report
    assert f"test_it.py:{line}" in report


TIMEOUT = 1.0
DEADLY = f"""
import ctypes, os, signal, time
import pytest, torch
import torch.distributed as dist

def raise_signal(number):
    return lambda: os.kill(os.getpid(), number)

def loop():
    while True:
        pass

FAULTS = {{
    "exit": lambda: os._exit(7),
    "kill": raise_signal(signal.SIGKILL),
    "stop": raise_signal(signal.SIGSTOP),
    "crash": lambda: ctypes.string_at(0),
    "loop": loop,
    "sleep": lambda: time.sleep(60),
}}

@pytest.mark.ranks(4, timeout={TIMEOUT})
@pytest.mark.parametrize("fault", list(FAULTS))
def test_fault(rank, fault):
    if rank == 1:
        print("last words", flush=True)
        FAULTS[fault]()
    dist.all_reduce(torch.ones(3))  # others

@pytest.mark.ranks(4, timeout={TIMEOUT})
def test_all_loop():
    while True:
        dist.barrier()

@pytest.mark.ranks(2, timeout={TIMEOUT})
def test_deadlock(rank):
    groups = [dist.new_group([0, 1]) for _ in range(2)]
    dist.barrier(group=groups[rank])

@pytest.mark.ranks(2, timeout={TIMEOUT})
def test_blocking_send(rank):
    if rank == 0:
        dist.send(torch.ones(3), 1)  # blocking_send

@pytest.mark.ranks(4)
@pytest.mark.xfail(reason="known", strict=True)
def test_expected_death(rank):
    if rank == 1:
        os._exit(1)

@pytest.mark.ranks(4)
def test_after():
    x = torch.ones(1)
    dist.all_reduce(x)
    assert x.item() == 4
"""


@pytest.fixture(scope="module")
def deadly(run_suite):
    return run_suite(DEADLY, "--durations=0", "-vv")


def test_deadly_tests_fail_and_the_next_passes(deadly):
    faults = {f"test_fault[{fault}]": "FAILED" for fault in ("exit", "kill", "stop", "crash", "loop", "sleep")}
    others = {"test_all_loop": "FAILED", "test_deadlock": "FAILED", "test_blocking_send": "FAILED"}
    assert deadly.outcomes == {**faults, **others, "test_expected_death": "XFAIL", "test_after": "PASSED"}
    assert deadly.left == []
    # six of them hang for TIMEOUT each; the others end at once
    assert deadly.seconds < 6 * (TIMEOUT + 2) + 15
    slowest = max(float(seconds) for seconds in re.findall(r"^([\d.]+)s (?:call|setup)", deadly.text, re.MULTILINE))
    assert slowest < TIMEOUT + 2


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        ("exit", "exited with code 7, while running the test body"),
        ("kill", "killed by SIGKILL, while running the test body"),
        ("stop", f"did not end within {TIMEOUT:g} s and was killed, while running the test body"),
        ("crash", "killed by SIGSEGV, while running the test body"),
        ("loop", "in loop\n"),  # the stack
        ("sleep", f"did not end within {TIMEOUT:g} s and was killed, while running the test body"),
    ],
)
def test_a_dead_rank_is_named_and_so_is_what_the_others_did(deadly, fault, text):
    report = deadly.report(f"test_fault[{fault}]")
    line = 1 + next(i for i, line in enumerate(DEADLY.splitlines()) if line.endswith("# others"))
    assert "failed on rank 1 of 4\n\nrank 1:\n" in report
    assert text in report
    assert "ranks 0, 2, 3: stopped while waiting in all_reduce (all_reduce on tp) at " in report
    assert f"test_it.py:{line}\n" in report
    assert "Captured stdout call (rank 1)" in report
    assert "last words" in report


def test_a_deadlock_shows_where_each_rank_waits(deadly):
    report = deadly.report("test_deadlock")
    assert f"no end within {TIMEOUT:g} s: rank 0 was waiting in barrier" in report
    assert "rank 1 was waiting in barrier" in report


def test_a_send_that_nobody_receives_is_named_with_its_site(deadly):
    line = 1 + next(i for i, line in enumerate(DEADLY.splitlines()) if line.endswith("# blocking_send"))
    report = deadly.report("test_blocking_send")
    assert "failed on rank 0 of 2\n\nrank 0:\n" in report
    assert f'test_it.py", line {line} in test_blocking_send' in report


SLEEPY = """
import os, time
import pytest
import torch.distributed as dist

@pytest.mark.ranks(4)
def test_sleepy(rank):
    open(f"started{rank}", "w").close()
    if rank == 0:
        time.sleep(60)
    dist.barrier()
"""


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGINT, 2), (signal.SIGTERM, -signal.SIGTERM), (signal.SIGKILL, -signal.SIGKILL)],
)
def test_a_signal_to_pytest_leaves_nothing(start, finish, number, code):
    process, folder = start({"test_it.py": SLEEPY})
    deadline = time.monotonic() + 60
    while len(list(folder.glob("started*"))) < 4 and time.monotonic() < deadline:
        time.sleep(0.05)
    started = time.monotonic()
    os.kill(process.pid, number)
    session = finish(process, folder, started)
    assert session.code == code
    assert session.seconds < 20  # and not the 60 s for which rank 0 sleeps; idle it takes 1
    assert session.left == []
