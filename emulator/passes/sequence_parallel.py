"""Sequence parallelism as a rewrite of rank graphs (RFC sections 3.2 and 3.3): partial sums become local-token rows
before every norm, residual chains stay local, and full-token rows come back only where a consumer needs them.

It reads layouts, never names: values are traced back to where they were computed, the token moves between are dropped,
and each consumer gets the layout it had, except that residual work is done on local tokens.
"""

import operator
from collections.abc import Iterator

from torch import fx
from torch.distributed.tensor.placement_types import Partial, Placement

from emulator.layout.annotate import boundaries, common_ancestor
from emulator.layout.placement import Layout
from emulator.layout.propagation import infer, propagate
from emulator.layout.rank_graph import RankGraph
from emulator.layout.transitions import insert_transition, transition_steps
from emulator.ops.foreign import is_row_wise
from emulator.ops.registry import LOCAL, OPS, R, op_name

_AXIS = "tp"  # token rows are split on this axis; a reduction keeps the axis it has
_TOKEN_MOVES = ("all_reduce", "reduce_scatter", "all_gather", "slice", "pad", "unpad")


def sequence_parallel(rank_graph: RankGraph) -> RankGraph:
    """The same program with its residual stream on local tokens. Running it again changes nothing.

    - all_reduce before residual work (norms, adds) becomes reduce_scatter, on the all_reduce's own group;
    - residual work on complete values gets a token slice, moved up through replicated linears as far as layouts allow
      (an o_proj with a whole weight runs on local tokens, attention does not);
    - a value that is gathered only to be cut again (the wrapper around MoE) stays local;
    - what needs full tokens gets one all_gather, of just the value it reads.
    """
    if rank_graph.sizes[_AXIS] == 1:  # one rank holds every token: nothing to cut, and padding is the experts' business
        return rank_graph
    propagate(rank_graph)
    return _Rewrite(rank_graph).run()


class _Rewrite:
    def __init__(self, rank_graph: RankGraph):
        self.old, self.size = rank_graph, rank_graph.sizes[_AXIS]
        self.graph = fx.Graph()
        self.values: dict[fx.Node, fx.Node] = {}
        self.converted: dict[tuple[fx.Node, Placement], fx.Node] = {}
        self.requesters: dict[fx.Node, list[str]] = {}
        self.local = self._residual_work()
        self._move_up()

    # -- what runs on local tokens ------------------------------------------------------------------------------------

    def _residual_work(self) -> set[fx.Node]:
        """Row-wise nodes that take partial sums or join two streams of whole rows, and all that share their values."""
        nodes = [n for n in self.old.graph.nodes if _is_residual_work(n)]
        work = {n for n in nodes if self._sums_or_joins(n)}
        while True:
            values = {_source(o) for n in work for o in _token_operands(n)}
            more = {n for n in nodes for s in map(_source, _token_operands(n)) if s in values or _maker(s) in work}
            if more <= work:
                return work
            work |= more

    def _sums_or_joins(self, node: fx.Node) -> bool:
        placements = [_source(o).meta["layout"].on(_AXIS) for o in _token_operands(node)]
        return any(isinstance(p, Partial) for p in placements) or placements.count(R) > 1

    def _move_up(self) -> None:
        """Residual work on whole values: the cut moves up through the nodes that may as well run on local tokens."""
        waiting = [_source(o) for n in self.old.graph.nodes if n in self.local for o in _token_operands(n)]
        while waiting:
            node = _maker(waiting.pop())
            if node not in self.local and self._may_be_local(node):
                self.local.add(node)
                waiting += [_source(o) for o in _token_operands(node)]

    def _may_be_local(self, node: fx.Node) -> bool:
        if node.op != "call_function" or not _is_token(node) or node.meta["layout"].on(_AXIS) != R:
            return False
        sources = [_source(o) for o in _token_operands(node)]
        if not sources or any(s.op == "placeholder" for s in sources):  # the batch itself stays whole
            return False
        return all(c in self.local for c in _consumers(node)) and _runs_on_local_tokens(node, self.old)

    # -- the new graph ------------------------------------------------------------------------------------------------

    def run(self) -> RankGraph:
        for node in self.old.graph.nodes:
            if not _is_token_move(node):
                self._copy(node)
        for node, modules in self.requesters.items():
            node.meta["module"] = common_ancestor(modules)
        result = RankGraph(self.graph, self.old.sizes, self.old.tokens, self.old.plan)
        result.violations = propagate(result)
        result.boundaries = boundaries(self.graph)
        return result

    def _copy(self, node: fx.Node) -> None:
        new = self.graph.node_copy(node, lambda operand: self._operand(operand, node))
        if node.op == "call_function":
            found = infer(new, self.old.sizes, self.old.tokens)
            new.meta.update(layout=found.layout, padded=found.padded)
        self.values[node] = new

    def _operand(self, operand: fx.Node, consumer: fx.Node) -> fx.Node:
        """The operand as the consumer wants it: local for what runs on local tokens, else as it was."""
        source = _source(operand)
        if not _is_token(operand):
            return self.values[source]
        wanted = LOCAL if consumer in self.local else operand.meta["layout"].on(_AXIS)
        return self._convert(self.values[source], wanted, consumer, source)

    def _convert(self, value: fx.Node, wanted: Placement, consumer: fx.Node, source: fx.Node) -> fx.Node:
        placement = value.meta["layout"].on(_AXIS)
        if placement == wanted:
            return value
        if isinstance(placement, Partial) and wanted == R and any(c in self.local for c in _consumers(source)):
            value = self._convert(value, LOCAL, consumer, source)  # its rows are reduced once, for all consumers
            return self._convert(value, R, consumer, source)
        if (value, wanted) not in self.converted:
            self.converted[value, wanted] = self._insert(value, wanted, source)
        node = self.converted[value, wanted]
        module = self._belongs_to(placement, consumer, source)
        inserted = node
        while inserted is not value:
            self.requesters.setdefault(inserted, []).append(module)
            inserted = inserted.args[0]  # type: ignore[assignment]
        return node

    def _insert(self, value: fx.Node, wanted: Placement, source: fx.Node) -> fx.Node:
        tokens, placement = self.old.tokens, value.meta["layout"].on(_AXIS)
        reduction = next((u for u in source.users if op_name(u.target) in ("all_reduce", "reduce_scatter")), None)
        axis = reduction.args[1] if reduction is not None and isinstance(placement, Partial) else _AXIS
        steps = transition_steps(placement, wanted, str(axis), self.size, tokens)
        assert steps is not None, f"{value.name}: no transition from {placement} to {wanted}"
        node = value
        for step in steps:
            node = insert_transition(
                self.graph, step.op, (node, *step.args), value, holds_value=step is steps[-1],
                sizes=self.old.sizes, tokens=tokens,
            )  # fmt: skip
            node.meta["module"] = ""
        return node

    def _belongs_to(self, placement: Placement, consumer: fx.Node, source: fx.Node) -> str:
        """Reductions complete their producer's value, gathers serve their consumers; a cut serves its consumer, unless
        several modules share it: then it is how the producer's value leaves."""
        shared = len({c.meta["module"] for c in _consumers(source)}) > 1
        by_producer = isinstance(placement, Partial) or (placement == R and shared and source.op != "placeholder")
        return _maker(source).meta["module"] if by_producer else consumer.meta["module"]


