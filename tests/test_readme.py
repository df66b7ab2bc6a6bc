"""The README's code runs as it stands, and its commands exist."""

import re
import subprocess
import sys
from pathlib import Path

README = Path(__file__).parent.parent / "README.md"


def _run(folder: Path, source: str) -> subprocess.CompletedProcess:
    (folder / "test_from_readme.py").write_text(source)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(folder)]
    return subprocess.run(command, capture_output=True, text=True, cwd=folder, timeout=120)


def test_in_your_own_test_suite(tmp_path):
    (block,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.S)
    done = _run(tmp_path, block)
    assert done.returncode == 0, done.stdout
    assert "3 passed" in done.stdout
    # and the example can fail: a gather that forgets to drop the padding
    broken = _run(tmp_path, block.replace("return full[:tokens]", "return full"))
    assert "2 failed, 1 passed" in broken.stdout, broken.stdout


def test_the_two_commands_exist():
    top = README.parent
    for command in ("launch/run", "launch/test"):
        assert command in README.read_text()
        assert (top / command).stat().st_mode & 0o111
