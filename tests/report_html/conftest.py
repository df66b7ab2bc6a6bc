"""Runs whose pages the tests look at: 10 tokens on 3 ranks (rank 2 has one real token less than the others)."""

from pathlib import Path
from typing import Any

import pytest

from emulator.faults.catalogue import find_fault
from emulator.jobs import job
from emulator.jobs.matrix import faulty_scenario
from emulator.scenario import load_scenario

SIZES: dict[str, Any] = {"parallel": {"tp": 3}, "tokens": 10, "layers": 4}


@pytest.fixture(scope="session")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Traces and summary of a run that passes: 4 layers, the first two with a dense MLP."""
    folder = tmp_path_factory.mktemp("healthy")
    assert job.run(load_scenario("glm-5.1-mini", SIZES), folder)["verdict"] == "pass"
    return folder


@pytest.fixture(scope="session")
def broken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run in which rank 1 counts positions from its own window."""
    folder = tmp_path_factory.mktemp("broken")
    scenario = faulty_scenario(find_fault("positions-local-on-one-rank"), "glm-5.1-mini", SIZES)
    assert job.run(scenario, folder)["verdict"] == "fail"
    return folder
