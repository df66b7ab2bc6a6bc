"""Shared by all tests: one torch thread a process (xdist workers and forked ranks share two cores)."""

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def _one_thread():
    torch.set_num_threads(1)
