"""Runs small test files in a pytest of their own, as a project that installs the package would."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

import emulator

_OUTCOME = re.compile(
    r"(?:^(\S+::\S+) |\] )(PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS)(?: (\S+::\S+)|[ (]|$)", re.MULTILINE
)


@dataclass
class Session:
    """A finished pytest. outcomes: last outcome of each test, by the name after the file's."""

    text: str
    code: int
    seconds: float
    outcomes: dict[str, str]
    left: list[str]  # processes and files that should be gone

    def report(self, test: str) -> str:
        """The failure section of a test."""
        found = re.split(r"^_{3,} (.*?) _{3,}$|^={3,} .* ={3,}$", self.text, flags=re.MULTILINE)
        return "".join(body or "" for name, body in zip(found[1::2], found[2::2]) if name and name.endswith(test))

    def count(self) -> dict[str, int]:
        return dict(Counter(self.outcomes.values()))


@pytest.fixture(scope="session")
def start(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[subprocess.Popen, Path]]:
    def start(files: dict[str, str], *args: str, capture: bool = True) -> tuple[subprocess.Popen, Path]:
        folder = tmp_path_factory.mktemp("suite")
        (folder / "tmp").mkdir()
        (folder / "shm").write_text("\n".join(shared_memory()))
        for name, text in files.items():
            (folder / name).write_text(text)
        env = {
            **{k: v for k, v in os.environ.items() if not k.startswith(("PYTEST_", "COV_"))},
            "PYTHONPATH": str(Path(emulator.__file__).parents[1]),
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
            "TMPDIR": str(folder / "tmp"),
            "COLUMNS": "200",
        }
        command = [sys.executable, "-m", "pytest", "-p", "emulator.testing.plugin", "-p", "xdist", "-v", *args]
        output = (folder / "output").open("w")
        process = subprocess.Popen(
            command, cwd=folder, env=env, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
        )
        output.close()
        return process, folder

    return start


@pytest.fixture(scope="session")
def finish() -> Callable[..., Session]:
    def finish(process: subprocess.Popen, folder: Path, started: float, limit: float = 100) -> Session:
        try:
            code = process.wait(limit)
        except subprocess.TimeoutExpired:
            process.kill()
            raise AssertionError(f"hung: {(folder / 'output').read_text()[-3000:]}") from None
        seconds = time.monotonic() - started
        text = (folder / "output").read_text()
        outcomes: dict[str, str] = {}
        for first, outcome, last in _OUTCOME.findall(text):
            if first or last:
                outcomes[(first or last).partition("::")[2]] = outcome
        return Session(text, code, seconds, outcomes, left_by(folder))

    return finish


@pytest.fixture(scope="session")
def run_suite(start, finish) -> Callable[..., Session]:
    def run_suite(files: dict[str, str] | str, *args: str, limit: float = 100) -> Session:
        started = time.monotonic()
        process, folder = start({"test_it.py": files} if isinstance(files, str) else files, *args)
        return finish(process, folder, started, limit)

    return run_suite


def left_by(folder: Path) -> list[str]:
    """Processes and temporary files of a pytest that ran in `folder`."""
    deadline = time.monotonic() + 2.0  # a killed parent's ranks end by a signal
    while (left := _processes(folder)) and time.monotonic() < deadline:
        time.sleep(0.05)
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    files = [str(path) for path in (folder / "tmp").glob("emulator-*")]
    memory = (folder / "shm").read_text().splitlines()
    files += [file for file in shared_memory() if file not in memory]
    return [f"process {pid}" for pid in left] + files


def shared_memory() -> list[str]:
    """Shared-memory files whose maker is gone: other suites may run beside this one."""
    files = [(path, re.match(r"emulator-(\d+)-", path.name)) for path in Path("/dev/shm").glob("*emulator*")]
    return [str(path) for path, maker in files if not maker or not psutil.pid_exists(int(maker[1]))]


def _processes(folder: Path) -> list[int]:
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.cwd() == str(folder) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
    return found
