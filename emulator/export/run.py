"""What the exporters read: the traces of one run as timelines, replayed on a device or as the emulation itself ran."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from emulator.cost.database import Database
from emulator.cost.device import Device, load_device
from emulator.cost.kernel import Slice, Timeline
from emulator.cost.replay import DEFAULT, Options, quant_of, replay
from emulator.errors import UsageError
from emulator.export.wall_clock import is_collective, wall_timelines
from emulator.runtime.mesh import Mesh
from emulator.trace.record import read_trace, steps_of, trace_files

Trace = tuple[dict[str, Any], list[dict[str, Any]]]  # header, records


@dataclass(frozen=True)
class Run:
    """headers: of the traces, by rank. steps: the step records of rank 0. timelines: one per step. device: None when
    the times are those of the emulation; options: what it was replayed with."""

    headers: tuple[dict[str, Any], ...]
    steps: tuple[dict[str, Any], ...]
    timelines: tuple[Timeline, ...]
    device: Device | None = None
    options: Options = DEFAULT

    @property
    def ranks(self) -> range:
        return range(len(self.headers))

    @cached_property
    def mesh(self) -> Mesh:
        return Mesh(**self.headers[0]["mesh"])

    @property
    def times(self) -> str:
        """What the times are, for metadata and people."""
        if self.device is not None:
            return f"predicted for {self.device.title}"
        if self.headers[0]["mode"] == "shape":
            return "wall clock of a shape-only emulation on CPU (no arithmetic done): order only, not a device's times"
        return "wall clock of the emulation on CPU, each rank by its own clock: not a device's times"

    def members(self, piece: Slice) -> tuple[int, ...]:
        """Global ranks that a collective's slice talks to, itself among them; its own rank alone for other ops."""
        if not is_collective(piece.record):
            return (piece.rank,)
        return tuple(self.mesh.members(piece.record["group"], piece.rank))

    def step(self, timeline: Timeline) -> dict[str, Any]:
        """The step record of a timeline."""
        return next(step for step in self.steps if step["step"] == timeline.step)

    def starts(self) -> Iterator[tuple[float, Timeline]]:
        """(seconds from the start of the run, timeline) of each step: steps follow each other without a gap."""
        at = 0.0
        for timeline in self.timelines:
            yield at, timeline
            at += timeline.seconds

    def metadata(self) -> dict[str, Any]:
        """What every export says of where it comes from."""
        header = self.headers[0]
        return {
            "scenario": header["scenario"], "model": header["model"], "plan": self.steps[0]["plan"],
            "mesh": header["mesh"], "mode": header["mode"], "dtype": header["dtype"], "times": self.times,
            "device": self.device.name if self.device else None,
            "replay": asdict(self.options) if self.device else None,
        }  # fmt: skip


@dataclass(frozen=True)
class Target:
    """What to replay on, and how."""

    device: Device
    options: Options = DEFAULT
    database: Database | None = None


def find_target(device: str | None, options: Options = DEFAULT, database: Path | None = None) -> Target | None:
    """device: name or path of a profile; None for none. UsageError for an unknown one, or options without it."""
    if device is None:
        if options != DEFAULT or database is not None:
            raise UsageError("options of the replay need a device: give --device")
        return None
    return Target(load_device(device), options, Database(database) if database else None)


def make_run(traces: Sequence[Trace], target: Target | None = None) -> Run:
    """A run of these traces, in rank order: replayed on the target, or without one by the wall clock.

    UsageError when a rank's trace is missing or holds no step, and as `replay` does.
    """
    size = Mesh(**traces[0][0]["mesh"]).size
    missing = sorted(set(range(size)) - {header["rank"] for header, _ in traces})
    if missing:
        raise UsageError(f"the mesh has {size} ranks, and there is no trace of {', '.join(map(str, missing))}")
    steps = tuple(step for step, _ in steps_of(traces[0][1]))
    if not steps:
        raise UsageError("the trace of rank 0 holds no step")
    headers = tuple(header for header, _ in traces)
    if target is None:
        return Run(headers, steps, tuple(wall_timelines(traces)))
    timelines = replay(traces, target.device, options=target.options, database=target.database)
    options = replace(target.options, quant=quant_of(traces, target.options))
    return Run(headers, steps, tuple(timelines), target.device, options)


def load_run(folder: Path, target: Target | None = None) -> Run:
    """The run whose traces are in `folder`."""
    return make_run(load_traces(folder), target)


def load_traces(folder: Path) -> list[Trace]:
    """All traces of a folder, in rank order."""
    return [read_trace(path) for path in trace_files(folder)]
