"""The communication calls of one rank's own code, for recorders and for the report after a failure."""

import time

from emulator.runtime.comm_call import CommCall

_KEEP = 2000  # calls kept for a dump after a failure


class CommLog:
    """Calls in order. `listeners` are the recorders that are open now: lists that get every call."""

    def __init__(self) -> None:
        self.calls: list[CommCall] = []
        self.listeners: list[list[CommCall]] = []

    def start(self, call: CommCall) -> None:
        call.start_ns = time.time_ns()
        if len(self.calls) >= _KEEP:
            del self.calls[: _KEEP // 2]
        self.calls.append(call)
        for listener in self.listeners:
            listener.append(call)

    def finish(self, call: CommCall) -> None:
        call.end_ns = time.time_ns()
