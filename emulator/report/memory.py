"""How people see a memory ledger: sums by component, every tensor, and the difference of two settings."""

import sys
from collections.abc import Mapping
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from emulator.memory.compare import Comparison
from emulator.memory.ledger import Ledger

GIB = 2**30
_SHOWN = 8  # changed tensors of a row


def print_ledger(summary: Mapping[str, Any], sums: Mapping[str, int], group_by: str) -> None:
    """A rank's bytes by component, category or layer, with the peak while loading."""
    console = _console()
    console.print(_headline(summary), highlight=False, soft_wrap=True)
    table = _table(group_by, "bytes", "GiB", "share")
    total = summary["total_bytes"]
    for name, size in sums.items():
        table.add_row(name, f"{size}", f"{size / GIB:.4f}", f"{size / total:.1%}")
    table.add_section()
    table.add_row("total", str(total), f"{total / GIB:.4f}", f"{summary['num_tensors']} tensors")
    peak = summary["peak_load_bytes"]
    table.add_row("peak while loading", str(peak), f"{peak / GIB:.4f}", "")
    console.print(table)


def print_tensors(ledger: Ledger) -> None:
    """Every tensor in a line of its own."""
    for tensor in (*ledger.tensors, *ledger.loading):
        freed = "" if tensor in ledger.tensors else " (freed)"
        replaces = f", replaces {tensor.replaces}" if tensor.replaces else ""
        print(
            f"{tensor.name} {list(tensor.shape)} {tensor.dtype} {tensor.bytes} B {tensor.placement} {tensor.category}: "
            f"{tensor.rule}{replaces}{freed}"
        )


def print_comparison(
    comparison: Comparison, first: Mapping[str, Any], second: Mapping[str, Any], group_by: str
) -> None:
    """Both sides by component, with the first tensors behind each difference."""
    console = _console()
    console.print(f"first:  {_headline(first)}", highlight=False, soft_wrap=True)
    console.print(f"second: {_headline(second)}", highlight=False, soft_wrap=True)
    table = _table(group_by, "first GiB", "second GiB", "difference", "bytes")
    for row in comparison.rows:
        table.add_row(row.name, *_sizes(row.first, row.second))
    table.add_section()
    table.add_row("total", *_sizes(comparison.first.total_bytes, comparison.second.total_bytes))
    console.print(table)
    for row in comparison.rows:
        if not row.delta:
            continue
        for text in row.why[:_SHOWN]:
            console.print(f"{row.name}: {text}", highlight=False, markup=False, soft_wrap=True)
        if len(row.why) > _SHOWN:
            print(f"{row.name}: ... and {len(row.why) - _SHOWN} more tensors (--json lists them)")


def _sizes(first: int, second: int) -> tuple[str, str, str, str]:
    return f"{first / GIB:.4f}", f"{second / GIB:.4f}", f"{(second - first) / GIB:+.4f}", f"{second - first:+d}"


def _headline(summary: Mapping[str, Any]) -> str:
    variants = ", ".join(f"{k}={v}" for k, v in summary["variants"].items())
    parallel = " ".join(f"{k} {v}" for k, v in summary["parallel"].items())
    types = summary["description"] or f"quant {summary['quant']}"
    extra = (f"  {summary['mtp_layers']} MTP" if summary["mtp_layers"] else "") + ("  NZ" if summary["nz"] else "")
    return (
        f"[bold]{escape(summary['scenario'])}[/bold]  plan {summary['plan']} ({variants})  {parallel}  "
        f"{escape(types)}  rules {summary['rules']}  {summary['layers']} layers{extra}  {summary['dtype']}  "
        f"rank {summary['rank']}"
    )


def _table(first: str, *columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column(first)
    for column in columns:
        table.add_column(column, justify="right")
    return table


def _console() -> Console:
    return Console() if sys.stdout.isatty() else Console(width=130)
