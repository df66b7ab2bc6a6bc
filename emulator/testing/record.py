"""Records the communication calls of the code under test: record(), and the Trace that it fills."""

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

from emulator.runtime.comm_call import CommCall
from emulator.runtime.comm_log import CommLog
from emulator.runtime.comm_watch import CommWatch, own_log, watch_needed


@dataclass
class Trace:
    """calls: what this rank called while recording, in order; they are filled further while a call is under way."""

    calls: list[CommCall] = field(default_factory=list)

    def payload(self) -> list[CommCall]:
        """The calls that count: all but those that only exchange the sizes of pickled objects."""
        return [c for c in self.calls if c.traffic == "payload"]

    def counts(self) -> dict[str, dict[str, int]]:
        """{group: {op: number of calls}}, such as {"tp": {"all_gather": 2}}; payload only."""
        counts: dict[str, Counter[str]] = {}
        for call in self.payload():
            counts.setdefault(call.group, Counter())[call.op] += 1
        return {group: dict(ops) for group, ops in counts.items()}

    def bytes(self) -> dict[str, dict[str, int]]:
        """{group: {op: bytes that this rank sent}}; payload only. The least that any algorithm has to send."""
        sent: dict[str, Counter[str]] = {}
        for call in self.payload():
            sent.setdefault(call.group, Counter())[call.op] += call.bytes
        return {group: dict(ops) for group, ops in sent.items()}

    def __str__(self) -> str:
        return table(self.calls)


@contextmanager
def record() -> Iterator[Trace]:
    """Records every c10d and functional collective, DTensor redistribution, send and receive of this rank's own code.

        with record() as trace:
            model(x)
        assert trace.counts() == {"tp": {"all_gather": 2}}
        print(trace)

    Works on this package's ranks and, without them, in any process that uses torch.distributed (torchrun, spawned
    tests). Recorders may be nested: each one sees the calls made inside it. The traffic of this package's own checks is
    not recorded.
    """
    trace = Trace()
    with ExitStack() as stack:
        if (log := own_log()) is not None:
            stack.enter_context(_listening(log, trace.calls))
        if watch_needed():
            watched = CommLog()
            watched.listeners.append(trace.calls)
            stack.enter_context(CommWatch(watched))
        yield trace


@contextmanager
def _listening(log: CommLog, calls: list[CommCall]) -> Iterator[None]:
    log.listeners.append(calls)
    try:
        yield
    finally:
        log.listeners[:] = [other for other in log.listeners if other is not calls]


def table(calls: list[CommCall]) -> str:
    """The calls as lines of text: group and size, op, shapes, dtype, bytes sent, how it ran, module, call site."""
    rows = [("group", "op", "input", "output", "dtype", "bytes", "", "module", "call site")]
    rows += [
        (
            f"{c.group}({len(c.members)})",
            c.op if c.peer is None else f"{c.op} {'to' if c.op == 'send' else 'from'} {c.peer}",
            _shapes(c, "inputs"),
            _shapes(c, "outputs"),
            " ".join(dict.fromkeys(d["dtype"] for d in c.inputs + c.outputs)),
            str(c.bytes),
            how(c),
            c.module or "",
            f"{c.api} at {c.site}",
        )
        for c in calls
    ]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows)


def how(call: CommCall) -> str:
    """async, `never awaited`, metadata; empty for a plain blocking call."""
    words = ["metadata"] if call.traffic != "payload" else []
    if call.is_async:
        words.append("async" if call.waited else "async, never awaited")
    return ", ".join(words)


def _shapes(call: CommCall, side: str) -> str:
    """Shapes of the inputs or outputs; equal ones once, with their number."""
    counted = Counter(str(d["shape"]) for d in getattr(call, side))
    return " ".join(shape if n == 1 else f"{n} x {shape}" for shape, n in counted.items())
