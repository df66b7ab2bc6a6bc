"""Which node of a rank graph is the first whose inputs are right and whose output is wrong, from values kept on all
ranks."""

import operator
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.distributed.tensor.placement_types import Partial

from emulator.layout.placement import Layout, Tokens
from emulator.layout.rank_graph import behind_moves
from emulator.ops.registry import LOCAL
from emulator.runtime.mesh import Mesh
from emulator.runtime.shadow import describe_ids
from emulator.verify.choices import differing_rows
from emulator.verify.expected import Expectation
from emulator.verify.reference import Tolerance

Captured = Mapping[str, tuple[Any, Tensor | None]]  # node name -> (value, token ids of its rows)


@dataclass(frozen=True)
class Blame:
    """node: the op; output: which of its outputs is wrong; wrong: ranks that hold a wrong value. value: the node that
    holds that output (a getitem, where the op has several)."""

    node: fx.Node
    output: int
    wrong: list[int]
    value: fx.Node


def suspects(node: fx.Node, right: Collection[str]) -> list[fx.Node]:
    """The nodes that may have made `node` wrong, in graph order: its ancestors, back to values known to be right."""
    found, waiting = {node}, [node]
    while waiting:
        for operand in waiting.pop().all_input_nodes:
            if operand.name in right or operand in found or _is_given(operand):
                continue
            found.add(operand)
            waiting.append(operand)
    return [n for n in node.graph.nodes if n in found]


def _is_given(node: fx.Node) -> bool:
    """An input or a weight, or one of a list of inputs: a layer's cache, which is written in place later."""
    given = node.args[0] if node.target is operator.getitem else node
    return isinstance(given, fx.Node) and given.op in ("placeholder", "get_attr")


def value_origin(node: fx.Node) -> str | None:
    """Name of the Program node whose value this is, also while it is on its way with padding among its rows."""
    return node.meta["origin"] or behind_moves(node).meta["origin"]


class Witnesses:
    """Values that all ranks kept, beside the reference.

    captured, expectations: by rank. reference, tolerance: for the origins of the nodes that are asked about.
    """

    def __init__(
        self, mesh: Mesh, tokens: Tokens, captured: Sequence[Captured], expectations: Sequence[Expectation],
        reference: Mapping[str, Tensor], tolerance: Tolerance, choices: Collection[str],
    ):  # fmt: skip
        self.mesh, self.tokens = mesh, tokens
        self.captured, self.expectations = captured, expectations
        self.reference, self.tolerance, self.choices = reference, tolerance, choices

    def first_wrong(self, nodes: Iterable[fx.Node]) -> Blame | None:
        """The first of these nodes (in graph order) that is wrong on some rank."""
        for node in nodes:
            wrong = self.wrong_ranks(node)
            if wrong:
                if node.target is operator.getitem:
                    maker: Any = node.args[0]
                    if maker.op == "call_function":
                        return Blame(maker, int(node.args[1]), wrong, node)  # type: ignore[arg-type]
                return Blame(node, 0, wrong, node)
        return None

    def first_misplaced(self, nodes: Iterable[fx.Node]) -> tuple[fx.Node, list[int], str] | None:
        """The first of these nodes whose rows are of other tokens than its layout says: (node, ranks, in words)."""
        for node in nodes:
            layout, found = node.meta["layout"], self.ids(node)
            if not isinstance(layout, Layout) or layout.kind != "token" or node.meta.get("padded"):
                continue
            wanted = [self._tokens_of(layout, rank) for rank in range(self.mesh.size)]
            wrong = [r for r, (f, w) in enumerate(zip(found, wanted)) if f is not None and not torch.equal(f, w)]
            if wrong:
                rank, held = wrong[0], found[wrong[0]]
                assert held is not None
                text = f"rank {rank} holds tokens {describe_ids(held)}, expected {describe_ids(wanted[rank])}"
                return node, wrong, text
        return None

    def _tokens_of(self, layout: Layout, rank: int) -> Tensor:
        if layout.on("tp") != LOCAL:
            return torch.arange(self.tokens.real)
        return self.tokens.ids(self.mesh.index("tp", rank))

    def values(self, node: fx.Node) -> list[Any]:
        return [c[node.name][0] if node.name in c else None for c in self.captured]

    def ids(self, node: fx.Node) -> list[Tensor | None]:
        return [c[node.name][1] if node.name in c else None for c in self.captured]

    def expected(self, node: fx.Node) -> list[Tensor | None]:
        """The real rows that each rank should hold; None for partial sums."""
        origin, layout = value_origin(node), node.meta["layout"]
        if origin is None or origin not in self.reference or not isinstance(layout, Layout):
            return [None] * self.mesh.size
        found = [e.of(origin, layout) for e in self.expectations]
        return [e.value if e is not None else None for e in found]

    def wrong_ranks(self, node: fx.Node) -> list[int]:
        """Ranks whose value is wrong; none where nothing is known of it."""
        origin, layout = value_origin(node), node.meta["layout"]
        if origin is None or origin not in self.reference or not isinstance(layout, Layout):
            return []
        values = self.values(node)
        if any(not isinstance(v, Tensor) for v in values):
            return []
        if layout.kind == "token" and isinstance(layout.on("tp"), Partial):
            return self._wrong_sums(values, origin)
        return [rank for rank, value in enumerate(values) if self._is_wrong(node, origin, value, rank)]

    def _wrong_sums(self, values: list[Tensor], origin: str) -> list[int]:
        """Partial sums are right or wrong together: their sum over each group."""
        wrong: list[int] = []
        for members in self.mesh.groups("tp"):
            parts = [values[r] for r in members]
            same = all(p.shape == parts[0].shape for p in parts)
            total = torch.stack(parts).sum(0)[: self.tokens.real] if same else None
            if total is None or not self._close(total, self.reference[origin], origin):
                wrong += members
        return wrong

    def _is_wrong(self, node: fx.Node, origin: str, value: Tensor, rank: int) -> bool:
        layout = node.meta["layout"]
        expected = self.expectations[rank].of(origin, layout)
        if expected is None:
            return False
        ids = self.captured[rank][node.name][1]
        rows = len(expected.ids) if expected.ids is not None else None
        if rows is not None and node.meta.get("padded"):
            rows = self.tokens.padded
        elif ids is not None and expected.ids is not None and not torch.equal(ids, expected.ids):
            return True
        shape = list(expected.value.shape)
        if rows is not None and shape:
            shape[0] = rows
        if list(value.shape) != shape:
            return True
        return not self._close(expected.real_rows(value), expected.value, origin)

    def _close(self, value: Tensor, expected: Tensor, origin: str) -> bool:
        if value.shape != expected.shape:
            return False
        if not value.numel():
            return True
        tolerance = self.tolerance.absolute.get(origin, 0.0)
        if origin in self.choices:
            share = self.tolerance.flips.get(origin, 0.0)
            bad = int(differing_rows(value, expected, tolerance).sum())
            return bad <= (max(2, share * len(value)) if share else 0)
        if not value.is_floating_point():
            return torch.equal(value, expected)
        difference = (value.double() - expected.double()).abs()
        difference[value.isnan() & expected.isnan()] = 0.0  # cache slots that nobody wrote
        return float(difference.max()) <= tolerance
