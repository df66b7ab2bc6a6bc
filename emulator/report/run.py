"""What people see: the boundary table, collectives, checks, and the first failure."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from emulator.layout.plan import Plan

_SHOWN = (  # one layer's boundaries, in the order of the RFC's contract table
    ("input_layernorm", "output"),
    ("self_attn", "input"),
    ("self_attn.indexer", "output"),
    ("self_attn.attn", "output"),
    ("self_attn.o_proj", "input"),
    ("self_attn.o_proj", "output"),
    ("post_attention_layernorm", "output"),
    ("post_attention_layernorm", "output1"),
    ("mlp.gate_proj", "input"),
    ("mlp.gate", "output"),
    ("mlp.topk", "output1"),
    ("mlp.experts.gate_up_proj", "input"),
    ("mlp.experts", "output"),
    ("mlp.shared_experts", "output"),
    ("mlp", "output"),
)


_LIVE_SHOWN = 5


def print_summary(summary: dict[str, Any]) -> None:
    """The readable form of a run's summary, on stdout."""
    console = _console()
    parallel = " ".join(f"{k} {v}" for k, v in summary["parallel"].items())
    variants = ", ".join(f"{k}={v}" for k, v in summary["variants"].items())
    console.print(
        f"[bold]{escape(summary['scenario'])}[/bold]  plan {summary['plan']} ({variants})  {parallel}  "
        f"{summary['tokens']} tokens  {summary['layers']} layers  {summary['mode']} {summary['dtype']}",
        highlight=False, soft_wrap=True,
    )  # fmt: skip
    console.print(_boundary_table(summary))
    console.print(_collective_table(summary))
    for check in summary["checks"]:
        mark = "[green]ok  [/green]" if check["passed"] else "[red]FAIL[/red]"
        console.print(f"{mark} {check['name']}: ", end="", soft_wrap=True)
        console.print(check["detail"], markup=False, highlight=False, soft_wrap=True)
    if summary["max_abs_error"] is not None:
        console.print(
            f"largest error {summary['max_abs_error']:.2g} absolute, {summary['max_rel_error']:.2g} of the reference's "
            f"largest value ({summary['max_error_in_eps']:.2g} eps), "
            f"{summary['max_error_in_tolerances']:.2g} tolerances",
            highlight=False, soft_wrap=True,
        )  # fmt: skip
    if summary["quantisation"]:
        far = summary["quantisation"]["logits_rel_error"]
        console.print(
            f"weights {summary['quant']}: logits {far:.2g} of their largest value from those of dequantised weights",
            highlight=False, soft_wrap=True,
        )  # fmt: skip
    _print_memory(console, summary["forward_memory"])
    if summary["first_failure"]:
        _print_failure(console, summary["first_failure"])
    if summary["culprit"]:
        _print_culprit(console, summary["culprit"])
    rss = summary["peak_rss_mb"]
    console.print(
        f"{summary['wall_s']} s, {rss['total']:.0f} MiB for the whole process tree"
        + (f", traces in {summary['out_dir']}" if summary["out_dir"] else ""),
        highlight=False, soft_wrap=True,
    )  # fmt: skip
    colour = "green" if summary["verdict"] == "pass" else "red"
    console.print(f"[bold {colour}]verdict: {summary['verdict']}[/bold {colour}]")


def _print_memory(console: Console, memory: dict[str, Any]) -> None:
    """Where a rank held most, and the largest values that it held there."""
    of = ", ".join(f"{bytes_ / 2**20:.2f} MiB {kind}" for kind, bytes_ in memory["by_category"].items())
    step = f", step {memory['step']}" if memory["step"] else ""
    console.print(
        f"forward peak {memory['peak_bytes'] / 2**20:.2f} MiB on rank {memory['rank']} ({of}) at {memory['op']} of "
        f"{memory['module']}{step}; beside it {memory['weight_bytes'] / 2**20:.2f} MiB of weights, "
        f"{memory['cache_bytes'] / 2**20:.2f} MiB of caches",
        highlight=False, soft_wrap=True,
    )  # fmt: skip
    for value in memory["live"][:_LIVE_SHOWN]:
        where = f"{value['node']} {_shape(value['shape'])} {value['dtype']}, {value['module']}"
        console.print(f"  {value['bytes'] / 2**20:9.2f} MiB  {where}", highlight=False, markup=False, soft_wrap=True)


def _console() -> Console:
    return Console() if sys.stdout.isatty() else Console(width=130)  # a file or a pipe has no edge


def _boundary_table(summary: dict[str, Any]) -> Table:
    """Boundaries on rank 0 of the layer that broke first, else of the last; output1 is a module's second output (a
    norm's residual)."""
    failure = summary["first_failure"] or {}
    broken = failure.get("layer")
    layer = summary["layers"] - 1 if broken is None else broken
    prefix = f"model.layers.{layer}."
    table = _table(f"boundaries of layer {layer} on rank 0", "module", "port", "layout", "shape", "")
    wrong = {tuple(b) for b in summary["broken_boundaries"]}
    for name, port in _SHOWN:
        here = [b for b in summary["boundaries"] if b["module"] == prefix + name and b["port"] == port]
        for layout, shape in dict.fromkeys(
            (b["layout"], tuple(b["shape"])) for b in here if b["layout"] != "replicated"
        ):
            mark = "[red]FAIL[/red]" if (prefix + name, port) in wrong else "[green]ok[/green]"
            table.add_row(name, port, layout, _shape(list(shape)), mark)
    return table


