"""Errors shown to users. Each carries one clear line: what was given, what is allowed, where."""

from typing import Any

from pydantic import ValidationError


class UsageError(ValueError):
    """A user's mistake: bad input, exit code 2, no traceback."""


class LayoutError(UsageError):
    """A graph or plan that breaks a layout rule: names module, op, layouts found and allowed.

    violations: every broken rule (layout.rank_graph.Violation), where the static check found them.
    """

    def __init__(self, message: str, violations: list[Any] | None = None):
        super().__init__(message)
        self.violations = violations or []


def first_problem(error: ValidationError) -> str:
    """The first problem of a pydantic validation in one line: where, what was given, what is allowed."""
    found: Any = error.errors()[0]
    where = ".".join(map(str, found["loc"]))
    if found["type"] == "extra_forbidden":
        return f"{where}: unknown field"
    text = found["msg"].removeprefix("Value error, ")
    text = text[0].lower() + text[1:]
    if found["type"] == "missing" or isinstance(found["input"], (dict, list)):  # the input is the table around it
        return f"{where}: {text}" if where else text
    return f"{where} = {found['input']!r}: {text}"


class RankError(RuntimeError):
    """A rank raised, died or stalled: exit code 3.

    report: rank, kind, message, doing (op and module or call site), culprits, others (what each other rank was doing).
    outcomes: every rank's result or exception, in rank order.
    """

    def __init__(self, message: str, report: dict | None = None):
        super().__init__(message)
        self.report = report or {}
        self.outcomes: list[Any] = []
