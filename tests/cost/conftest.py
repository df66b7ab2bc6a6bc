"""Traces of real runs, made once for the tests that only read them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from emulator import job
from emulator.scenario import load_scenario
from emulator.trace.record import read_trace, trace_files

Traces = list[tuple[dict[str, Any], list[dict[str, Any]]]]


@pytest.fixture(scope="session")
def traces_of(tmp_path_factory) -> Callable[..., Traces]:
    """traces_of(plan, tp, mode, ...): traces of glm-5.1-mini with 30 tokens (not divisible by 4); runs are kept."""
    known: dict[str, Traces] = {}

    def run(plan: str, tp: int, mode: str = "shape", **more: Any) -> Traces:
        key = repr((plan, tp, mode, more))
        if key not in known:
            folder: Path = tmp_path_factory.mktemp("traces")
            given = {"plan": plan, "parallel": {"tp": tp}, "mode": mode, "tokens": 30, "layers": 4, **more}
            summary = job.run(load_scenario("glm-5.1-mini", given), folder)
            assert summary["verdict"] == "pass"
            known[key] = [read_trace(path) for path in trace_files(folder)]
        return known[key]

    return run
