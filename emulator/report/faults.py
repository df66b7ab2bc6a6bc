"""What people see of the fault catalogue: its list, and the detection matrix."""

from rich import box
from rich.console import Console
from rich.table import Table

from emulator.faults.fault import Fault
from emulator.jobs.matrix import CHECKS, Outcome, Row, rows, totals

_WIDTH = 160  # of a pipe or file, which has no edge
_SHORT = {"rank error": "rank"}


def print_faults(faults: list[Fault]) -> None:
    """Every fault: kind, plan, what it is, and the public cases it expresses."""
    for fault in faults:
        plan = ", ".join((fault.plan, *(f"{k}={v}" for k, v in fault.variants.items())))
        print(f"{fault.name}  ({fault.kind}; plan {plan})")
        print(f"    {fault.summary}" + (f" [{', '.join(fault.cases)}]" if fault.cases else ""))
    print(f"{len(faults)} faults")


def print_matrix(outcomes: list[Outcome]) -> None:
    """A line per fault, the cells that are not as they should be, and the totals."""
    console = _console()
    table = Table(
        title="detection matrix: cells per fault, and in how many each check failed", title_justify="left",
        box=box.SIMPLE_HEAD, pad_edge=False,
    )  # fmt: skip
    numbers = ("found", "no effect", "missed", "node", "diagnosis", *(_SHORT.get(c, c) for c in CHECKS))
    table.add_column("fault", no_wrap=True)
    table.add_column("kind")
    for name in numbers:
        table.add_column(name, justify="right")
    table.add_column("seen by")
    for row in rows(outcomes):
        table.add_row(*_line(row))
    console.print(table)
    for row in rows(outcomes):
        if row.reasons:
            console.print(f"without effect: {row.fault}: {'; '.join(row.reasons)}", highlight=False, soft_wrap=True)
    for told, where in _complaints(outcomes).items():
        text = f"{told} ({len(where)} cells: {', '.join(where[:3])}{', ...' if len(where) > 3 else ''})"
        console.print(text, style="red", markup=False, highlight=False, soft_wrap=True)
    _print_totals(console, outcomes)


def _line(row: Row) -> list[str]:
    seen = {check for check, number in row.seen.items() if number}
    told = "values only" if seen == {"values"} else "counts only" if seen == {"counts"} else ""
    judged = [[getattr(o, f"{what}_right") for o in row.outcomes] for what in ("node", "diagnosis")]
    shares = [f"{sum(j is True for j in found)}/{sum(j is not None for j in found)}" for found in judged]
    wrong = row.count("missed", "unexpected")
    return [
        row.fault, row.kind, str(row.count("detected")), str(row.count("no effect") or ""), str(wrong or ""),
        *(share if share != "0/0" else "-" for share in shares), *(str(row.seen[c] or "") for c in CHECKS), told,
    ]  # fmt: skip


def _complaints(outcomes: list[Outcome]) -> dict[str, list[str]]:
    """What is not right, and in which cells."""
    found: dict[str, list[str]] = {}
    for outcome in outcomes:
        cell = outcome.cell
        if told := _complaint(outcome):
            found.setdefault(told, []).append(f"{cell.model} tp {cell.tp}, {cell.tokens} tokens")
    return found


def _complaint(outcome: Outcome) -> str:
    """What is not right about a cell; "" when all is."""
    fault = outcome.cell.fault
    if outcome.state == "missed":
        return f"missed: {fault}"
    found = f"found {outcome.kind or 'no node, first failure'} at {outcome.place}"
    if outcome.state == "unexpected":
        return f"detected against its claim ({outcome.reason}): {fault}: {found}"
    wrong = [w for w, right in (("node", outcome.node_right), ("diagnosis", outcome.diagnosis_right)) if right is False]
    return f"wrong {' and '.join(wrong)}: {fault}: {found}" if wrong else ""


def _print_totals(console: Console, outcomes: list[Outcome]) -> None:
    found = totals(outcomes)
    effective = found["cells"] - found["no effect"]
    lines = [
        f"{found['faults']} faults, {found['cells']} cells in {found['seconds']} s: {found['detected']} of {effective} "
        f"with an effect detected, {found['no effect']} without effect, {found['missed']} missed, "
        f"{found['unexpected']} detected against a claim of no effect"
    ]
    for what in ("node", "diagnosis"):
        share = found[what]
        percent = f" ({100 * share['right'] / share['of']:.1f} %)" if share["of"] else ""
        lines.append(f"{what} right: {share['right']} of {share['of']}{percent}")
    for check, faults in found["only"].items():
        if faults:
            lines.append(f"{check} only: {len(faults)} faults: {', '.join(faults)}")
    for line in lines:
        console.print(line, highlight=False, soft_wrap=True)


def _console() -> Console:
    console = Console()
    return console if console.is_terminal else Console(width=_WIDTH)
