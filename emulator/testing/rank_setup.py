"""Makes a forked pytest session the rank's own: nothing that it inherited may still act for the parent."""

import contextlib
import faulthandler
import logging
import os
import pdb
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from _pytest.capture import FDCapture, _get_multicapture
from _pytest.runner import SetupState


def adopt(session: pytest.Session, rank: int, folder: Path) -> None:
    """folder: where the rank keeps its output and stacks, for the parent to read when the rank is lost."""
    _keep_stacks(folder / f"{rank}.stack")
    _own_capture(session.config, folder, rank)
    _silence_reporting(session.config)
    _no_debugger(session.config)
    _own_temporary_files(session.config, rank)
    forget_fixtures(session)


def _keep_stacks(path: Path) -> None:
    """A crash (SIGSEGV, ...) and the watch's USR1 write the stack there."""
    file = path.open("w")  # faulthandler keeps it open
    faulthandler.enable(file, all_threads=False)
    faulthandler.register(signal.SIGUSR1, file, all_threads=False)


def _own_capture(config: pytest.Config, folder: Path, rank: int) -> None:
    """A capture file shared by fork has one offset for all processes: each rank gets its own."""
    manager: Any = config.pluginmanager.getplugin("capturemanager")
    if manager is None or manager._global_capturing is None:
        return
    capture = _get_multicapture(manager._method)
    for stream, name in ((capture.out, "out"), (capture.err, "err")):
        if isinstance(stream, FDCapture):  # the same, in a file that the parent can find
            with (folder / f"{rank}.{name}").open("wb+") as file:
                os.dup2(file.fileno(), stream.tmpfile.fileno(), inheritable=False)
    capture.start_capturing()
    capture.suspend_capturing()
    manager._global_capturing = capture


@contextlib.contextmanager
def quiet(config: pytest.Config) -> Iterator[None]:
    """Keeps the output of what runs outside of any test from the parent's terminal."""
    manager: Any = config.pluginmanager.getplugin("capturemanager")
    if manager is None or manager._global_capturing is None:
        yield
        return
    manager.resume_global_capture()
    try:
        yield
    finally:
        manager.suspend_global_capture()
        manager.read_global_capture()


def _silence_reporting(config: pytest.Config) -> None:
    """The parent reports. xdist's worker plugin would send down the parent's pipe."""
    manager = config.pluginmanager
    reporter: Any = manager.getplugin("terminalreporter")
    for plugin in list(manager.get_plugins()):
        if plugin is not reporter and hasattr(plugin, "pytest_warning_recorded"):
            manager.unregister(plugin)
    if reporter is not None:  # others ask it for a terminal writer: it stays, and writes nowhere
        reporter._tw._file = open(os.devnull, "w")  # noqa: SIM115
    # torch logs every failed call of its own accord, which would bury what the test logged
    logging.getLogger("c10d-NullHandler-default").setLevel(logging.INFO)


def _no_debugger(config: pytest.Config) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise RuntimeError("breakpoint() on a rank: ranks have no terminal, so no debugger can run there")

    for name in ("pdbinvoke", "pdbtrace"):
        if config.pluginmanager.has_plugin(name):
            config.pluginmanager.unregister(name=name)
    sys.breakpointhook = pdb.set_trace = refuse


def _own_temporary_files(config: pytest.Config, rank: int) -> None:
    """tmp_path below the session's folder: rank3/test_name0."""
    factory: Any = getattr(config, "_tmp_path_factory", None)
    if factory is not None and factory._basetemp is not None:
        factory._basetemp = factory._basetemp / f"rank{rank}"
        factory._basetemp.mkdir(mode=0o700, exist_ok=True)


def forget_fixtures(session: pytest.Session) -> None:
    """Fixtures that the parent set up are the parent's to tear down: a rank sets up its own."""
    session._setupstate = SetupState()
    for definition in _fixture_definitions(session):
        definition.cached_result = None
        definition._finalizers.clear()


def _fixture_definitions(session: pytest.Session) -> Iterator[Any]:
    """pytest 8 and 9 keep them in tables of different depth; those of parametrisation belong to the items."""
    tables = [table for name, table in vars(session._fixturemanager).items() if name.endswith("fixturedefs")]
    tables += [item._fixtureinfo.name2fixturedefs for item in session.items if hasattr(item, "_fixtureinfo")]
    while tables:
        table = tables.pop()
        if isinstance(table, dict):
            tables += table.values()
        elif isinstance(table, list | tuple):
            tables += table
        else:
            yield table
