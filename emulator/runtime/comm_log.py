"""The communication calls of one rank's own code, for recorders and for the report after a failure."""

import time
from collections import Counter

from emulator.runtime.comm_call import CommCall

_KEEP = 2000  # calls kept for a dump after a failure


class CommLog:
    """Calls in order. `listeners` are the recorders that are open now: lists that get every call."""

    def __init__(self) -> None:
        self.calls: list[CommCall] = []
        self.listeners: list[list[CommCall]] = []
        self._numbers = Counter[tuple]()

    def start(self, call: CommCall) -> None:
        call.start_ns = time.time_ns()
        if not self.calls:  # cleared for a new function: numbers start anew, alike on all ranks
            self._numbers.clear()
        key = (call.group, *call.members, *((call.op, call.peer) if call.op in ("send", "recv") else ()))
        self._numbers[key] += 1
        call.number = self._numbers[key]
        if len(self.calls) >= _KEEP:
            del self.calls[: _KEEP // 2]
        self.calls.append(call)
        for listener in self.listeners:
            listener.append(call)

    def finish(self, call: CommCall) -> None:
        call.end_ns = time.time_ns()