def _is_residual_work(node: fx.Node) -> bool:
    if node.op != "call_function" or not _token_operands(node):
        return False
    name = op_name(node.target)
    return OPS[name].residual_work if name in OPS else name is None and is_row_wise(node)


def _runs_on_local_tokens(node: fx.Node, rank_graph: RankGraph) -> bool:
    """Whether the node's rule allows local-token operands in place of its full-token ones, with a local result."""
    graph, operands = fx.Graph(), {}
    for operand in node.all_input_nodes:
        operands[operand] = graph.placeholder(operand.name)
        layout = operand.meta["layout"]
        operands[operand].meta["layout"] = layout.placed(tp=LOCAL) if _is_token(operand) else layout
    found = infer(graph.node_copy(node, operands.__getitem__), rank_graph.sizes, rank_graph.tokens)
    return not found.violations and isinstance(found.layout, Layout) and found.layout.on(_AXIS) == LOCAL


def _is_token(node: fx.Node) -> bool:
    layout = node.meta["layout"]
    return isinstance(layout, Layout) and layout.kind == "token"


def _token_operands(node: fx.Node) -> list[fx.Node]:
    return [n for n in node.all_input_nodes if _is_token(n)]


def _is_token_move(node: fx.Node) -> bool:
    """A transition between full-token, local-token and partial: those that the rewrite lays anew."""
    name = op_name(node.target)
    if name not in _TOKEN_MOVES or not _is_token(node):
        return False
    if name in ("pad", "unpad"):
        return node.args[1] == 0
    return node.args[1] == _AXIS and (name == "all_reduce" or node.args[3] == 0)


def _source(node: fx.Node) -> fx.Node:
    """Where a value was computed, behind the moves of its tokens."""
    while _is_token_move(node):
        node = node.args[0]  # type: ignore[assignment]
    return node


def _maker(value: fx.Node) -> fx.Node:
    """The op that made a value, behind getitem."""
    return value.args[0] if value.target is operator.getitem else value  # type: ignore[return-value]


def _consumers(value: fx.Node) -> Iterator[fx.Node]:
    """The nodes that use a value, through the moves of its tokens."""
    for user in value.users:
        if _is_token_move(user):
            yield from _consumers(user)
        else:
            yield user
