"""One small rank graph whose tokens need padding, and finders for its nodes."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
from torch import fx

from emulator.layout.lowering import lower
from emulator.layout.plan import load_plan
from emulator.layout.rank_graph import RankGraph
from emulator.model.config import load_config
from emulator.model.program import Program, build_program


@dataclass(frozen=True)
class Lowered:
    """The mini GLM's first three layers (two dense, one MoE), 5 tokens on tp 2, ep 2: rank 1 has one pad row."""

    program: Program
    graph: RankGraph

    def at(self, module: str, port: str) -> fx.Node:
        """The first node that crosses a module's edge at a port."""
        name = next(b.node for b in self.graph.boundaries if (b.module, b.port) == (module, port))
        return next(n for n in self.graph.graph.nodes if n.name == name)


@pytest.fixture(scope="session")
def lowered() -> Lowered:
    program = build_program(load_config("glm-5.1-mini").with_layers(3))
    return Lowered(program, lower(program, load_plan("dsa_cp"), {"tp": 2, "ep": 2}, 5))


@pytest.fixture
def nodes_of(lowered: Lowered) -> Callable[[str], list[fx.Node]]:
    """nodes_of(op): the Program's nodes of an op of the vocabulary."""
    from emulator.ops.registry import op_name

    return lambda op: [n for n in lowered.program.graph.nodes if op_name(n.target) == op]
