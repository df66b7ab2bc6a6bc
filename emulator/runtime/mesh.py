"""The rank grid: dp x tp, with the ep axis folded over it."""

from dataclasses import dataclass

from emulator.errors import UsageError


@dataclass(frozen=True)
class Mesh:
    """World of dp * tp ranks, rank = dp_index * tp + tp_index; ep groups are consecutive blocks of ep ranks."""

    tp: int
    dp: int = 1
    ep: int = 1

    def __post_init__(self) -> None:
        for name in ("tp", "dp", "ep"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} {getattr(self, name)}: a parallel size is at least 1")
        if self.size % self.ep:
            raise UsageError(f"ep {self.ep} must divide dp * tp = {self.size}")

    @property
    def size(self) -> int:
        return self.dp * self.tp

    @property
    def sizes(self) -> dict[str, int]:
        """Lengths of the axes that layouts speak of."""
        return {"tp": self.tp, "ep": self.ep}

    def members(self, axis: str, rank: int) -> list[int]:
        """Ranks of the group along `axis` that `rank` belongs to, in order."""
        if axis == "tp":
            start = rank // self.tp * self.tp
            return list(range(start, start + self.tp))
        if axis == "ep":
            start = rank // self.ep * self.ep
            return list(range(start, start + self.ep))
        assert axis == "dp", axis
        return list(range(rank % self.tp, self.size, self.tp))

    def index(self, axis: str, rank: int) -> int:
        """Position of `rank` in its group along `axis`."""
        return self.members(axis, rank).index(rank)

    def groups(self, axis: str) -> list[list[int]]:
        """Every group along `axis`."""
        return [list(g) for g in sorted({tuple(self.members(axis, r)) for r in range(self.size)})]
