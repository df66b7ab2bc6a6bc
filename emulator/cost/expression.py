"""Arithmetic over named sizes, as data files write it: `min(T, 4) * k`, `even(M, X)`. No calls but the ones below, no
attributes, no subscripts."""

import ast
import math
from collections.abc import Callable, Mapping
from typing import Any

from emulator.errors import UsageError


def even(total: int, parts: int) -> tuple[int, ...]:
    """`total` rows over `parts`, the first ones one row more."""
    each, more = divmod(total, parts)
    return tuple(each + (i < more) for i in range(parts))


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "min": min, "max": max, "sum": sum, "len": len, "ceil": math.ceil, "even": even,
}  # fmt: skip
_ALLOWED = (
    ast.Expression, ast.BinOp, ast.UnaryOp, ast.Compare, ast.BoolOp, ast.Call, ast.Name, ast.Load, ast.Constant,
    ast.Add, ast.Sub, ast.Mult, ast.Div, ast.FloorDiv, ast.Mod, ast.USub, ast.And, ast.Or, ast.Not,
    ast.Eq, ast.NotEq, ast.Lt, ast.LtE, ast.Gt, ast.GtE,
)  # fmt: skip


class Expression:
    """A checked expression; `names` are the variables it reads. UsageError for what is no arithmetic."""

    def __init__(self, text: str):
        self.text = text
        try:
            tree = ast.parse(text, mode="eval")
        except SyntaxError:
            raise UsageError(f"{text!r} is not an expression") from None
        called = set()
        for node in ast.walk(tree):
            if not isinstance(node, _ALLOWED):
                raise UsageError(f"{text!r}: {type(node).__name__} is not allowed in an expression")
            if isinstance(node, ast.Call):
                if not isinstance(node.func, ast.Name) or node.func.id not in FUNCTIONS or node.keywords:
                    raise UsageError(f"{text!r}: functions are {', '.join(FUNCTIONS)}")
                called.add(node.func)
        self.names = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and n not in called}
        self._code = compile(tree, text, "eval")

    def __call__(self, values: Mapping[str, Any]) -> Any:
        """Its value. UsageError for a name that `values` lacks."""
        try:
            return eval(self._code, {"__builtins__": {}, **FUNCTIONS}, dict(values))
        except NameError as error:
            raise UsageError(f"{self.text!r}: unknown name {error.name!r}; known: {', '.join(values)}") from None
