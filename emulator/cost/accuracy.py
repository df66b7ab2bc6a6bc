"""Predicts measured rows and says how far off each is, by op family and device."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from emulator.cost.calibrate import Errors, errors, measured_seconds
from emulator.cost.device import Device
from emulator.cost.forms import fit_key
from emulator.cost.kernel import Bound, Kernel
from emulator.cost.price import BITS, coefficients, price
from emulator.cost.rows import Row
from emulator.cost.vector import TRAFFIC
from emulator.errors import UsageError

KINDS = {
    "grouped_matmul": "grouped matmul", "fused_matmuls": "fused matmuls", "sparse_attention": "sparse attention",
    "dense_attention": "dense attention", "indexer": "indexer", "topk": "indexer", "collective": "collectives",
    "moe_dispatch": "dispatch and combine", "moe_combine": "dispatch and combine",
    **dict.fromkeys(TRAFFIC, "vector ops"),
}  # fmt: skip


@dataclass(frozen=True)
class Priced:
    """One row with its prediction. profile: the device profile used. measured: seconds, None where the row has none.
    fitted: how many measured rows the coefficients rest on (0: carried over from another device or set by hand)."""

    row: Row
    profile: str
    family: str
    kind: str
    seconds: float
    measured: float | None
    flops: float
    bytes: float
    bound: Bound
    fitted: int

    @property
    def error(self) -> float | None:
        """Relative: predicted / measured - 1."""
        return None if self.measured is None else self.seconds / self.measured - 1


@dataclass(frozen=True)
class Unpriced:
    row: Row
    why: str


def kind_of(kernel: Kernel) -> str:
    """The coarse family, as people compare them: matmul by dtype, all vector ops together, ..."""
    if kernel.family == "matmul":
        return f"matmul {BITS.get(kernel.dtype, kernel.dtype)}"
    return KINDS.get(kernel.family, kernel.family)


def price_row(row: Row, device: Device) -> Priced:
    """Raises Unpriceable for a kernel without a price. The row has kernels."""
    benchmark = row.setting == "benchmark"
    costs = [price(kernel, device, benchmark=benchmark) for kernel in row.kernels]
    main = max(range(len(costs)), key=lambda at: costs[at].seconds)
    named = row.kernels[-1]
    _, used = coefficients(named, device, benchmark=benchmark)
    return Priced(
        row, device.name, fit_key(named), kind_of(named), sum(c.seconds for c in costs), measured_seconds(row, device),
        sum(c.flops for c in costs), sum(c.bytes for c in costs), costs[main].bound, used.rows,
    )  # fmt: skip


def price_rows(rows: Sequence[Row], find: Callable[[Row], Device]) -> tuple[list[Priced], list[Unpriced]]:
    """Every row lands in one of the two lists. find: the device of a row, or UsageError."""
    done: list[Priced] = []
    left: list[Unpriced] = []
    for row in rows:
        if not row.kernels:
            left.append(Unpriced(row, row.why or "no kernels"))
            continue
        try:
            done.append(price_row(row, find(row)))
        except UsageError as error:
            left.append(Unpriced(row, str(error)))
    return done, left


def by(priced: Sequence[Priced], key: Callable[[Priced], str]) -> dict[str, Errors]:
    """Errors of the rows that share a key, in order of the keys; rows without a measured time count nowhere."""
    groups: dict[str, list[float]] = {}
    for item in priced:
        if item.error is not None:
            groups.setdefault(key(item), []).append(abs(item.error))
    found = {name: errors(values) for name, values in sorted(groups.items())}
    return {name: value for name, value in found.items() if value is not None}
