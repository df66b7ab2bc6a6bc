"""The commands `emulator export` and `emulator report`: a run for other tools, and as one page."""

import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from emulator.cli.common import exit_codes
from emulator.cost.replay import Options
from emulator.errors import UsageError
from emulator.export.chakra import write_chakra
from emulator.export.mindstudio import write_mindstudio
from emulator.export.perfetto import write_perfetto
from emulator.export.run import find_target, load_run
from emulator.report_html.page import write_report
from emulator.trace.record import no_collector


class Format(StrEnum):
    perfetto = "perfetto"
    mindstudio = "mindstudio"
    chakra = "chakra"


FolderArg = Annotated[Path, typer.Argument(help="Folder with rank_<r>.jsonl files.")]
DeviceOption = Annotated[
    str | None, typer.Option(help="Replay on this device: a name under profiles/devices, or a TOML file.")
]
DatabaseOption = Annotated[
    Path | None, typer.Option(help="Folder of measured kernel times, in TensorCast's CSV layout.")
]
QuantOption = Annotated[str | None, typer.Option(help="Quantisation of the weights, as for `replay`.")]
OverlapOption = Annotated[bool, typer.Option("--overlap", help="KV and weight gathers run beside compute.")]
SplitOption = Annotated[
    bool, typer.Option("--split-attention", help="Under dsa_cp, price sparse attention on local tokens, too.")
]


def register(app: typer.Typer) -> None:
    """Adds the commands to the command line."""
    app.command("export")(export)
    app.command("report")(report)


def export(
    trace_dir: FolderArg,
    form: Annotated[Format, typer.Option("--format", help="What to write.")],
    device: DeviceOption = None,
    out: Annotated[
        Path | None,
        typer.Option(help="File (perfetto; .gz compresses it) or folder; default: beside the traces."),
    ] = None,
    database: DatabaseOption = None,
    quant: QuantOption = None,
    overlap: OverlapOption = False,
    split_attention: SplitOption = False,
) -> None:
    """Write a run for Perfetto (or chrome://tracing), MindStudio Insight, or Chakra's users (ASTRA-sim).

    Without a device the times are the wall clock of the emulation, and the files say so.
    """

    with exit_codes(), no_collector():
        run = load_run(trace_dir, find_target(device, Options(quant, overlap, split_attention), database))
        if form is Format.perfetto:
            print(write_perfetto(run, out or trace_dir / "perfetto.json"))
            return
        folder = out or trace_dir / form.value
        (write_mindstudio if form is Format.mindstudio else write_chakra)(run, folder)
        print(folder)


def report(
    trace_dir: FolderArg,
    device: DeviceOption = None,
    out: Annotated[Path | None, typer.Option(help="The page; default: report.html beside the traces.")] = None,
    database: DatabaseOption = None,
    quant: QuantOption = None,
    overlap: OverlapOption = False,
    split_attention: SplitOption = False,
) -> None:
    """Write one HTML page about a run: layout map, boundaries, collectives, failures, and with a device the times."""

    with exit_codes(), no_collector():
        target = find_target(device, Options(quant, overlap, split_attention), database)
        print(write_report(trace_dir, target, out))


def write_page(folder: Path, device: str | None, *, quiet: bool) -> None:
    """The page of a run that has just ended, which says where it is; a failure to write it leaves the run's exit code
    as it is."""
    try:
        path = write_report(folder, find_target(device))
    except UsageError as error:
        print(f"no report: {error}", file=sys.stderr)
        return
    if not quiet:
        print(f"report in {path}")
