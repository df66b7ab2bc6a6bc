"""Balanced routing for shape-only runs: no router values exist, so expert loads are taken as even.

Row g = token * k + choice goes to expert g mod E: every rank can work out every split size by itself, ranks agree, and
experts differ by one row at most.
"""

from typing import Any

from torch import Tensor, fx

from emulator.layout.placement import Tokens
from emulator.runtime.mesh import Mesh


class BalancedRouting:
    """Split sizes of dispatch and combine on one rank. k: experts per token."""

    def __init__(self, mesh: Mesh, rank: int, tokens: Tokens, num_experts: int, k: int):
        sources = mesh.members("ep", rank)
        per_source = [self._expert_counts(mesh, source, tokens, num_experts, k) for source in sources]
        me, held = mesh.index("ep", rank), num_experts // mesh.ep
        mine = per_source[me]
        self.num_rows = sum(mine)
        self.to_experts = [sum(mine[i * held : (i + 1) * held]) for i in range(mesh.ep)]
        self.from_sources = [sum(counts[me * held : (me + 1) * held]) for counts in per_source]

    @staticmethod
    def _expert_counts(mesh: Mesh, source: int, tokens: Tokens, num_experts: int, k: int) -> list[int]:
        start, end = tokens.window(mesh.index("tp", source))
        first, last = start * k, end * k
        return [
            (last - e + num_experts - 1) // num_experts - (first - e + num_experts - 1) // num_experts
            for e in range(num_experts)
        ]

    def dispatch(self, x: Tensor, ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
        """Shapes of moe_dispatch on this rank's real tokens."""
        return (
            x.new_empty((self.num_rows, x.shape[1])),
            ids.new_empty((1, num_experts)),
            ids.new_empty((self.num_rows,)),
        )

    def sends(self, node: fx.Node) -> list[int]:
        """Rows this rank sends to each rank in an all_to_all_rows node."""
        return self.to_experts if str(node.meta["layout"]) == "expert-rows" else self.from_sources

    def split_args(self, name: str, node: fx.Node, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """The node's arguments with split lists in place of the counts, which hold no values here."""
        if name == "all_to_all":
            return args
        to, back = self.to_experts, self.from_sources
        send, receive = (to, back) if str(node.meta["layout"]) == "expert-rows" else (back, to)
        return (args[0], send, receive, *args[3:])