def _collective_table(summary: dict[str, Any]) -> Table:
    table = _table("collectives of all layers (MiB sent by rank 0)", "group", "op", "module", "shape", "count", "MiB")
    for c in summary["collectives"]:
        shape = f"{_shape(c['input_shape'])} -> {_shape(c['output_shape'])}"
        op = c["op"] + (f" dim {c['dim']}" if isinstance(c["dim"], int) and c["dim"] > 0 else "")
        module = c["module"].removeprefix("model.layers.")
        table.add_row(c["group"], op, module, shape, str(c["count"]), f"{c['bytes_per_rank'] / 2**20:.2f}")
    return table


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold", justify="right" if column in ("count", "MiB") else "left")
    return table


def _shape(shape: list[int | None]) -> str:
    return "[" + ", ".join("*" if d is None else str(d) for d in shape) + "]"


def _print_failure(console: Console, failure: dict[str, Any]) -> None:
    console.print("[red]first broken boundary[/red]")
    rows = {
        "module": f"{failure['module']}" + (f" ({failure['port']})" if "port" in failure else ""),
        "rank": failure["rank"],
        "expected": failure["expected"],
        "found": failure["found"],
        "detail": failure["detail"],
    }
    for key, value in rows.items():
        text = ", ".join(f"{k} {v}" for k, v in value.items()) if isinstance(value, dict) else str(value)
        console.print(f"  {key:9}{text}", markup=False, highlight=False, soft_wrap=True)


def _print_culprit(console: Console, culprit: dict[str, Any]) -> None:
    """The first wrong node and what happened there."""
    console.print("[red]first node with right inputs and a wrong output[/red]")
    rows = {
        "node": f"{culprit['node']} ({culprit['op']}) of {culprit['module']}",
        "ranks": ", ".join(map(str, culprit["ranks"])),
        "cause": f"{culprit['kind']}: {culprit['text']}",
    }
    for key, text in rows.items():
        console.print(f"  {key:9}{text}", markup=False, highlight=False, soft_wrap=True)


def print_shrunk(shrunk: dict[str, Any] | None) -> None:
    """The smallest scenario that fails in the same way, and how to run it."""
    console = _console()
    if shrunk is None:
        console.print("the failure did not show again, so there is nothing to shrink")
        return
    size = ", ".join(f"{k} {v}" for k, v in shrunk["sizes"].items())
    console.print(f"[bold]shrunk[/bold] ({shrunk['runs']} runs, {shrunk['seconds']} s) to {size}", highlight=False)
    console.print(f"  still     {shrunk['failure']}", markup=False, highlight=False, soft_wrap=True)
    for command in shrunk["commands"]:
        console.print(f"  run       {command}", markup=False, highlight=False, soft_wrap=True)


@contextmanager
def shrink_progress(quiet: bool) -> Iterator[Callable[[str, bool], None]]:
    """Says on stderr what is tried, when a person is watching."""
    with Console(stderr=True, quiet=quiet).status("shrinking") as status:
        yield lambda what, same: status.update(f"shrinking: {what} {'fails alike' if same else 'does not'}")


def print_check(contract: str, result: dict[str, Any]) -> None:
    """Outcome of checking stored traces."""
    for breach in result["breaches"][:20]:
        print(f"rank {breach['rank']}: {breach['detail']}; expected {breach['expected']}, found {breach['found']}")
    if len(result["breaches"]) > 20:
        print(f"... and {len(result['breaches']) - 20} more")
    print(f"contract {contract} on {result['ranks']} ranks: {result['verdict']}")


def print_plan_check(result: dict[str, Any]) -> None:
    """Where a plan and a contract differ."""
    for difference in result["differences"][:20]:
        layers = difference["layers"]
        also = f" ({len(layers)} layers)" if len(layers) > 1 else ""
        print(f"{difference['detail']}{also}; expected {difference['expected']}, found {difference['found']}")
    if len(result["differences"]) > 20:
        print(f"... and {len(result['differences']) - 20} more")
    if result["first_boundary"]:
        print(f"first differing boundary: {result['first_boundary']}")
    print(f"plan {result['plan']} against contract {result['contract']}: {result['verdict']}")


def print_plan(plan: Plan) -> None:
    """A plan's resolved table."""
    console = _console()
    console.print(f"[bold]{plan.name}[/bold]: {escape(plan.description)}", highlight=False, soft_wrap=True)
    variants = ", ".join(f"{k}={v}" for k, v in plan.variants.items())
    console.print(f"variants: {variants}", highlight=False, soft_wrap=True)
    table = _table("rows", "module", "input is brought to", "weight", "output leaves as")
    for pattern, row in plan.rows.items():
        table.add_row(pattern, row.input or "as it comes", row.weight or "-", row.output or "as it is")
    console.print(table)


@contextmanager
def progress_bar(*, quiet: bool) -> Iterator[Callable[[str, float], None]]:
    """A progress bar on stderr; quiet: no output. Yields update(stage, fraction)."""
    if quiet:
        yield lambda stage, fraction: None
        return
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    # no refresh thread: the ranks are forked from this process
    with Progress(*columns, console=console, transient=True, auto_refresh=False) as progress:
        task = progress.add_task("starting", total=1.0)

        def update(stage: str, fraction: float) -> None:
            progress.update(task, description=stage, completed=fraction)
            progress.refresh()

        yield update
