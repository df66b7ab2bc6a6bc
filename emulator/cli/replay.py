"""The command `emulator replay`: prices a trace folder on a device and shows where the time goes."""

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from emulator.cost.replay import Options
from emulator.cost.summary import price_folder
from emulator.errors import UsageError


def register(app: typer.Typer) -> None:
    """Adds the command to the command line."""
    app.command("replay")(replay)


def replay(
    trace_dir: Annotated[Path, typer.Argument(help="Folder with rank_<r>.jsonl files.")],
    device: Annotated[str, typer.Option(help="Device profile: a name under profiles/devices, or a TOML file.")],
    database: Annotated[
        Path | None, typer.Option(help="Folder of measured kernel times, in TensorCast's CSV layout.")
    ] = None,
    quant: Annotated[
        str | None,
        typer.Option(
            help="Quantisation of the weights: none, w8a8 or another of profiles/quant, or a TOML file; "
            "default: what the run had."
        ),
    ] = None,
    overlap: Annotated[
        bool, typer.Option("--overlap", help="Gathers that the plan starts ahead run beside compute.")
    ] = False,
    split_attention: Annotated[
        bool, typer.Option("--split-attention", help="Under dsa_cp, price sparse attention on local tokens, too.")
    ] = False,
    step: Annotated[int | None, typer.Option(help="Only this step of the run.")] = None,
    kernels: Annotated[
        str, typer.Option(help="Table of the kernels that each op runs as, under profiles/kernels, or a TOML file.")
    ] = "ascend",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout and nothing else.")] = False,
) -> None:
    """Replay the traces of a run on a device: the step's time, and where the time of each rank goes."""
    options = Options(quant, overlap, split_attention, step, kernels)
    try:
        result = price_folder(trace_dir, device, options, database)
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(2) from None
    print(json.dumps(result)) if as_json else print_cost(result)


def print_cost(cost: dict[str, Any]) -> None:
    """The readable form of a replay, on stdout."""
    console = Console() if sys.stdout.isatty() else Console(width=130)

    def say(text: str) -> None:
        console.print(text, markup=False, highlight=False, soft_wrap=True)

    if "error" in cost:
        say(f"not priced: {cost['error']}")
        return
    options = cost["options"]
    wide = cost["trace_dtype"] in ("float64", "float32")
    say(
        f"priced on {cost['device']}, weights {'16-bit' if options['quant'] == 'none' else options['quant']}, "
        f"gathers {'overlapped' if options['overlap'] else 'blocking'}"
        + (f"; the run's {cost['trace_dtype']} values count as bfloat16" if wide else "")
    )
    for step in cost["steps"]:
        say(f"step {step['step']} ({step['phase']}, plan {step['plan']}): {_ms(step['seconds'])} ms")
        if not step["finished"]:
            say("  unfinished: a trace ends inside this step, and only what ran before that is priced")
        for op, rows in step["rows"].items():
            name = "indexer top-k side" if op == "indexer" else "attention"
            say(f"  {name}: {rows['boundary']} at the graph's boundary, priced on {rows['priced']}")
        console.print(_modules(step))
        console.print(_ranks(step))
        say(f"  seconds of all ranks by source: {_listed(step['sources'])}; by bound: {_listed(step['bounds'])}")
        say(f"  not priced, records of rank 0: {_listed(step['not_priced']) or 'none'}")


def _modules(step: dict[str, Any]) -> Table:
    table = _table("time by module, ms (mean of the ranks; slowest rank)", "module", "stream", "calls")
    for name in ("mean", "slowest", "wait", "% of step"):
        table.add_column(name, justify="right")
    for row in step["modules"]:
        seconds = row["seconds_mean"]
        share = seconds / step["seconds"] if step["seconds"] else 0.0
        table.add_row(
            row["module"].removeprefix("model."), row["stream"], f"{row['calls']:g}", _ms(seconds),
            _ms(row["seconds_slowest_rank"]), _ms(row["wait_mean"]), f"{100 * share:.1f}",
        )  # fmt: skip
    return table


def _ranks(step: dict[str, Any]) -> Table:
    found = step["skew"]
    ratio = f"{found['max_over_min']:.3f}" if found["max_over_min"] else "-"
    title = (
        f"time by rank, ms; compute of rank {found['heaviest_rank']} (most) over rank {found['lightest_rank']} "
        f"(least): {ratio}"
    )
    table = _table(title, "rank")
    for name in ("compute", "comm", "overlapped", "wait", "idle"):
        table.add_column(name, justify="right")
    for row in step["ranks"]:
        table.add_row(str(row["rank"]), *(_ms(row[n]) for n in ("compute", "comm", "overlapped", "wait", "idle")))
    return table


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _ms(seconds: float) -> str:
    return f"{max(seconds, 0.0) * 1e3:.3f}"


def _listed(numbers: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.4g}" for name, value in numbers.items())
