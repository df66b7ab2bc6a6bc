"""Bringing values of a rank graph from the layout they have to one that is wanted: insertion, and what is shared."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import fx
from torch.distributed.tensor.placement_types import Placement

from emulator.errors import LayoutError
from emulator.layout.placement import Kind, Tokens, placement_word
from emulator.layout.plan import Plan
from emulator.layout.rank_graph import RankGraph
from emulator.layout.transitions import insert_transition, transition_steps

Wanted = tuple[Kind, dict[str, Placement]]


@dataclass(frozen=True)
class Value:
    """A value on its way: node in the rank graph, its layout(s), and for dispatched rows the Program's dispatch."""

    node: fx.Node
    layout: Any
    dispatch: fx.Node | None = None


class Moves:
    """Transitions of one lowering; consumers that want the same layout of a value share them. requesters: modules that
    wanted a transition."""

    def __init__(self, plan: Plan, sizes: Mapping[str, int], tokens: Tokens):
        self.plan, self.sizes, self.tokens = plan, sizes, tokens
        self.out = RankGraph(fx.Graph(), sizes, tokens, plan)
        self.converted: dict[tuple[fx.Node, str, Placement], Value] = {}
        self.requesters: dict[fx.Node, list[str]] = {}

    def convert(self, value: Value, wanted: Wanted | None, module: str) -> Value:
        """The value in the layout that `module` wants, where it is of that kind."""
        if wanted is None or wanted[0] != value.layout.kind:
            return value
        for axis, target in wanted[1].items():
            size = self.sizes[axis]
            if size == 1 or value.layout.on(axis) == target:
                continue
            key = (value.node, axis, target)
            if key not in self.converted:
                steps = transition_steps(value.layout.on(axis), target, axis, size, self.tokens)
                if steps is None:
                    found, want = placement_word(value.layout.on(axis)), placement_word(target)
                    raise LayoutError(
                        f"plan {self.plan.name}: {module} wants {want}, but no transition leads from {found}"
                    )
                node = value.node
                for step in steps:
                    node = self.insert(step.op, (node, *step.args), value.node, step is steps[-1])
                self.converted[key] = Value(node, value.layout.placed(**{axis: target}))
            value = self.converted[key]
            self.request(value.node, module)
        return value

    def insert(self, op: str, args: tuple, source: fx.Node, holds_value: bool) -> fx.Node:
        node = insert_transition(
            self.out.graph, op, args, source, holds_value=holds_value, sizes=self.sizes, tokens=self.tokens
        )
        node.meta["moves"] = source.name
        return node

    def request(self, node: fx.Node, module: str) -> None:
        """Notes who wanted a transition; the pad before it and the gather behind an unpad belong to the same one."""
        while "moves" in node.meta:
            self.requesters.setdefault(node, []).append(module)
            if node.args[0].name == node.meta["moves"]:
                break
            node = node.args[0]
