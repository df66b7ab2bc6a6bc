"""Replays traces on a device: per-rank timelines, joined at collectives. Reads records only and runs nothing."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, TypeVar

from emulator.cost.comm import COLLECTIVES, Call, Groups, Mismatch, check_shapes, collective_kernel, is_weight, meetings
from emulator.cost.database import Database
from emulator.cost.device import Device
from emulator.cost.kernel import Slice, Timeline
from emulator.cost.local_rows import applied_splits, place_of
from emulator.cost.mapping import (
    Contradiction,
    KernelTable,
    is_quantised,
    load_kernels,
    priced_dtype,
)
from emulator.cost.overlap import Span, async_spans
from emulator.cost.pricing import Priced, Pricer
from emulator.cost.streams import Step, Stuck, Task, run
from emulator.errors import UsageError
from emulator.trace.record import steps_of

Trace = tuple[dict[str, Any], list[dict[str, Any]]]
Record = Mapping[str, Any]
_T = TypeVar("_T")


@dataclass(frozen=True)
class Options:
    """quant: quantisation scheme of the weights (profiles/quant), by name or path; None: the run's own. overlap:
    collectives that the graph starts ahead (gathers of the KV row, of weights) run beside compute. split_attention:
    under DSA context parallelism, sparse attention too is priced on the rank's local tokens where the graph's boundary
    is full-token, as the indexer's query side always is. step: only this one. kernels: kernel table, by name or path.
    """

    quant: str | None = None
    overlap: bool = False
    split_attention: bool = False
    step: int | None = None
    kernels: str = "ascend"


DEFAULT = Options()


def replay(
    traces: Sequence[Trace], device: Device, *, options: Options = DEFAULT, database: Database | None = None
) -> list[Timeline]:
    """A timeline of every step. traces: (header, records) of all ranks in rank order (trace.record.read_trace).

    Raises UsageError, which names rank, record, op and module, for an op that cannot be priced, shapes that contradict
    each other or the op's attributes, and collectives that do not match between ranks.
    """
    return replay_with(traces, Pricer(device, database), options)


def replay_with(traces: Sequence[Trace], pricer: Pricer, options: Options = DEFAULT) -> list[Timeline]:
    """`replay` with a given pricer."""
    groups = check_headers(traces)
    steps = [steps_of(records) for _, records in traces]
    if not any(steps):
        raise UsageError("the traces hold no step: the run ended before its first one")
    if len({len(own) for own in steps}) > 1:
        raise UsageError(f"ranks ran different numbers of steps: {[len(own) for own in steps]}")
    table = load_kernels(options.kernels, quant_of(traces, options))
    numbers = [step["step"] for step, _ in steps[0]]
    if options.step is not None and options.step not in numbers:
        raise UsageError(f"step {options.step}: the trace has {', '.join(map(str, numbers))}")
    return [
        _Replay(groups, [own[at] for own in steps], [h["dtype"] for h, _ in traces], table, pricer, options).timeline()
        for at, number in enumerate(numbers)
        if options.step in (None, number)
    ]


def quant_of(traces: Sequence[Trace], options: Options) -> str:
    """The scheme that a replay prices weights in: the options', or else the one that the run itself was made with."""
    return options.quant or traces[0][0].get("quant") or "none"


def check_headers(traces: Sequence[Trace]) -> Groups:
    """The groups of the ranks. UsageError unless there is one trace of every rank, all of one run."""
    if not traces:
        raise UsageError("no traces")
    headers = [header for header, _ in traces]
    missing = [key for key in ("rank", "mesh", "dtype") if any(key not in h for h in headers)]
    if missing:
        raise UsageError(f"a trace header has no {missing[0]}")
    for key in ("scenario", "mesh", "dtype"):
        if any(h.get(key) != headers[0].get(key) for h in headers):
            raise UsageError(f"rank traces of different runs: {key} differs")
    groups = Groups(headers[0]["mesh"])
    if [h["rank"] for h in headers] != list(range(groups.size)):
        raise UsageError(f"traces of ranks {[h['rank'] for h in headers]}, but the mesh has {groups.size} ranks")
    return groups


def priced(record: Record) -> bool:
    """Whether a record is device work: split sizes, masks and lengths (metadata) are worked out on the host, and token
    ids (verification) exist in the emulator only."""
    return record["kind"] == "op" and record["traffic"] == "payload"


