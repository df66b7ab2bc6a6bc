"""The arrows of DESIGN section 5: imports point one way, files stay small, and nothing depends on files beside the
checkout."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "emulator"

# A module imports from its own level or a lower one (a smaller number).
LEVELS: list[set[str]] = [
    {"errors", "profiles"},
    {"ops", "model"},
    {"layout", "passes"},
    {"trace", "runtime"},
    {"verify", "cost", "memory", "faults", "export"},
    {"scenario", "jobs", "launcher"},
    {"cli", "report", "report_html", "testing", "nn", "__main__", "__init__"},  # the last two: public names
]
LEVEL_OF = {part: level for level, parts in enumerate(LEVELS) for part in parts}

# Within a level, or against the general rule.
NEVER = [
    ("ops", "layout"),
    ("model", "layout"),
    ("layout", "runtime"),
    ("layout", "trace"),
    ("trace", "runtime"),
    ("cost", "runtime"),  # reads traces, never runs anything
]

TALKS = re.compile(r"^\s*(import|from) torch\.distributed( as|$| import)|from torch import distributed", re.MULTILINE)

FILES = sorted(PACKAGE.rglob("*.py"))


def part_of(path: Path) -> str:
    """The folder or top-level module that a file belongs to."""
    inside = path.relative_to(PACKAGE)
    return inside.parts[0] if len(inside.parts) > 1 else inside.stem


def imported_parts(path: Path) -> Iterator[tuple[int, str]]:
    """(line, part of the package) of every import in a file, those inside functions too."""
    for node in ast.walk(ast.parse(path.read_text())):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}:{node.lineno}: the package imports by full names"
            module = node.module or ""
            names = [f"{module}.{alias.name}" for alias in node.names] if module == "emulator" else [module]
        for name in names:
            first, _, rest = name.partition(".")
            if first != "emulator":
                continue
            part = rest.partition(".")[0]
            known = (PACKAGE / part).is_dir() or (PACKAGE / f"{part}.py").exists()
            yield node.lineno, part if part and known else "__init__"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_point_one_way(path: Path) -> None:
    part = part_of(path)
    assert part in LEVEL_OF, f"{part}: give it a level"
    for line, imported in imported_parts(path):
        where = f"{path.relative_to(ROOT)}:{line}: {part} imports {imported}"
        assert LEVEL_OF[imported] <= LEVEL_OF[part], f"{where}, which stands above it"
        assert (part, imported) not in NEVER, where


def test_imports_are_seen(tmp_path: Path) -> None:
    # the parser of these tests, on every form of import
    code = (
        "import emulator.runtime.world\nfrom emulator import jobs, run, layout\nfrom emulator.ops.registry import R\n"
        "def f():\n    from emulator.verify.values import ValueCheck\nimport torch\n"
    )
    file = tmp_path / "x.py"
    file.write_text(code)
    found = list(imported_parts(file))
    assert sorted(found) == sorted(
        [(1, "runtime"), (2, "jobs"), (2, "__init__"), (2, "layout"), (3, "ops"), (5, "verify")]
    )


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_a_file_holds_one_idea(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 330


def test_only_the_runtime_talks_to_other_ranks() -> None:
    # DESIGN section 6. (torch.distributed.tensor holds the placement types, which talk to nobody.)
    talkers = {part_of(p) for p in FILES if TALKS.search(p.read_text())}
    assert talkers <= {"runtime", "launcher"}  # the launcher: torchrun's rendezvous


def test_nothing_reads_the_folder_beside_the_checkout() -> None:
    files = [p for folder in ("emulator", "profiles", "launch") for p in (ROOT / folder).rglob("*") if p.is_file()]
    assert len(files) > 50
    for path in files:
        if "__pycache__" in path.parts:
            continue
        text = path.read_text(errors="replace")
        assert "../shared" not in text, path
        assert "/work/shared" not in text, path
