"""Costs of kernels from the best source at hand, looked up once for each kernel."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from emulator.cost.database import Database
from emulator.cost.device import Device
from emulator.cost.kernel import Cost, Kernel
from emulator.cost.price import price

Priced = tuple[Kernel, Cost]


class Pricer:
    """Prices kernels on a device: a row of the database (measured), its neighbours (interpolated), else the analytic
    form. analytic(kernel, device) gives flops, bytes and bound in any case, and raises Unpriceable."""

    def __init__(
        self, device: Device, database: Database | None = None, analytic: Callable[[Kernel, Device], Cost] = price
    ):
        self.device, self.database, self.analytic = device, database, analytic
        self._known: dict[Any, Priced] = {}

    def __call__(self, kernel: Kernel) -> Priced:
        key = (kernel.family, kernel.name, kernel.dtype, *kernel.sizes.items())
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = kernel, self._price(kernel)
        return found

    def _price(self, kernel: Kernel) -> Cost:
        cost = self.analytic(kernel, self.device)
        looked_up = self.database.lookup(kernel) if self.database is not None else None
        if looked_up is None:
            return cost
        seconds, source = looked_up
        return replace(cost, seconds=seconds, source=source)
