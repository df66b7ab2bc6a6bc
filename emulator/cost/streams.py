"""When each kernel runs: a compute and a communication stream per rank, joined at collectives.

A collective starts when its last rank has come to it and the communication stream of each of its ranks is free, and
ends on all of them at the same time. A rank blocks at a collective, or, where it waits for the result later, goes on
until then.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal


@dataclass
class Task:
    """Work of one record. seconds: of the kernel, or of this rank's part in a collective. meeting: number of the
    collective call, None for compute. start, ready, end: found by `run`; ready: when only other ranks keep it back."""

    index: int
    seconds: float
    meeting: int | None = None
    start: float = 0.0
    ready: float = 0.0
    end: float = 0.0


@dataclass(frozen=True)
class Step:
    """One thing that a rank does next: run a compute task, issue a collective, or wait for one."""

    what: Literal["run", "issue", "wait"]
    task: Task


@dataclass
class _Rank:
    steps: Sequence[Step]
    at: int = 0
    clock: float = 0.0
    comm_free: float = 0.0
    queue: deque[Task] = field(default_factory=deque)  # issued collectives that have not started


class Stuck(ValueError):
    """Ranks wait for each other in a circle. waiting: (rank, the collective it cannot get past)."""

    def __init__(self, waiting: list[tuple[int, Task]]):
        super().__init__("ranks wait for each other in a circle")
        self.waiting = waiting


def run(ranks: Sequence[Sequence[Step]], meetings: Sequence[Sequence[int]]) -> None:
    """Fills in start, ready and end of every task. meetings: ranks of each collective call. Raises Stuck."""
    states = [_Rank(steps) for steps in ranks]
    arrived: list[list[tuple[int, Task]]] = [[] for _ in meetings]
    done: set[int] = set()
    todo = deque(range(len(states)))
    while todo:
        rank = todo.popleft()
        state = states[rank]
        _advance(rank, state, arrived, done)
        # Heads of the queue whose last rank has come begin; that may free the heads of other ranks' queues.
        check = deque([rank])
        while check:
            queue = states[check.popleft()].queue
            if not queue or not _begin(queue[0], arrived, meetings, states):
                continue
            meeting = queue[0].meeting
            assert meeting is not None
            done.add(meeting)
            for member, _ in arrived[meeting]:
                states[member].queue.popleft()
                check.append(member)
                if member not in todo:
                    todo.append(member)
    waiting = [(rank, state.steps[state.at].task) for rank, state in enumerate(states) if state.at < len(state.steps)]
    if waiting:
        raise Stuck(waiting)


def _advance(rank: int, state: _Rank, arrived: list[list[tuple[int, Task]]], done: set[int]) -> None:
    """Runs a rank until it waits for a collective that has not started."""
    while state.at < len(state.steps):
        step = state.steps[state.at]
        task = step.task
        if step.what == "run":
            task.start = task.ready = state.clock
            state.clock = task.end = state.clock + task.seconds
        elif step.what == "issue":
            assert task.meeting is not None
            task.ready = state.clock
            state.queue.append(task)
            arrived[task.meeting].append((rank, task))
        elif task.meeting in done:
            state.clock = max(state.clock, task.end)
        else:
            return
        state.at += 1


def _begin(
    head: Task, arrived: list[list[tuple[int, Task]]], meetings: Sequence[Sequence[int]], states: list[_Rank]
) -> bool:
    """Starts a collective if all its ranks have come and have nothing before it."""
    assert head.meeting is not None
    here = arrived[head.meeting]
    if len(here) < len(meetings[head.meeting]) or any(states[rank].queue[0] is not task for rank, task in here):
        return False
    for rank, task in here:
        task.ready = max(task.ready, states[rank].comm_free)
    start = max(task.ready for _, task in here)
    end = start + max(task.seconds for _, task in here)
    for rank, task in here:
        task.start, task.end = start, end
        states[rank].comm_free = end
    return True
