"""Emulates how DeepSeek-style sparse-attention models are laid out over tensor-parallel ranks.

The names below are the public API. They are imported on first use: the pytest plugin is loaded in every test session
of a project that installs this package, and most of them never need torch for it.
"""

import importlib
from typing import Any

_EXPORTS = {
    "LayoutError": "emulator.errors",
    "RankError": "emulator.errors",
    "UsageError": "emulator.errors",
    "Mesh": "emulator.runtime.mesh",
    "Scenario": "emulator.scenario",
    "World": "emulator.runtime.world",
    "build_program": "emulator.model.program",
    "check_graph": "emulator.jobs.graph_check",
    "has_dsa_structure": "emulator.model.structure",
    "load_config": "emulator.model.config",
    "load_plan": "emulator.layout.plan",
    "load_scenario": "emulator.scenario",
    "lower": "emulator.layout.lowering",
    "run": "emulator.jobs.job",
    "write_flight_records": "emulator.trace.flight_recorder",
    "record": "emulator.testing.record",
    "assert_collectives": "emulator.testing.asserts",
    "assert_layout": "emulator.testing.asserts",
    "assert_same_on_all_ranks": "emulator.testing.asserts",
    "assert_sums_to": "emulator.testing.asserts",
}
_MODULES = ("nn",)
__all__ = sorted((*_EXPORTS, *_MODULES))


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"emulator.{name}")
    if name not in _EXPORTS:
        raise AttributeError(f"module 'emulator' has no attribute {name!r}")
    return getattr(importlib.import_module(_EXPORTS[name]), name)


def __dir__() -> list[str]:
    return __all__
