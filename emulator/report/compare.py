"""Several plans side by side, for people."""

from collections.abc import Iterator
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from emulator.ops.transition import COLLECTIVES

_GIB = 2**30
_WIDTH = 150  # of a page that is no terminal


def print_comparison(result: dict[str, Any]) -> None:
    """Values, work, communication and memory of every rank under each plan; ranks that are alike share a line."""
    terminal = Console(highlight=False)
    console = Console(highlight=False, width=None if terminal.is_terminal else max(terminal.width, _WIDTH))
    parallel = " ".join(f"{k} {v}" for k, v in result["parallel"].items())
    console.print(
        f"[bold]{result['scenario']}[/bold]  {parallel}  {result['tokens']} tokens  {result['layers']} layers  "
        f"{result['mode']} {result['dtype']}", soft_wrap=True,
    )  # fmt: skip
    console.print(_ranks(result))
    console.print(_calls(result))
    for plan in result["plans"]:
        told = f"plan {plan['plan']}: {plan['verdict']}"
        if plan["max_rel_error"] is not None:
            told += f", largest error {plan['max_rel_error']:.2g} of the reference's largest value on real rows"
        told += f"; most is live in {plan['ranks'][0]['peak_at']}"
        failure = plan["first_failure"]
        if failure:
            told += f"; first: {failure['module']} ({failure['port']}) on rank {failure['rank']}: {failure['detail']}"
        console.print(told, markup=False, soft_wrap=True)


def _ranks(result: dict[str, Any]) -> Table:
    sent = [op for op in COLLECTIVES if any(op in r["sent"] for plan in result["plans"] for r in plan["ranks"])]
    columns = ("plan", "rank", "values", "GFLOP", *sent, "peak live", "weights")
    title = "on each rank: work, MB sent by each collective, memory"
    table = Table(*columns, box=box.SIMPLE_HEAD, title=title, title_justify="left")
    for plan in result["plans"]:
        name = plan["plan"]
        for ranks, rank in _alike(plan["ranks"]):
            bytes_sent = (_number(rank["sent"][op] / 1e6) if op in rank["sent"] else "" for op in sent)
            table.add_row(
                name, ranks, _values(rank), _number(rank["flops"] / 1e9), *bytes_sent, _bytes(rank["peak_bytes"]),
                _bytes(rank["weight_bytes"]),
            )  # fmt: skip
            name = ""
    return table


def _values(rank: dict[str, Any]) -> str:
    if not rank["checked"]:
        return "not run"
    return f"{rank['checked']} equal" if not rank["failures"] else f"{rank['failures']} WRONG"


def _alike(ranks: list[dict[str, Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Consecutive ranks whose line would be the same: ("0..3", first of them)."""
    start = 0
    for at in range(1, len(ranks) + 1):
        if at == len(ranks) or _line(ranks[at]) != _line(ranks[start]):
            yield (f"{start}..{at - 1}" if at - 1 > start else str(start)), ranks[start]
            start = at


def _line(rank: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in rank.items() if k not in ("rank", "max_rel_error")}


def _calls(result: dict[str, Any]) -> Table:
    """Counts of every collective, by module over all layers, one column per plan."""
    names = [plan["plan"] for plan in result["plans"]]
    counts: dict[tuple[Any, ...], dict[str, int]] = {}
    for plan in result["plans"]:
        for call in plan["collectives"]:
            module = call["module"].removeprefix("model.layers.*.")
            key = call["group"], call["op"], module, f"{call['input_shape']} -> {call['output_shape']}"
            row = counts.setdefault(key, {})
            row[plan["plan"]] = row.get(plan["plan"], 0) + call["count"]
    table = Table("group", "op", "module", "shape on a rank", *names, box=box.SIMPLE_HEAD, title="calls",
                  title_justify="left")  # fmt: skip
    for key, row in counts.items():
        table.add_row(*(str(k).replace("None", "*") for k in key), *(str(row.get(name, "")) for name in names))
    return table


def _number(value: float) -> str:
    return f"{value:.3g}" if value < 1000 else f"{value:,.0f}"


def _bytes(count: int) -> str:
    return f"{count / _GIB:.3f} GiB" if count >= 2**28 else f"{count / 2**20:.3g} MiB"
