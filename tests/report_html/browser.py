"""A headless Chromium: pictures of a page, and what its scripts made of it."""

import os
import re
import shutil
import subprocess
from html import unescape
from pathlib import Path

import pytest

_FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--hide-scrollbars",
    "--force-device-scale-factor=1",
)  # fmt: skip


def find_chromium() -> str:
    """The browser's path; the test is skipped where there is none."""
    path = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if path is None:
        pytest.skip("no chromium here (Debian: apt-get install chromium; launch/setup test does it for root)")
    return path


def _run(page: Path, folder: Path, *flags: str) -> str:
    command = [find_chromium(), *_FLAGS, f"--user-data-dir={folder / 'profile'}", *flags, page.as_uri()]
    found = subprocess.run(
        command, capture_output=True, text=True, timeout=120, env={**os.environ, "HOME": str(folder)}
    )
    assert found.returncode == 0, found.stderr[-2000:]
    return found.stdout


def screenshot(page: Path, folder: Path, *, width: int, height: int) -> Path:
    """A PNG of the page's top, width x height pixels."""
    path = folder / "page.png"
    _run(page, folder, f"--screenshot={path}", f"--window-size={width},{height}")
    return path


def dom(page: Path, folder: Path) -> str:
    """The document after its scripts ran."""
    return _run(page, folder, "--dump-dom")


def body_data(document: str) -> dict[str, int]:
    """The numbers that the page's script leaves on its body."""
    tag = re.search(r"<body[^>]*>", document)
    assert tag
    return {name: int(value) for name, value in re.findall(r'data-(\w+)="(\d+)"', tag[0])}


def cells(document: str, table: str) -> list[list[str]]:
    """The text of a table's body rows, by the table's id."""
    found = re.search(rf'<table id="{table}">.*?<tbody>(.*?)</tbody>', document, re.DOTALL)
    assert found, f"no table {table}"
    rows = re.findall(r"<tr>(.*?)</tr>", found[1], re.DOTALL)
    return [[unescape(re.sub(r"<[^>]*>", "", c)) for c in re.findall(r"<td.*?>(.*?)</td>", r, re.DOTALL)] for r in rows]
