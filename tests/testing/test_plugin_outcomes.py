"""One result for each test of a multi-rank suite, and what its report says."""

import pickle
import re
from pathlib import Path

import pytest

SUITE = """
import logging, os, sys, warnings
import pytest, torch
import torch.distributed as dist

LIFE = []

@pytest.fixture(scope="session")
def of_session(rank):
    LIFE.append("session")
    yield 10 * rank
    assert dist.get_rank() == rank  # teardown runs on the rank, too

@pytest.fixture(scope="module")
def of_module(of_session):
    LIFE.append("module")
    yield of_session + 1
    LIFE.append("module ended")

@pytest.fixture(scope="class", params=["a", "b"])
def of_class(of_module, request):
    return request.param

@pytest.fixture
def of_function(of_module, tmp_path, monkeypatch):
    monkeypatch.setenv("OF_MODULE", str(of_module))
    (tmp_path / "file").write_text(str(of_module))
    return tmp_path

def test_on_no_ranks():  # its fixtures and its autograd must not disturb the ranks that are forked after it
    x = torch.randn(256, 256, requires_grad=True)
    (x @ x).sum().backward()
    assert not dist.is_initialized()

@pytest.mark.ranks(4)
def test_all_reduce(rank, tp_group):
    x = torch.full((3,), float(rank))
    dist.all_reduce(x, group=tp_group)
    assert x.tolist() == [6.0] * 3

@pytest.mark.ranks(4)
@pytest.mark.parametrize("value", [1, 2])
@pytest.mark.parametrize("scale", [3.0, pytest.param(5.0, marks=pytest.mark.skip(reason="not five"))])
def test_parameters(rank, value, scale):
    x = torch.tensor([value * scale])
    x.requires_grad_().sum().backward()
    dist.all_reduce(x.grad)
    assert x.grad.item() == 4

@pytest.mark.ranks(4)
class TestClass:
    def test_fixtures(self, of_function, rank, of_class):
        assert (of_function / "file").read_text() == str(10 * rank + 1) == os.environ["OF_MODULE"]
        assert f"rank{rank}" in str(of_function)

    def test_fixtures_are_shared(self, of_class):
        assert LIFE == ["session", "module"]

@pytest.mark.ranks(4)
@pytest.mark.usefixtures("of_session")
def test_streams(capsys, caplog):
    print("out")
    logging.getLogger("mine").warning("logged")
    assert capsys.readouterr().out == "out\\n"
    assert "logged" in caplog.text

@pytest.mark.ranks(8, mesh={"dp": 2, "tp": 4, "ep": 2})
def test_mesh(mesh, rank, tp_group, dp_group, ep_group, mesh_groups):
    for axis, group in (("tp", tp_group), ("dp", dp_group), ("ep", ep_group)):
        x = torch.tensor([rank])
        dist.all_reduce(x, group=group)
        assert x.item() == sum(mesh.members(axis, rank))
    assert sorted(mesh_groups) == ["dp", "ep", "tp"]

@pytest.mark.ranks(4)
@pytest.mark.parametrize("round", range(2))
def test_own_groups(round, rank):
    group = dist.new_group([1, 3])
    if rank in (1, 3):
        dist.barrier(group=group)

@pytest.mark.ranks(2)
def test_messages(rank):
    x = torch.tensor([rank])
    if rank == 0:
        dist.send(x, 1)
    else:
        dist.recv(x, 0)
        assert x.item() == 0

MADE = []

def heavy(n, factor=2):
    MADE.append(n)
    return os.getpid(), torch.full((n,), factor), list(MADE)

@pytest.mark.ranks(2, inherit=heavy)
@pytest.mark.parametrize("n", [3, 4])
@pytest.mark.parametrize("other", "ab")
def test_inherits(n, other, inherited):  # made once for each n, in the parent
    process, x, made = inherited
    assert process == os.getppid()
    assert x.tolist() == [2] * n
    assert made == [3, 4][: n - 2]

@pytest.mark.ranks(4)
def test_warns():
    warnings.warn("mind the gap")

@pytest.mark.ranks(4)
def test_skips():
    pytest.skip("not today")

@pytest.mark.ranks(64)
@pytest.mark.skipif("os.cpu_count() < 10**6", reason="few processors")
def test_skips_without_ranks():
    pass

@pytest.mark.ranks(4)
@pytest.mark.xfail(reason="known")
def test_xfail_on_one(rank):
    assert rank != 1
    dist.barrier()

@pytest.mark.ranks(4)
@pytest.mark.xfail(reason="known", strict=True, raises=AssertionError)
def test_xfail_strict(rank):
    assert rank != 1
    dist.barrier()

@pytest.mark.ranks(4)
@pytest.mark.xfail(reason="known", strict=True)
def test_bad_xfail_strict():
    pass

@pytest.mark.ranks(4)
@pytest.mark.xfail(reason="known")
def test_xpass():
    pass

# -- from here on: planted failures, each followed by the next test on the same ranks

@pytest.mark.ranks(4)
def test_bad_values(rank, tp_group):
    print("seen by all")
    print("only", rank, file=sys.stderr)
    logging.getLogger("mine").warning("logged")
    if rank in (1, 3):
        assert rank * 10 == 17
    dist.all_reduce(torch.ones(3))

@pytest.mark.ranks(4)
def test_bad_everywhere(rank, tp_group):
    value = [1, 2, 3]
    assert value == [1, 2, 4]

@pytest.mark.ranks(4)
def test_bad_cause():
    try:
        1 / 0
    except ZeroDivisionError as error:
        raise KeyError("outer") from error

@pytest.mark.ranks(4)
def test_bad_partial_skip(rank):
    if rank == 2:
        pytest.skip("not me")
    dist.barrier()

@pytest.fixture
def broken(rank):
    assert rank != 1, "broken fixture"

@pytest.mark.ranks(4)
def test_bad_setup(broken):
    dist.barrier()

@pytest.fixture
def breaks(rank):
    yield
    assert rank != 1, "breaking fixture"

@pytest.mark.ranks(4)
def test_bad_teardown(breaks):
    pass

@pytest.mark.ranks(4)
def test_bad_debugger():
    breakpoint()

@pytest.mark.ranks(2)
def test_bad_axis(dp_group):
    pass

@pytest.mark.ranks(3, mesh={"dp": 2})
def test_bad_mark():
    pass

def test_bad_fixture(rank):
    pass

def failing():
    raise KeyError("nothing")

@pytest.mark.ranks(2, inherit=failing)
def test_bad_inherit(inherited):
    pass

@pytest.mark.ranks(2, memory_limit=200 << 20)
def test_bad_memory(rank):
    bytearray(400 << 20 if rank == 1 else 4)

@pytest.mark.ranks(4)
def test_last(rank, of_module):
    x = torch.ones(1)
    dist.all_reduce(x)
    assert x.item() == 4 and of_module == 10 * rank + 1
"""


