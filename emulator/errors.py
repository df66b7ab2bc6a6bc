"""Errors shown to users. Each carries one clear line: what was given, what is allowed, where."""


class UsageError(ValueError):
    """A user's mistake: bad input, exit code 2, no traceback."""


class LayoutError(UsageError):
    """A graph or plan that breaks a layout rule: names module, op, layouts found and allowed."""


class RankError(RuntimeError):
    """A rank raised, died or stalled: exit code 3. `report` names rank, op and module."""

    def __init__(self, message: str, report: dict | None = None):
        super().__init__(message)
        self.report = report or {}
