"""What one rank holds, is told and does, for a fault to change."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx

from emulator.faults.on_graph import find_node, find_weight
from emulator.layout.placement import Layout
from emulator.layout.rank_graph import RankGraph, copy_graph
from emulator.runtime.collectives import Collectives
from emulator.runtime.mesh import Mesh
from emulator.runtime.rank_weights import local_shard

Move = Callable[..., Tensor]  # move(x, *args) carries a transition out; move(x, *args, op=other) another one
StandIn = Callable[..., Tensor]  # stand_in(move, x, *args) in place of a transition


@dataclass
class RankSite:
    """One rank of a run. rank_graph: its own copy. weights: whole, by name. inputs: its graph inputs. parts: weights it
    holds in place of its proper part. stand_ins: transitions, by node name, that it carries out otherwise (for values
    and for token ids alike).
    """

    rank_graph: RankGraph
    mesh: Mesh
    rank: int
    weights: Mapping[str, Tensor]
    inputs: dict[str, Any]
    parts: dict[str, Tensor] = field(default_factory=dict)
    stand_ins: dict[str, StandIn] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.rank_graph = replace(self.rank_graph, graph=copy_graph(self.rank_graph.graph))
        self.graph, self.tokens = self.rank_graph.graph, self.rank_graph.tokens

    @property
    def index(self) -> int:
        """Position in the tp group."""
        return self.mesh.index("tp", self.rank)

    @property
    def size(self) -> int:
        return self.mesh.tp

    @property
    def window(self) -> tuple[int, int]:
        """[start, end) of this rank's real tokens."""
        return self.tokens.window(self.index)

    @property
    def num_pads(self) -> int:
        return self.tokens.padded - self.tokens.real

    def find(self, module: str, op: str, nth: int = 0) -> fx.Node:
        return find_node(self.graph, module, op, nth)

    def weight(self, name: str, layout: Layout) -> Tensor:
        """What the rank holds of a weight."""
        proper = local_shard(self.weights[name], layout, self.mesh, self.rank)
        return self.parts.get(name, proper)

    def part(self, name: str, rank: int | None = None) -> Tensor:
        """The proper part of a weight (default: this rank's), a copy."""
        layout = find_weight(self.graph, name).meta["layout"]
        return local_shard(self.weights[name], layout, self.mesh, self.rank if rank is None else rank).clone()

    def move(self, node: fx.Node, stand_in: StandIn) -> None:
        """Carries a transition out otherwise: stand_in(move, x, *args)."""
        self.stand_ins[node.name] = stand_in

    def wrap(self, node: fx.Node, function: Callable[..., Any]) -> None:
        """Computes a node otherwise: function(op, *operands)."""
        target = node.target

        def wrapped(*operands: Any, **named: Any) -> Any:
            return function(target, *operands, **named)

        node.target = wrapped

    def after(self, node: fx.Node, function: Callable[[Tensor], Tensor]) -> None:
        """Everyone who takes a node's value takes function(value) instead."""
        users = list(node.users)
        with self.graph.inserting_after(node):
            new = self.graph.call_function(function, (node,))
        new.meta = {**node.meta, "origin": None}
        for user in users:
            user.replace_input_with(node, new)


class FaultyCollectives(Collectives):
    """Collectives with other ways to carry some transitions out."""

    def __init__(self, like: Collectives, stand_ins: Mapping[str, StandIn]):
        super().__init__(like.mesh, like.rank, like.board, like.transport, like.timeout)
        self.log, self.stand_ins = like.log, stand_ins

    def call(
        self, op: str, x: Tensor, *args: Any, node: str, module: str, layout: str, ids: Tensor | None = None
    ) -> Tensor:
        def move(value: Tensor, *given: Any, op: str = op) -> Tensor:
            return super(FaultyCollectives, self).call(
                op, value, *given, node=node, module=module, layout=layout, ids=ids
            )

        stand_in = self.stand_ins.get(node)
        return move(x, *args) if stand_in is None else stand_in(move, x, *args)


def is_ids(x: Tensor) -> bool:
    """Whether a transition moves token ids, not the value itself."""
    return x.dim() == 1 and x.dtype == torch.int64
