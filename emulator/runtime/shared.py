"""Tensors that exist once per host: a safetensors file in shared memory that every process maps."""

import os
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor


def shared_folder() -> Path:
    """A new folder in shared memory (or the temp dir where there is none)."""
    shm = Path("/dev/shm")
    return Path(tempfile.mkdtemp(prefix=f"emulator-{os.getpid()}-", dir=shm if shm.is_dir() else None))


def write_shared(groups: Iterable[dict[str, Tensor]], folder: Path) -> None:
    """Writes each group of tensors to its own file in `folder`, one group in memory at a time."""
    for number, tensors in enumerate(groups):
        save_file({k: v.contiguous() for k, v in tensors.items()}, folder / f"{number:05d}.safetensors")


def map_shared(folder: Path) -> dict[str, Tensor]:
    """Views into the mapped files: no copy. They stay valid after the files are unlinked."""
    tensors: dict[str, Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as handle:
            for name in handle.keys():  # noqa: SIM118  (the handle is no mapping)
                tensors[name] = handle.get_tensor(name)
    return tensors


def remove_shared(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
