"""Finds the data files under profiles/: beside the package in a checkout, inside it in a wheel."""

import contextlib
import tomllib
from pathlib import Path

from emulator.errors import UsageError

KINDS = ("models", "plans", "contracts", "scenarios", "devices", "kernels", "quant", "accounting")


def root() -> Path:
    """The profiles folder of this installation."""
    inside = Path(__file__).parent / "profiles"
    return inside if inside.is_dir() else Path(__file__).parent.parent / "profiles"


def names(kind: str) -> list[str]:
    """Names available under profiles/<kind>, sorted."""
    return sorted(p.name if p.is_dir() else p.stem for p in (root() / kind).iterdir() if not p.name.startswith("."))


def find(kind: str, name: str) -> Path:
    """Path of a profile: a name under profiles/<kind>, or a path to a user's own file or folder.

    Raises UsageError that lists the known names when there is none.
    """
    for candidate in (root() / kind / name, root() / kind / f"{name}.toml", Path(name)):
        with contextlib.suppress(OSError):  # a name that is too long, a folder that may not be read
            if candidate.exists():
                return candidate
    what = kind.removesuffix("s")
    raise UsageError(f"unknown {what} {name!r}: no such file, and profiles/{kind} has {', '.join(names(kind))}")


def load_toml(path: Path) -> dict:
    """A parsed TOML file; UsageError with the parser's position when it is malformed."""
    try:
        return tomllib.loads(path.read_text())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError) as error:
        raise UsageError(f"{path}: not readable as TOML: {error}") from None
