"""What a rank should hold: the reference value cut by a layout."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx
from torch.distributed.tensor.placement_types import Partial, Placement, Shard

from emulator.layout.placement import Layout, Tokens
from emulator.model.program import Program
from emulator.ops.registry import LOCAL, Mixed, R, op_name
from emulator.runtime.mesh import Mesh
from emulator.runtime.rank_weights import local_shard


@dataclass(frozen=True)
class Expected:
    """value: this rank's real rows of the reference; ids: global token ids of its rows with padding (-1), or None."""

    value: Tensor
    ids: Tensor | None

    def real_rows(self, found: Tensor) -> Tensor:
        """Of the rows that a rank holds, those that are no padding."""
        if self.ids is None or len(self.ids) != len(found):
            return found[: len(self.value)]
        return found[self.ids >= 0]


@dataclass(frozen=True)
class Peer:
    """What a dp rank works on: its tokens and its reference values, by Program node name."""

    tokens: Tokens
    reference: Mapping[str, Tensor]


class Expectation:
    """Cuts reference values to one rank's layouts. peers: of every dp rank, this rank's own among them; experts get
    rows of them all. group_rows: names of values that hold rows of a whole ep group (group_rows_of)."""

    def __init__(
        self, program: Program, mesh: Mesh, rank: int, peers: Sequence[Peer], group_rows: Collection[str] = ()
    ):
        self.mesh, self.rank, self.peers, self.group_rows = mesh, rank, peers, group_rows
        own = peers[mesh.index("dp", rank)]
        self.tokens, self.reference = own.tokens, own.reference
        self.dispatch_of = {node.name: _dispatch_behind(node) for node in program.graph.nodes}

    def of(self, origin: str, layout: Layout) -> Expected | None:
        """What this rank holds of a value in a layout; None where a single rank's share says nothing (partial sums)."""
        value = self.reference[origin]
        if layout.kind == "rows":
            return self._rows(origin, value, layout)
        if layout.kind == "group":
            return self._group(origin) if layout.on("ep") == R else None
        if layout.kind == "weight":
            return Expected(local_shard(value, layout, self.mesh, self.rank), None)
        if layout.kind != "token":
            return Expected(value, None)
        placement, index = layout.on("tp"), self.mesh.index("tp", self.rank)
        ids = torch.arange(self.tokens.real)
        if isinstance(placement, Mixed):
            inner = self._cut(value, placement.value, index)
            return None if inner is None else Expected(self._window(inner, index), self.tokens.ids(index))
        if placement == LOCAL:
            return Expected(self._window(value, index), self.tokens.ids(index))
        cut = self._cut(value, placement, index)
        return None if cut is None else Expected(cut, ids)

    def _cut(self, value: Tensor, placement: Placement, index: int) -> Tensor | None:
        if isinstance(placement, Partial):
            return None
        return value.chunk(self.mesh.tp, placement.dim)[index] if isinstance(placement, Shard) else value

    def _window(self, value: Tensor, index: int) -> Tensor:
        return value[_own_tokens(self.tokens, index)]

    def _group(self, origin: str) -> Expected:
        """The local rows, padding included, of every rank of the ep group."""
        values, ids = [], []
        for rank in self.mesh.members("ep", self.rank):
            peer, index = self.peers[self.mesh.index("dp", rank)], self.mesh.index("tp", rank)
            values.append(peer.reference[origin][_own_tokens(peer.tokens, index)])
            ids.append(peer.tokens.ids(index))
        return Expected(torch.cat(values), torch.cat(ids))

    def _rows(self, origin: str, value: Tensor, layout: Layout) -> Expected | None:
        """Dispatched rows. The reference sorts all tokens' rows by expert. A rank in token-rows holds those of its own
        tokens in that order; in expert-rows those of its experts, by source rank and then in that order."""
        dispatch = self.dispatch_of[origin]
        assert dispatch is not None
        num_experts = self.reference[dispatch.counts].shape[1]
        if origin in self.group_rows:
            return self._group_rows(origin, dispatch) if str(layout) == "expert-rows" else None
        if str(layout) == "expert-rows":
            received = self._received(dispatch)
            if origin == dispatch.counts:
                return Expected(torch.stack([self._held_counts(dispatch, expert) for _, _, expert in received]), None)
            return Expected(torch.cat([peer.reference[origin][picked] for peer, picked, _ in received]), None)
        own = self.peers[self.mesh.index("dp", self.rank)]
        token, expert = _dispatched(dispatch, own)
        whole = layout.on("tp") == R
        mine = torch.ones_like(token, dtype=torch.bool) if whole else self._in_window(token, self.rank, own)
        picked = mine.nonzero().squeeze(1)
        if origin == dispatch.counts:
            return Expected(torch.bincount(expert[picked], minlength=num_experts).unsqueeze(0), None)
        if origin == dispatch.order:
            k = self.reference[dispatch.ids].shape[1]
            if whole:
                return Expected(value[picked], None)
            at = torch.searchsorted(_own_tokens(self.tokens, self.mesh.index("tp", self.rank)), token[picked])
            return Expected(at * k + value[picked] % k, None)
        return Expected(value[picked], None)

    def _group_rows(self, origin: str, dispatch: "_Dispatch") -> Expected | None:
        """Rows for the experts held here, of all tokens of the ep group, which were dispatched together: by expert,
        then by source rank and token."""
        received = self._received(dispatch)
        expert = torch.cat([e for _, _, e in received])
        if origin == dispatch.counts:
            return Expected(self._held_counts(dispatch, expert).unsqueeze(0), None)
        if origin == dispatch.order:  # counts rows of the padded group: its combination is compared instead
            return None
        rows = torch.cat([peer.reference[origin][picked] for peer, picked, _ in received])
        return Expected(rows[torch.argsort(expert, stable=True)], None)

    def _received(self, dispatch: "_Dispatch") -> list[tuple[Peer, Tensor, Tensor]]:
        """(peer, which of its dispatched rows, their experts) of every source in the ep group, for the experts held
        here."""
        held, me = self.reference[dispatch.counts].shape[1] // self.mesh.ep, self.mesh.index("ep", self.rank)
        found = []
        for source in self.mesh.members("ep", self.rank):
            peer = self.peers[self.mesh.index("dp", source)]
            token, expert = _dispatched(dispatch, peer)
            picked = (self._in_window(token, source, peer) & (expert // held == me)).nonzero().squeeze(1)
            found.append((peer, picked, expert[picked]))
        return found

    def _held_counts(self, dispatch: "_Dispatch", expert: Tensor) -> Tensor:
        """Rows for each expert held here."""
        counts = torch.bincount(expert, minlength=self.reference[dispatch.counts].shape[1])
        return counts.chunk(self.mesh.ep)[self.mesh.index("ep", self.rank)]

    def _in_window(self, token: Tensor, rank: int, peer: Peer) -> Tensor:
        return torch.isin(token, _own_tokens(peer.tokens, self.mesh.index("tp", rank)))


def _own_tokens(tokens: Tokens, index: int) -> Tensor:
    """Real tokens of a rank, ascending in every order."""
    ids = tokens.ids(index)
    return ids[ids >= 0]


def _dispatched(dispatch: "_Dispatch", peer: Peer) -> tuple[Tensor, Tensor]:
    """(token, expert) of every row that a dp rank's reference dispatched, in its order."""
    order, ids = peer.reference[dispatch.order], peer.reference[dispatch.ids]
    return order // ids.shape[1], ids.flatten()[order]


def group_rows_of(graph: fx.Graph) -> set[str]:
    """Origins of a rank graph's rows that were dispatched from the tokens of a whole ep group."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        layout = node.meta.get("layout")
        layout = layout[0] if isinstance(layout, tuple) else layout
        if layout is None or layout.kind != "rows":
            continue
        sources = node.all_input_nodes
        starts = op_name(node.target) == "moe_dispatch" and sources[0].meta["layout"].kind == "group"
        if starts or any(source in found for source in sources):
            found.add(node)
    return {node.meta["origin"] for node in found}


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
