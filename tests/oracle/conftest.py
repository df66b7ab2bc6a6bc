"""Fixtures of the oracle tests: pairs of HF's model and ours with the same random checkpoint."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from .hugging_face import Checkpoint, Run, make_checkpoint, mini_config, run
from .ours import Ours


@dataclass(frozen=True)
class Pair:
    hf: Checkpoint
    ours: Ours

    def tokens(self, count: int) -> Tensor:
        return torch.randint(self.ours.config.vocab_size, (count,), generator=torch.Generator().manual_seed(count))

    def run(self, input_ids: Tensor) -> Run:
        return run(self.hf.model, input_ids)


PairMaker = Callable[..., Pair]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """pytest-xdist runs one process per core."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def make_pair(tmp_path_factory: pytest.TempPathFactory) -> PairMaker:
    """make_pair(mini, dtype, **config changes): made once per session and combination. Do not write to it."""
    made: dict[str, Pair] = {}

    def make(name: str, dtype: torch.dtype, **changes: Any) -> Pair:
        key = repr((name, dtype, sorted(changes.items())))
        if key not in made:
            config = mini_config(name, **changes)
            folder: Path = tmp_path_factory.mktemp("oracle")
            hf = make_checkpoint(folder, config, dtype)
            made[key] = Pair(hf, Ours.load(config, hf.folder, dtype))
        return made[key]

    return make
