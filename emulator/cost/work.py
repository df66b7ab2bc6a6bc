"""The ideal work of a kernel as a sum of terms, and what a device's coefficients make of it.

Each op family turns sizes into terms: how long each part would take at the device's specified peak. A coefficient
multiplies each term. Terms that stand alone follow one another; terms of one group overlap, wholly (the longest
counts) or in part (their 1.5-norm):

    seconds = sum over groups of norm over the group's terms of (coefficient * ideal seconds)
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from emulator.cost.kernel import Bound, Kernel
from emulator.errors import UsageError

MICROSECOND = 1e-6
ALIGNMENT = 32  # bytes: the block of an Ascend data copy; rows that start off it are read in pieces
NORMS = {"overlap": 1.5}  # by group; others: the maximum

ITEM_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "int8": 1, "int32": 4, "int64": 8, "bool": 1,
              "a16w8": 2, "float8_e4m3fn": 1}  # fmt: skip


class Unpriceable(UsageError):
    """A kernel that no cost can be given for: says which and why."""

    def __init__(self, kernel: Kernel, why: str):
        super().__init__(f"{kernel.name or kernel.family} ({kernel.dtype}): {why}")
        self.kernel = kernel
        self.why = why


@dataclass(frozen=True)
class Term:
    """name: of its coefficient. ideal: seconds at the specified peak (1 us for a launch, whose coefficient is in us).
    group: terms that share one overlap; "" stands alone."""

    name: str
    ideal: float
    bound: Bound
    group: str = ""


@dataclass(frozen=True)
class Work:
    """flops: multiply and add count as two. bytes: moved from and to memory, or sent over links."""

    flops: float
    bytes: float
    terms: tuple[Term, ...] = field(default=())


def launch(name: str = "launch") -> Term:
    return Term(name, MICROSECOND, "launch")


def seconds(work: Work, coefficients: Mapping[str, float]) -> tuple[float, Bound]:
    """Time of the work and what most of it is spent on. A term without a coefficient counts nothing."""
    groups: dict[str, list[tuple[float, Bound]]] = {}
    for number, term in enumerate(work.terms):
        groups.setdefault(term.group or str(number), []).append(
            (coefficients.get(term.name, 0.0) * term.ideal, term.bound)
        )
    total = 0.0
    by_bound: dict[Bound, float] = {}
    for group, parts in groups.items():
        longest, bound = max(parts)
        norm = NORMS.get(group, math.inf)
        taken = longest if math.isinf(norm) else sum(part**norm for part, _ in parts) ** (1 / norm)
        total += taken
        by_bound[bound] = by_bound.get(bound, 0.0) + taken
    return total, max(by_bound, key=lambda b: by_bound[b], default="launch")


def size(kernel: Kernel, name: str, default: float | None = None) -> float:
    """A size of a kernel as a number; Unpriceable when it is missing or negative."""
    value = kernel.sizes.get(name, default)
    if value is None:
        raise Unpriceable(kernel, f"size {name!r} is missing")
    if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
        raise Unpriceable(kernel, f"size {name!r} must be a number from 0 up, not {value!r}")
    return value


def lengths(kernel: Kernel, name: str) -> tuple[int, ...]:
    """A size with one entry per request or expert."""
    value = kernel.sizes.get(name)
    if not isinstance(value, tuple | list) or not all(isinstance(v, int) and v >= 0 for v in value):
        raise Unpriceable(kernel, f"size {name!r} must be a list of numbers from 0 up, not {value!r}")
    return tuple(value)


def item_bytes(kernel: Kernel) -> int:
    if kernel.dtype not in ITEM_BYTES:
        raise Unpriceable(kernel, f"unknown dtype; known are {', '.join(ITEM_BYTES)}")
    return ITEM_BYTES[kernel.dtype]
