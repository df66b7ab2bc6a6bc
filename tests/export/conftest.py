"""A real run of two steps on dp 2 x tp 2 ranks, in shape mode: ragged prefill, then decode."""

from pathlib import Path

import pytest

from emulator.jobs import job
from emulator.scenario import load_scenario, parse_requests


@pytest.fixture(scope="session")
def traced(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("traced")
    steps = [parse_requests(text).model_dump() for text in ("5:0,2:0/4:0", "1:5,1:2/1:4")]
    given = {"parallel": {"tp": 2, "dp": 2}, "step": steps, "layers": 3, "mode": "shape"}
    assert job.run(load_scenario("glm-5.1-mini", given), folder)["verdict"] == "pass"
    return folder
