"""Traces of real runs, made once for the tests that only read them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from emulator.jobs import job
from emulator.scenario import load_scenario
from emulator.trace.record import read_trace, trace_files

Traces = list[tuple[dict[str, Any], list[dict[str, Any]]]]


@pytest.fixture(scope="session")
def traces_of(tmp_path_factory) -> Callable[..., Traces]:
    """traces_of(plan, tp): traces of glm-5.1-mini with 30 tokens (not divisible by 4) and values; runs are kept."""
    known: dict[tuple[str, int], Traces] = {}

    def run(plan: str, tp: int) -> Traces:
        key = plan, tp
        if key not in known:
            folder: Path = tmp_path_factory.mktemp("traces")
            given = {"plan": plan, "parallel": {"tp": tp}, "tokens": 30, "layers": 4}
            summary = job.run(load_scenario("glm-5.1-mini", given), folder)
            assert summary["verdict"] == "pass"
            assert summary["cost"] is None  # no device was named
            known[key] = [read_trace(path) for path in trace_files(folder)]
        return known[key]

    return run
