"""What a rank should hold: the reference value cut by a layout."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, fx
from torch.distributed.tensor.placement_types import Partial, Placement, Shard

from emulator.layout.placement import Layout, Tokens
from emulator.model.program import Program
from emulator.ops.registry import LOCAL, Mixed, R, op_name
from emulator.runtime.mesh import Mesh


@dataclass(frozen=True)
class Expected:
    """value: this rank's real rows of the reference; ids: global token ids of its rows with padding (-1), or None."""

    value: Tensor
    ids: Tensor | None


class Expectation:
    """Cuts reference values (by Program node name) to one rank's layouts."""

    def __init__(self, program: Program, mesh: Mesh, rank: int, tokens: Tokens, reference: Mapping[str, Tensor]):
        self.mesh, self.rank, self.tokens, self.reference = mesh, rank, tokens, reference
        self.dispatch_of = {node.name: _dispatch_behind(node) for node in program.graph.nodes}

    def of(self, origin: str, layout: Layout) -> Expected | None:
        """What this rank holds of a value in a layout; None where a single rank's share says nothing (partial sums)."""
        value = self.reference[origin]
        if layout.kind == "rows":
            return self._rows(origin, value, layout)
        if layout.kind != "token":
            return Expected(value, None)
        placement, index = layout.on("tp"), self.mesh.index("tp", self.rank)
        ids = torch.arange(self.tokens.real)
        if isinstance(placement, Mixed):
            inner = self._cut(value, placement.value, index)
            return None if inner is None else Expected(self._window(inner, index), self._local_ids(index))
        if placement == LOCAL:
            return Expected(self._window(value, index), self._local_ids(index))
        cut = self._cut(value, placement, index)
        return None if cut is None else Expected(cut, ids)

    def _cut(self, value: Tensor, placement: Placement, index: int) -> Tensor | None:
        if isinstance(placement, Partial):
            return None
        return value.chunk(self.mesh.tp, placement.dim)[index] if isinstance(placement, Shard) else value

    def _window(self, value: Tensor, index: int) -> Tensor:
        start, end = self.tokens.window(index)
        return value[start:end]

    def _local_ids(self, index: int) -> Tensor:
        start, end = self.tokens.window(index)
        ids = torch.full((self.tokens.per,), -1)
        ids[: end - start] = torch.arange(start, end)
        return ids

    def _rows(self, origin: str, value: Tensor, layout: Layout) -> Expected | None:
        """Dispatched rows. The reference sorts all tokens' rows by expert. A rank in token-rows holds those of its own
        tokens in that order; in expert-rows those of its experts, by source rank and then in that order."""
        dispatch = self.dispatch_of[origin]
        assert dispatch is not None
        order, ids = self.reference[dispatch.order], self.reference[dispatch.ids]
        k = ids.shape[1]
        token, expert = order // k, ids.flatten()[order]
        num_experts = self.reference[dispatch.counts].shape[1]
        held = num_experts // self.mesh.ep
        if str(layout) == "expert-rows":
            me = self.mesh.index("ep", self.rank)
            sources = self.mesh.members("ep", self.rank)
            in_block = expert // held == me
            picks = [(self._in_window(token, s) & in_block).nonzero().squeeze(1) for s in sources]
        else:
            whole = layout.on("tp") == R
            picks = [torch.arange(len(order)) if whole else self._in_window(token, self.rank).nonzero().squeeze(1)]
        rows = torch.cat(picks)
        if origin == dispatch.counts:
            counts = torch.stack([torch.bincount(expert[p], minlength=num_experts) for p in picks])
            mine = counts[:, me * held : (me + 1) * held] if str(layout) == "expert-rows" else counts
            return Expected(mine, None)
        if origin == dispatch.order:
            start = 0 if layout.on("tp") == R else self.tokens.window(self.mesh.index("tp", self.rank))[0]
            return Expected(value[rows] - start * k, None)
        return Expected(value[rows], None)

    def _in_window(self, token: Tensor, rank: int) -> Tensor:
        start, end = self.tokens.window(self.mesh.index("tp", rank))
        return (token >= start) & (token < end)


@dataclass(frozen=True)
class _Dispatch:
    """Program node names of one dispatch: counts, order, and the ids it was given."""

    counts: str
    order: str
    ids: str


def _dispatch_behind(node: fx.Node) -> _Dispatch | None:
    """The dispatch whose rows a node's value holds, if it holds dispatched rows."""
    while True:
        name = op_name(node.target)
        if name == "moe_dispatch":
            outputs = {u.args[1]: u.name for u in node.users}
            return _Dispatch(outputs[1], outputs[2], node.args[1].name)  # type: ignore[union-attr]
        if name not in ("grouped_matmul", "swiglu") and name is not None:
            return None
        source = next((a for a in node.args if isinstance(a, fx.Node)), None)
        if source is None:
            return None
        node = source


def choices_needed(program: Program) -> set[str]:
    """Names of the nodes that Expectation reads beside the boundaries themselves."""
    found = {_dispatch_behind(node) for node in program.graph.nodes}
    return {name for d in found if d for name in (d.counts, d.order, d.ids)}