@pytest.fixture(scope="module")
def session(run_suite):
    return run_suite(SUITE, "-rA")


GOOD = {
    "test_on_no_ranks": "PASSED",
    "test_all_reduce": "PASSED",
    "test_parameters[3.0-1]": "PASSED",
    "test_parameters[3.0-2]": "PASSED",
    "test_parameters[5.0-1]": "SKIPPED",
    "test_parameters[5.0-2]": "SKIPPED",
    "TestClass::test_fixtures[a]": "PASSED",
    "TestClass::test_fixtures[b]": "PASSED",
    "TestClass::test_fixtures_are_shared[a]": "PASSED",
    "TestClass::test_fixtures_are_shared[b]": "PASSED",
    "test_streams": "PASSED",
    "test_mesh": "PASSED",
    "test_own_groups[0]": "PASSED",
    "test_own_groups[1]": "PASSED",
    "test_messages": "PASSED",
    **{f"test_inherits[{other}-{n}]": "PASSED" for other in "ab" for n in (3, 4)},
    "test_warns": "PASSED",
    "test_skips": "SKIPPED",
    "test_skips_without_ranks": "SKIPPED",
    "test_xfail_on_one": "XFAIL",
    "test_xfail_strict": "XFAIL",
    "test_xpass": "XPASS",
    "test_last": "PASSED",
}
BAD = {
    "test_bad_xfail_strict": "FAILED",
    "test_bad_values": "FAILED",
    "test_bad_everywhere": "FAILED",
    "test_bad_cause": "FAILED",
    "test_bad_partial_skip": "FAILED",
    "test_bad_setup": "ERROR",
    "test_bad_teardown": "ERROR",
    "test_bad_debugger": "FAILED",
    "test_bad_axis": "ERROR",
    "test_bad_mark": "ERROR",
    "test_bad_fixture": "ERROR",
    "test_bad_inherit": "ERROR",
    "test_bad_memory": "FAILED",
}


