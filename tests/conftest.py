"""Shared by all tests: one torch thread a process (xdist workers and forked ranks share two cores), and a SIGINT that
the commands under test can be sent, even where the tests run in a shell's background, which ignores it."""

import signal

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def _one_thread():
    torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="session")
def _interruptible():
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
