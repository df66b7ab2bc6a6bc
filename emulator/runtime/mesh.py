"""The rank grid: named axes, with the ep axis folded over all ranks."""

import math
from collections.abc import Mapping

import numpy as np

from emulator.errors import UsageError


class Mesh:
    """Ranks 0 .. size-1 laid out row-major over named axes, dp outermost and tp innermost: Mesh(dp=2, tp=4).

    ep is no axis of the grid: its groups are consecutive blocks of ep ranks over the whole of it (ep divides the size).
    Raises UsageError for a size below 1 or an ep that does not divide.
    """

    def __init__(self, *, ep: int = 1, **axes: int):
        for name, size in {**axes, "ep": ep}.items():
            if not isinstance(size, int) or size < 1:
                raise UsageError(f"mesh axis {name} = {size!r}: a parallel size is a whole number of at least 1")
        order = {"dp": 0, "tp": 2}
        self.axes: dict[str, int] = dict(sorted(axes.items(), key=lambda item: order.get(item[0], 1)))
        self.ep = ep
        self.size = math.prod(self.axes.values())
        if self.size % ep:
            raise UsageError(f"ep {ep} must divide the {self.size} ranks of the mesh")
        grid = np.arange(self.size).reshape(tuple(self.axes.values()) or (1,))
        self._lines = {
            axis: np.moveaxis(grid, dim, -1).reshape(-1, size).tolist()
            for dim, (axis, size) in enumerate(self.axes.items())
        }
        self._lines["ep"] = grid.reshape(-1, ep).tolist()

    @classmethod
    def of(cls, size: int, axes: Mapping[str, int] | None = None) -> "Mesh":
        """A mesh of `size` ranks with these axes (default: one tp axis). UsageError when their product differs."""
        mesh = cls(**(axes if axes is not None else {"tp": size}))
        if mesh.size != size:
            raise UsageError(f"mesh {dict(axes or {})} has {mesh.size} ranks, the world {size}")
        return mesh

    @property
    def tp(self) -> int:
        return self.axes.get("tp", 1)

    @property
    def dp(self) -> int:
        return self.axes.get("dp", 1)

    @property
    def sizes(self) -> dict[str, int]:
        """Lengths of the axes that layouts speak of."""
        return {"tp": self.tp, "ep": self.ep}

    @property
    def names(self) -> tuple[str, ...]:
        """All axes that have groups: those of the grid, and ep."""
        return (*self.axes, "ep")

    def describe(self) -> dict[str, int]:
        """{axis: size}, for people and traces."""
        return {**self.axes, "ep": self.ep}

    def members(self, axis: str, rank: int) -> list[int]:
        """Ranks of the group along `axis` that `rank` belongs to, in order."""
        return next((line for line in self._lines.get(axis, ()) if rank in line), [rank])

    def index(self, axis: str, rank: int) -> int:
        """Position of `rank` in its group along `axis`."""
        return self.members(axis, rank).index(rank)

    def groups(self, axis: str) -> list[list[int]]:
        """Every group along `axis`."""
        return [list(line) for line in self._lines.get(axis, ())]
