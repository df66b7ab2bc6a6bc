"""Shape-only execution: full-size runs without values, on FakeTensors.

Layers repeat the same few shapes, so a call is worked out once per distinct signature and then looked up. Routing has
no values to go by, so expert loads are taken as even: row g = token * k + choice, tokens counted over all dp ranks,
goes to expert g mod E. Every rank can work out every split size by itself, ranks agree, and experts differ by one row.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from emulator.layout.placement import Layout, Tokens
from emulator.model.weights import parameter_dtype
from emulator.runtime.mesh import Mesh
from emulator.runtime.rank_weights import fake_shard


class ShapeMode:
    """One rank's stand-ins for values. tokens: of every dp rank; k: experts per token. Use inside a FakeTensorMode."""

    def __init__(self, mesh: Mesh, rank: int, tokens: Sequence[Tokens], num_experts: int, k: int, dtype: torch.dtype):
        self.mesh, self.rank, self.dtype = mesh, rank, dtype
        self._known: dict[Any, Any] = {}
        sources = mesh.members("ep", rank)
        per_source = []
        for source in sources:
            dp = mesh.index("dp", source)
            before, own = sum(t.real for t in tokens[:dp]), tokens[dp]  # tokens of earlier dp ranks
            windows = own.windows(mesh.index("tp", source))
            real = [(before + min(lo, own.real), before + min(hi, own.real)) for lo, hi in windows]
            per_source.append(_expert_counts(real, num_experts, k))
        me, held = mesh.index("ep", rank), num_experts // mesh.ep
        mine = per_source[me]
        self.num_rows, self.group_rows = sum(mine), sum(map(sum, per_source))
        self.to_experts = [sum(mine[i * held : (i + 1) * held]) for i in range(mesh.ep)]
        self.from_sources = [sum(counts[me * held : (me + 1) * held]) for counts in per_source]

    def call(self, target: Callable, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The outputs of a call, by the shapes and dtypes of its tensors and its other arguments."""
        key = (target, _signature(args), _signature(tuple(kwargs.items())))
        if key not in self._known:
            self._known[key] = target(*args, **kwargs)
        return self._known[key]

    def weight(self, name: str, parameter: Tensor, layout: Layout) -> Tensor:
        """This rank's part of a parameter. parameter: whole, a meta tensor."""
        dtype = parameter_dtype(name, self.dtype, parameter)
        key = (name.rpartition(".")[2], tuple(parameter.shape), dtype, layout.placements)
        if key not in self._known:
            self._known[key] = fake_shard(name, parameter, self.dtype, layout, self.mesh, self.rank)
        return self._known[key]

    def dispatch(
        self, x: Tensor, ids: Tensor, num_experts: int, *, of_group: bool = False
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Shapes of moe_dispatch on the real tokens of this rank, or of its ep group."""
        num_rows = self.group_rows if of_group else self.num_rows
        return x.new_empty((num_rows, x.shape[1])), ids.new_empty((1, num_experts)), ids.new_empty((num_rows,))

    def own_rows(self, rows: Tensor) -> Tensor:
        """Of the group's dispatched rows, those of the experts held here."""
        return rows.new_empty((sum(self.from_sources), *rows.shape[1:]))

    def splits(self, node: fx.Node) -> tuple[list[int], list[int]]:
        """Rows this rank sends to, and receives from, each rank in an all_to_all_rows node."""
        there, back = self.to_experts, self.from_sources
        return (there, back) if str(node.meta["layout"]) == "expert-rows" else (back, there)


def _expert_counts(windows: Sequence[tuple[int, int]], num_experts: int, k: int) -> list[int]:
    """Rows per expert of the tokens in some windows under balanced routing."""

    def below(limit: int, expert: int) -> int:
        return (limit - expert + num_experts - 1) // num_experts

    return [sum(below(hi * k, e) - below(lo * k, e) for lo, hi in windows) for e in range(num_experts)]


def _signature(args: Any) -> Any:
    if isinstance(args, Tensor):
        return (tuple(args.shape), args.dtype)
    return tuple(_signature(a) for a in args) if isinstance(args, (tuple, list)) else args
