"""`emulator` with one faulty rank: EMULATOR_TEST_FAULT names the fault, EMULATOR_TEST_RANK the rank.

The fault strikes at that rank's first all_gather of layer 1's attention.
"""

import os
import signal
import time

import torch

from emulator.__main__ import main
from emulator.runtime.collectives import Collectives

FAULT, RANK = os.environ["EMULATOR_TEST_FAULT"], int(os.environ["EMULATOR_TEST_RANK"])
honest = Collectives.call
struck: list[str] = []


def faulty(self: Collectives, op: str, x: torch.Tensor, *args, **names) -> torch.Tensor:
    here = names["module"] == "model.layers.1.self_attn" and op == "all_gather" and names["layout"] != "token ids"
    if self.rank != RANK or struck or not here:
        return honest(self, op, x, *args, **names)
    struck.append(FAULT)
    _, size, dim = args
    if FAULT == "exception":
        raise FloatingPointError("planted")
    if FAULT == "exit":
        os._exit(9)
    if FAULT == "sigkill":
        os.kill(os.getpid(), signal.SIGKILL)
    if FAULT == "sigstop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if FAULT == "out_of_memory":
        torch.empty(1 << 50)
    if FAULT == "loop":
        while True:
            time.sleep(0)
    if FAULT == "skipped":
        return torch.cat([x] * size, dim)
    if FAULT == "extra":
        honest(self, op, x, *args, **names)
        return honest(self, op, x, *args, **names)
    if FAULT == "other_op":
        return honest(self, "reduce_scatter", x, *args, **names)
    if FAULT == "other_group":
        return honest(self, op, x, "dp", size, dim, **names)
    if FAULT == "shape":
        return honest(self, op, x[1:], *args, **names)
    assert FAULT == "dtype", FAULT
    return honest(self, op, x.float(), *args, **names)


Collectives.call = faulty  # type: ignore[method-assign]
main()
