"""Rank graphs of the profiles' models, each lowered once per session. Do not write to them."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from emulator.layout.lowering import lower
from emulator.layout.plan import load_plan
from emulator.layout.rank_graph import RankGraph
from emulator.model.config import load_config
from emulator.model.program import Program, build_program

ProgramOf = Callable[..., Program]
Lowered = Callable[..., RankGraph]


@pytest.fixture(scope="session")
def program_of() -> ProgramOf:
    """program_of(model, layers=None, **config changes)"""

    @cache
    def make(model: str, layers: int | None, changes: tuple[tuple[str, Any], ...]) -> Program:
        return build_program(load_config(model).with_layers(layers).model_copy(update=dict(changes)))

    return lambda model, layers=None, **changes: make(model, layers, tuple(sorted(changes.items())))


@pytest.fixture(scope="session")
def lowered(program_of: ProgramOf) -> Lowered:
    """lowered(model, plan, tp=, ep=, tokens=, layers=None, **variants)"""

    @cache
    def make(
        model: str, plan: str, tp: int, ep: int, tokens: int, layers: int | None, variants: tuple[tuple[str, str], ...]
    ) -> RankGraph:
        return lower(program_of(model, layers), load_plan(plan, dict(variants)), {"tp": tp, "ep": ep}, tokens)

    def call(
        model: str, plan: str, *, tp: int, ep: int = 1, tokens: int, layers: int | None = None, **variants: str
    ) -> RankGraph:
        return make(model, plan, tp, ep, tokens, layers, tuple(sorted(variants.items())))

    return call


@pytest.fixture
def write_plan(tmp_path: Path) -> Callable[..., str]:
    """write_plan(text, name="mine") -> path of a plan file."""

    def write(text: str, name: str = "mine") -> str:
        path = tmp_path / f"{name}.toml"
        path.write_text(text)
        return str(path)

    return write
