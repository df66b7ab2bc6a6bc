"""Emulates how DeepSeek-style sparse-attention models are laid out over tensor-parallel ranks.

Public API: load_scenario, run (one scenario -> summary), load_config, has_dsa_structure, build_program, load_plan,
lower, World and Mesh.
"""

from emulator.errors import LayoutError, RankError, UsageError
from emulator.job import run
from emulator.layout.lowering import lower
from emulator.layout.plan import load_plan
from emulator.model.config import load_config
from emulator.model.program import build_program
from emulator.model.structure import has_dsa_structure
from emulator.runtime.mesh import Mesh
from emulator.runtime.world import World
from emulator.scenario import Scenario, load_scenario

__all__ = [
    "LayoutError",
    "Mesh",
    "RankError",
    "Scenario",
    "UsageError",
    "World",
    "build_program",
    "has_dsa_structure",
    "load_config",
    "load_plan",
    "load_scenario",
    "lower",
    "run",
]
