"""The pytest plugin: `@pytest.mark.ranks(8, mesh={"dp": 2, "tp": 4})` runs a test's body on every rank of a world.

This module holds what a test sees: the marker and the fixtures. parent.py runs in the pytest process and hands marked
tests to the ranks; rank_side.py runs on the ranks. Nothing here imports torch, so that sessions without marked tests
pay nothing.
"""

from typing import Any

import pytest

from emulator.testing.parent import ParentSide
from emulator.testing.rank_side import RANK_SIDE

_MARKER = (
    "ranks(size, mesh=None, timeout=None, memory_limit=None, inherit=None): run the test on every one of `size` ranks, "
    'laid out over the mesh ({"dp": 2, "tp": 4}; default one tp axis). timeout: seconds for the whole test (default: '
    "ini ranks_timeout). memory_limit: bytes of address space a rank may use beyond what it inherits. inherit: a "
    "function of some of the test's parameters, called once in the pytest process; the ranks inherit its result "
    "without a copy (fixture `inherited`)"
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addini("ranks_timeout", "seconds that a test on ranks may take (marker argument timeout)", default="60")
    parser.addini("ranks_worlds", "worlds of ranks kept alive between tests", default="3")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", _MARKER)
    config.pluginmanager.register(ParentSide(config), "emulator-parent")


def _context(request: pytest.FixtureRequest) -> Any:
    side = request.config.stash.get(RANK_SIDE, None)
    if side is None:
        pytest.fail(
            f"fixture {request.fixturename!r} exists only in tests marked with @pytest.mark.ranks(n)", pytrace=False
        )
    return side.context


def _group(request: pytest.FixtureRequest, axis: str) -> Any:
    groups, mesh = _context(request).groups, _context(request).mesh
    if axis not in groups:
        pytest.fail(
            f"the mesh {mesh.describe()} has no {axis} group (it has: {', '.join(groups) or 'none'}); "
            f'ask for one with @pytest.mark.ranks({mesh.size}, mesh={{"{axis}": n, ...}})',
            pytrace=False,
        )
    return groups[axis]


@pytest.fixture(scope="session")
def rank(request: pytest.FixtureRequest) -> int:
    """This rank's number, 0 .. size-1."""
    return _context(request).rank


@pytest.fixture(scope="session")
def rank_context(request: pytest.FixtureRequest) -> Any:
    """The emulator.runtime.rank_process.RankContext: board, transport, groups and mesh of this rank."""
    return _context(request)


@pytest.fixture(scope="session")
def mesh(request: pytest.FixtureRequest) -> Any:
    """The emulator.runtime.mesh.Mesh of the test."""
    return _context(request).mesh


@pytest.fixture
def inherited(request: pytest.FixtureRequest) -> Any:
    """What the marker's `inherit` function made in the pytest process, before this world's ranks were forked."""
    _context(request)
    return request.config.stash[RANK_SIDE].inherited


# The groups are function-scoped: after a failed test the ranks get new ones.
@pytest.fixture
def tp_group(request: pytest.FixtureRequest) -> Any:
    """This rank's process group along the tp axis."""
    return _group(request, "tp")


@pytest.fixture
def dp_group(request: pytest.FixtureRequest) -> Any:
    """This rank's process group along the dp axis."""
    return _group(request, "dp")


@pytest.fixture
def ep_group(request: pytest.FixtureRequest) -> Any:
    """This rank's expert-parallel process group (consecutive blocks of `ep` ranks)."""
    return _group(request, "ep")


@pytest.fixture
def mesh_groups(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Every process group of this rank, by axis; for meshes with axes of your own naming."""
    return dict(_context(request).groups)
