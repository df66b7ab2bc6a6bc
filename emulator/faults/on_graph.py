"""Editing the SPMD graph: what a faulty pass or plan would have written."""

import re
from typing import Any

import torch
from torch import fx

from emulator.errors import UsageError
from emulator.layout.annotate import annotate
from emulator.layout.rank_graph import RankGraph, copy_graph
from emulator.ops.foreign import function_name


class GraphEdit:
    """A copy of a rank graph that a fault edits; `done` finds its layouts, boundaries and broken rules anew."""

    def __init__(self, rank_graph: RankGraph):
        self.original = rank_graph
        self.graph = copy_graph(rank_graph.graph)
        self.sizes, self.tokens = rank_graph.sizes, rank_graph.tokens

    def done(self) -> RankGraph:
        self.graph.lint()
        return annotate(self.graph, self.original)

    @property
    def is_padded(self) -> bool:
        return self.tokens.padded != self.tokens.real

    def find(self, module: str, op: str, nth: int = 0) -> fx.Node:
        """The nth node of this op in this module (`model.layers.` may be left out)."""
        return find_node(self.graph, module, op, nth)

    def add(self, op: str, source: fx.Node, *args: Any) -> fx.Node:
        """A new op of the vocabulary right behind `source`. A reduction belongs to the module whose sum it makes."""
        node = self.call(getattr(torch.ops.emulator, op), source, *args)
        if op in ("all_reduce", "reduce_scatter"):
            while "module" not in source.meta:
                source = source.args[0]
            node.meta["module"] = source.meta["module"]
        return node

    def call(self, target: Any, source: fx.Node, *args: Any) -> fx.Node:
        """A new call right behind `source`."""
        with self.graph.inserting_after(source):
            return self.graph.call_function(target, (source, *args))

    def replace(self, node: fx.Node, op: str, *args: Any) -> None:
        """Another op of the vocabulary in a transition's place, on the same operand."""
        node.target, node.args = getattr(torch.ops.emulator, op), (node.args[0], *args)

    def gather(self, source: fx.Node) -> fx.Node:
        """local-token -> full-token, as lowering writes it."""
        full = self.add("all_gather", source, "tp", self.sizes["tp"], 0)
        return self.add("unpad", full, 0, self.tokens.real) if self.is_padded else full

    def padded(self, source: fx.Node) -> fx.Node:
        return self.add("pad", source, 0, self.tokens.padded) if self.is_padded else source

    def cut(self, source: fx.Node) -> fx.Node:
        """full-token -> local-token, as lowering writes it."""
        return self.add("slice", self.padded(source), "tp", self.sizes["tp"], 0)

    def reroute(self, old: fx.Node, new: fx.Node, *users: fx.Node) -> None:
        """These users of `old` (default: all that stand behind `new`) take `new` in its place."""
        order = {node: i for i, node in enumerate(self.graph.nodes)}
        for user in list(users or old.users):
            if order[user] > order[new]:
                user.replace_input_with(old, new)
        if not old.users:
            self.graph.erase_node(old)

    def without(self, node: fx.Node) -> fx.Node:
        """Takes a node out: its users take its operand, which is returned."""
        source = node.args[0]
        assert isinstance(source, fx.Node)
        node.replace_all_uses_with(source)
        self.graph.erase_node(node)
        return source


def find_node(graph: fx.Graph, module: str, op: str, nth: int = 0) -> fx.Node:
    """Raises UsageError when the graph has no such node: the fault does not apply to this plan or these sizes."""
    full = f"model.layers.{module}" if re.match(r"\d", module) else module
    found = [
        n for n in graph.nodes if n.op == "call_function" and n.meta.get("module") == full and function_name(n) == op
    ]
    if len(found) <= nth:
        raise UsageError(f"{op} number {nth + 1} of {full}: the graph has {len(found)}, so the fault does not apply")
    return found[nth]


def find_weight(graph: fx.Graph, name: str) -> fx.Node:
    """Raises UsageError when the graph has no such weight: the fault does not apply to this model."""
    found = [n for n in graph.nodes if n.op == "get_attr" and n.target == name]
    if not found:
        raise UsageError(f"weight {name}: the graph has none, so the fault does not apply")
    return found[0]