class _Replay:
    """One step of all ranks."""

    def __init__(
        self, groups: Groups, steps: list[tuple[dict, list[dict]]], dtypes: list[str], table: KernelTable,
        pricer: Pricer, options: Options,
    ):  # fmt: skip
        self.groups, self.steps, self.dtypes = groups, steps, dtypes
        self.table, self.pricer, self.options = table, pricer, options
        self.kernels: list[dict[int, tuple[Priced, ...]]] = []  # by rank: record position -> what it is priced as
        self.calls: list[list[Call]] = []

    def timeline(self) -> Timeline:
        for rank, (step, records) in enumerate(self.steps):
            self._price(rank, step, records)
        try:
            met = meetings(self.calls)
        except Mismatch as error:
            raise _located(error.call.rank, error.call.record, str(error)) from None
        tasks = self._tasks(met)
        try:
            run([self._steps(rank, tasks[rank]) for rank in range(len(self.steps))], [[c.rank for c in m] for m in met])
        except Stuck as stuck:
            rank, task = stuck.waiting[0]
            raise _located(rank, self.steps[rank][1][task.index], str(stuck)) from None
        return self._timeline(tasks, met)

    def _price(self, rank: int, step: dict, records: list[dict]) -> None:
        """Kernels and costs of a rank's records, and its collective calls."""
        splits = applied_splits(records, self.options.split_attention)
        run_dtype = self.dtypes[rank]
        place = _guarded(rank, step, lambda: place_of(step, self.groups, rank, splits, run_dtype))
        kernels: dict[int, tuple[Priced, ...]] = {}
        calls: list[Call] = []

        def of(position: int, record: dict) -> tuple[Priced, ...] | None:
            if not priced(record):
                return None
            if record["window"] is not None and tuple(record["window"]) != place.window:
                raise Contradiction(
                    f"window {record['window']}, but the step's requests give {list(place.window or ())}"
                )
            if record["op"] in COLLECTIVES or record["group"] is not None:
                group = self.groups.members(record["group"], rank)
                check_shapes(record, len(group))
                if record["op"] in COLLECTIVES:
                    calls.append(Call(rank, position, record, group))
                    return (self.pricer(collective_kernel(calls[-1], self._wire_dtype(record, run_dtype))),)
            elif record["op"] in ("pad", "unpad"):
                check_shapes(record, 1)
            return tuple([self.pricer(k) for k in self.table.kernels(record, place)])

        for position, record in enumerate(records):
            found = _guarded(rank, record, partial(of, position, record))
            if found is not None:
                kernels[position] = found
        self.kernels.append(kernels)
        self.calls.append(calls)

    def _wire_dtype(self, record: dict, run_dtype: str) -> str:
        """A quantised weight travels as it is stored."""
        value = record["inputs"][0]
        if is_weight(value["layout"]) and is_quantised(self.table.type_of(record["module"])):
            return "int8"
        return priced_dtype(value["dtype"], run_dtype)

    def _tasks(self, met: list[tuple[Call, ...]]) -> list[dict[int, Task]]:
        """By rank: record position -> task, of records that run a kernel."""
        tasks = [
            {at: Task(at, sum(cost.seconds for _, cost in kernels)) for at, kernels in own.items() if kernels}
            for own in self.kernels
        ]
        for number, meeting in enumerate(met):
            for call in meeting:
                tasks[call.rank][call.position].meeting = number
        return tasks

    def _steps(self, rank: int, tasks: dict[int, Task]) -> list[Step]:
        """What a rank does, in order."""
        records = self.steps[rank][1]
        spans: dict[int, Span] = {}
        if self.options.overlap:
            try:
                spans = async_spans([(at, records[at]) for at in self.kernels[rank]])
            except Contradiction as error:
                raise _located(rank, records[error.args[1]], error.args[0]) from None
        issued: dict[int, list[Task]] = {}
        awaited: dict[int, list[Task]] = {}
        for at, (start, wait) in spans.items():
            issued.setdefault(start, []).append(tasks[at])
            if wait is not None:
                awaited.setdefault(wait, []).append(tasks[at])
        steps: list[Step] = []
        for at in self.kernels[rank]:
            steps += [Step("wait", task) for task in awaited.get(at, ())]
            steps += [Step("issue", task) for task in issued.get(at, ())]
            task = tasks.get(at)
            if task is None or at in spans:
                continue
            steps += [Step("run", task)] if task.meeting is None else [Step("issue", task), Step("wait", task)]
        return steps

    def _timeline(self, tasks: list[dict[int, Task]], met: list[tuple[Call, ...]]) -> Timeline:
        slices: list[tuple[Slice, ...]] = []
        where: list[dict[int, int]] = []  # by rank: record position -> position in its slices
        for rank, own in enumerate(tasks):
            ordered = sorted(own.values(), key=lambda t: (t.start, t.index))
            slices.append(tuple(self._slice(rank, task) for task in ordered))
            where.append({task.index: at for at, task in enumerate(ordered)})
        ends = [s.end for own in slices for s in own]
        return Timeline(
            step=self.steps[0][0]["step"],
            device=self.pricer.device.name,
            seconds=max(ends, default=0.0),
            slices=tuple(slices),
            meetings=tuple(tuple(sorted((c.rank, where[c.rank][c.position]) for c in meeting)) for meeting in met),
        )

    def _slice(self, rank: int, task: Task) -> Slice:
        kernels = self.kernels[rank][task.index]
        stream: Literal["compute", "comm"] = "compute" if task.meeting is None else "comm"
        seconds = task.end - task.start
        if stream == "comm":  # it ends on all ranks together, so it lasts as long as on the slowest
            kernels = tuple((kernel, replace(cost, seconds=seconds)) for kernel, cost in kernels)
        record = self.steps[rank][1][task.index]
        return Slice(rank, stream, task.start, seconds, task.start - task.ready, record, task.index, kernels)


def _located(rank: int, record: Record, why: str) -> UsageError:
    what = f"{record.get('op')} of {record.get('module')}" if record.get("kind") == "op" else str(record.get("kind"))
    return UsageError(f"rank {rank}, record {record.get('seq')}: {what}: {why}")


def _guarded(rank: int, record: Record, work: Callable[[], _T]) -> _T:
    """Runs work on a record; what is wrong with it becomes one line that names its place."""
    try:
        return work()
    except (Contradiction, UsageError) as error:
        raise _located(rank, record, str(error)) from None
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise _located(rank, record, f"malformed record: {type(error).__name__} {error}") from None