def test_each_test_has_its_one_outcome(session):
    assert session.outcomes == {**GOOD, **BAD}
    assert session.code == 1


def test_nothing_is_left(session):
    assert session.left == []


def test_a_failure_shows_each_ranks_values_and_what_the_others_did(session):
    report = session.report("test_bad_values")
    assert report.lstrip().startswith("failed on ranks 1, 3 of 4\n\nrank 1:\n")
    assert ">           assert rank * 10 == 17\nE           assert (1 * 10) == 17\n" in report
    assert "rank 3, at the same place:\nE           assert (3 * 10) == 17\n" in report
    assert report.count(">           assert rank * 10") == 1
    assert "ranks 0, 2: stopped while waiting in all_reduce (all_reduce on tp) at " in report
    assert "PeerFailed" not in report
    assert "test_it.py::test_bad_values - ranks 1, 3 of 4: assert (1 * 10) == 17" in session.text


def test_output_is_labelled_with_its_rank(session):
    report = session.report("test_bad_values")
    assert "Captured stdout call (ranks 0-3) ---" in report
    assert report.count("seen by all") == 1 + 1  # the source line, the output
    for rank in range(4):
        assert f"Captured stderr call (rank {rank})" in report
        assert f"\nonly {rank}\n" in report
    assert "Captured log call (ranks 0-3)" in report
    assert "only" not in session.text.partition("= ERRORS =")[0]


def test_identical_failures_are_folded(session):
    report = session.report("test_bad_everywhere")
    assert "failed on all 4 ranks\n\nranks 0-3:\n" in report
    assert report.count("assert [1, 2, 3] == [1, 2, 4]\nE  ") == 1
    assert "At index 2 diff: 3 != 4" in report  # pytest's own explanation
    assert "rank = " not in report  # differs between the ranks


@pytest.mark.parametrize(
    ("test", "texts"),
    [
        ("test_bad_cause", ["ZeroDivisionError: division by zero", "direct cause", "KeyError: 'outer'"]),
        ("test_bad_partial_skip", ["rank 2 skipped (not me), ranks 0, 1, 3 did not"]),
        ("test_bad_setup", ["failed on rank 1 of 4", "broken fixture", "ranks 0, 2, 3: stopped while waiting in"]),
        ("test_bad_teardown", ["failed on rank 1 of 4", "breaking fixture"]),
        ("test_bad_debugger", ["ranks have no terminal"]),
        ("test_bad_axis", ["has no dp group (it has: tp)"]),
        ("test_bad_mark", ["@pytest.mark.ranks: mesh {'dp': 2} has 2 ranks, the world 3"]),
        ("test_bad_fixture", ["fixture 'rank' exists only in tests marked with @pytest.mark.ranks(n)"]),
        ("test_bad_inherit", ["inherit=failing: KeyError: 'nothing'"]),
        ("test_bad_memory", ["failed on rank 1 of 2", "MemoryError"]),
    ],
)
def test_reports_name_the_cause(session, test, texts):
    report = session.report(test)
    for text in texts:
        assert text in report


def test_warnings_of_the_ranks_reach_the_summary_once(session):
    summary = session.text.partition("warnings summary")[2]
    assert summary.count("UserWarning: mind the gap") == 1


def test_a_failure_leaves_flight_records_that_its_report_names(session):
    folder = Path(re.search(r"torchfrtrace -p flight_ (\S+)", session.report("test_bad_values"))[1])
    dumps = {path.name: pickle.loads(path.read_bytes()) for path in folder.iterdir()}
    assert sorted(dumps) == ["flight_0", "flight_1", "flight_2", "flight_3"]
    made = {name: [entry["profiling_name"] for entry in dump["entries"]] for name, dump in dumps.items()}
    assert made["flight_1"] == made["flight_3"] == []  # they failed before they called
    assert all("all_reduce" in made[name][0] for name in ("flight_0", "flight_2"))
