"""Rank graphs of the profiles' models."""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

from emulator.layout.lowering import lower
from emulator.layout.plan import load_plan
from emulator.layout.rank_graph import RankGraph
from emulator.model.config import load_config
from emulator.model.program import Program, build_program

Lower = Callable[..., RankGraph]


@cache
def _program(model: str, changes: tuple[tuple[str, Any], ...]) -> Program:
    return build_program(load_config(model).model_copy(update=dict(changes)))


@pytest.fixture(scope="session")
def program_of() -> Callable[..., Program]:
    """program_of(model, **config changes), traced once."""
    return lambda model, **changes: _program(model, tuple(sorted(changes.items())))


@pytest.fixture
def fresh(program_of: Callable[..., Program]) -> Lower:
    """fresh(plan, model, tp=, tokens=, variants=, **config changes): a graph of its own, to write to."""

    def make(
        plan: str = "dsa_cp", model: str = "glm-5.1-mini", *, tp: int = 4, tokens: int = 97,
        variants: dict[str, str] | None = None, **changes: Any,
    ) -> RankGraph:  # fmt: skip
        return lower(program_of(model, **changes), load_plan(plan, variants or {}), {"tp": tp, "ep": tp}, tokens)

    return make


@pytest.fixture(scope="session")
def full_size(program_of: Callable[..., Program]) -> Lower:
    """full_size(model, plan): tp 16, ep 16, 4096 tokens; lowered once, not to be written to."""

    @cache
    def make(model: str, plan: str) -> RankGraph:
        return lower(program_of(model), load_plan(plan, {}), {"tp": 16, "ep": 16}, 4096)

    return make
