"""The end of a test's time: ranks that hang are asked where they are, and ended."""

import contextlib
import os
import signal
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from emulator.runtime.board import Board

_DUMP_S = 0.2  # for the ranks to write their stacks
_LEAVE_S = 1.0  # for the waiting ranks to notice the abort flag


class Watch:
    """World.run's on_progress. At `limit` seconds it sets the abort flag and has the unfinished ranks write their
    stacks (signal USR1, see rank_setup); then it kills those that were not waiting for others, later any that stayed.

    late: what each unfinished rank was doing at the limit; killed: the ranks it killed.
    """

    def __init__(self, limit: float, pids: Sequence[int]):
        self.limit, self.pids = limit, pids
        self.late: dict[int, str] = {}
        self.killed: set[int] = set()
        self._started = time.monotonic()

    def __call__(self, board: "Board") -> None:
        over = time.monotonic() - self._started - self.limit
        if over < 0:
            return
        unfinished = {r: board.status(r)[1] for r in range(len(self.pids)) if board.status(r)[1] not in _ENDED}
        if not self.late:
            self.late = unfinished
            board.abort()
            self._signal(list(unfinished), signal.SIGUSR1)
        elif over > _DUMP_S:
            guilty = [r for r in unfinished if over > _LEAVE_S or not self.late.get(r, "").startswith("waiting")]
            self._signal([r for r in guilty if r not in self.killed], signal.SIGKILL)
            self.killed.update(guilty)

    def _signal(self, ranks: Sequence[int], number: int) -> None:
        for rank in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pids[rank], number)


_ENDED = ("done", "failed")  # board.DONE and FAILED, without importing it: the plugin must stay light
