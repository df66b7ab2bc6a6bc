"""Runs a rank graph on one rank, node by node: real tensors or, under FakeTensorMode, shapes only."""

import time
from collections.abc import Callable, Collection, Mapping
from typing import Any, Protocol

from torch import Tensor, fx

from emulator.layout.placement import Layout
from emulator.layout.rank_graph import Boundary, RankGraph
from emulator.ops.registry import OPS, op_name
from emulator.ops.transition import TRANSITIONS
from emulator.runtime.board import Board
from emulator.runtime.collectives import Collectives, splits
from emulator.runtime.comm_call import num_bytes
from emulator.runtime.live_memory import LiveMemory
from emulator.runtime.mesh import Mesh
from emulator.runtime.recorder import Recorder
from emulator.runtime.shadow import Shadow
from emulator.runtime.shape_mode import ShapeMode
from emulator.trace.record import TraceWriter


class Observer(Protocol):
    """Looks at values as they appear on a rank; on_value may return a tensor to go on with instead."""

    def on_value(self, node: fx.Node, value: Tensor, ids: Tensor | None) -> Tensor | None: ...
    def on_problem(self, node: fx.Node, message: str) -> None: ...


class Executor:
    """One rank's run of the graph.

    weights: parameter name and layout -> this rank's tensor. inputs: graph inputs by name. shapes: stands in for values
    in shape mode; None runs real tensors, with token-id shadows. capture: names of nodes whose values (and token ids)
    are kept in `captured`.
    """

    def __init__(
        self,
        rank_graph: RankGraph,
        *,
        mesh: Mesh,
        rank: int,
        weights: Callable[[str, Layout], Tensor],
        inputs: Mapping[str, Any],
        collectives: Collectives,
        board: Board,
        writer: TraceWriter,
        observer: Observer | None = None,
        shapes: ShapeMode | None = None,
        phase: str = "prefill",
        capture: Collection[str] = (),
    ):
        self.rank_graph, self.mesh, self.rank = rank_graph, mesh, rank
        self.weights, self.inputs, self.collectives, self.board = weights, inputs, collectives, board
        self.observer, self.shapes = observer, shapes
        self.recorder = Recorder(writer, mesh, rank, rank_graph.tokens, phase)
        self.env: dict[fx.Node, Any] = {}
        self.shadow = Shadow(rank_graph.tokens, collectives, self.recorder.token_ids) if shapes is None else None
        self.frees = last_uses(rank_graph.graph)
        self.edges: dict[str, list[Boundary]] = {}
        for boundary in rank_graph.boundaries:
            self.edges.setdefault(boundary.node, []).append(boundary)
        collectives.on_mixed = self._on_mixed
        collectives.evaluate = shapes.call if shapes is not None else None
        self.node: fx.Node | None = None
        self.memory = LiveMemory()
        self.weight_bytes: dict[tuple[str, Layout], int] = {}
        self.capture = frozenset(capture)
        self.captured: dict[str, tuple[Any, Tensor | None]] = {}

    def run(self) -> Any:
        """Executes every node in order and returns the graph's output."""
        result = None
        for node in self.rank_graph.graph.nodes:
            self.node = node
            if node.op == "output":
                result = fx.map_arg(node.args[0], self.env.__getitem__)
            elif node.op == "placeholder":
                self.env[node] = self.inputs[node.target]
            elif node.op == "get_attr":
                self.env[node] = self.weights(node.target, node.meta["layout"])
                self.weight_bytes[node.target, node.meta["layout"]] = num_bytes(self.env[node])
            else:
                self.env[node] = self._call(node)
            self.memory.appeared(node, self.env.get(node))
            if self.shadow is not None and node.op in ("placeholder", "call_function"):
                self._follow_tokens(node)
            if node.name in self.capture:
                self._keep(node)
            for edge in self.edges.get(node.name, ()):
                self.recorder.boundary(node, self.env[node], edge.module, edge.port)
            for dead in self.frees.get(node, ()):
                self.env.pop(dead, None)
                self.memory.dropped(dead)
                if self.shadow is not None:
                    self.shadow.drop(dead)
        caches = [c for name in ("latent_caches", "index_caches") for c in self.inputs.get(name, ())]
        held = {"weight_bytes": sum(self.weight_bytes.values()), "cache_bytes": sum(num_bytes(c) for c in caches)}
        self.recorder.memory({**self.memory.report(), **held})
        return result

    def _keep(self, node: fx.Node) -> None:
        """A copy: caches are written in place again."""
        ids = self.shadow.ids.get(node) if self.shadow is not None else None
        copied = fx.node.map_aggregate(self.env[node], lambda v: v.clone() if isinstance(v, Tensor) else v)
        self.captured[node.name] = copied, ids

    def _call(self, node: fx.Node) -> Any:
        name = op_name(node.target)
        args = fx.map_arg(node.args, self.env.__getitem__)
        if node.op == "call_method":
            return getattr(args[0], node.target)(*args[1:], **fx.map_arg(node.kwargs, self.env.__getitem__))
        if name is None:
            return self._evaluate(node, args)
        self.board.set_status(self.rank, f"running {name} ({node.name}) of {node.meta['module']}")
        start = time.perf_counter()
        if name == "all_to_all_rows":
            send, receive = self._splits(node, args)
            value = self._move(name, node, (args[0], send, receive, *args[3:]))
            self.recorder.op(node, name, args, value, start, send)
            return value
        if name == "slice_rows" and self.shapes is not None:
            value = self.shapes.own_rows(args[0])
        elif name in ("pad", "unpad", "local_block_table"):
            value = self._evaluate(node, args)
        elif name in ("wait", "regroup"):  # the collective moved its data when it started; the rows are the same rows
            value = args[0]
        else:
            value = self._move(name, node, args) if name in TRANSITIONS else self._compute(name, node, args)
        self.recorder.op(node, name, args, value, start)
        return value

    def _evaluate(self, node: fx.Node, args: tuple, **rank_args: Any) -> Any:
        kwargs = {**fx.map_arg(node.kwargs, self.env.__getitem__), **rank_args}
        if self.shapes is not None:
            return self.shapes.call(node.target, args, kwargs)
        return node.target(*args, **kwargs)

    def _compute(self, name: str, node: fx.Node, args: tuple) -> Any:
        if self.shapes is not None and name == "moe_dispatch":
            return self.shapes.dispatch(*args, of_group=node.args[0].meta["layout"].kind == "group")
        rank_args = OPS[name].rank_args
        if rank_args is None:
            return self._evaluate(node, args)
        weight = next(a for a in node.args if isinstance(a, fx.Node) and a.meta["layout"].kind == "weight")
        axis = next((axis for axis, _ in weight.meta["layout"].placements), None)
        index = self.mesh.index(axis, self.rank) if axis else 0
        return self._evaluate(node, args, **rank_args(self.env[weight], index))

    def _move(self, name: str, node: fx.Node, args: tuple) -> Tensor:
        source = node.args[0]
        ids = self.shadow.ids.get(source) if self.shadow is not None else None
        return self.collectives.call(
            name, *args, node=node.name, module=node.meta["module"], layout=str(source.meta["layout"]), ids=ids
        )

    def _splits(self, node: fx.Node, args: tuple) -> tuple[list[int], list[int]]:
        """Rows sent to and received from each rank of an uneven all_to_all."""
        if self.shapes is not None:
            return self.shapes.splits(node)
        return splits(args[1], args[4]), splits(args[2], args[4])

    def _follow_tokens(self, node: fx.Node) -> None:
        assert self.shadow is not None
        value = self.env[node]
        problem = self.shadow.follow(node, value)
        if self.observer is None:
            return
        if problem:
            self.observer.on_problem(node, problem)
        if isinstance(value, Tensor):
            replacement = self.observer.on_value(node, value, self.shadow.ids.get(node))
            if replacement is not None:
                self.env[node] = replacement

    def _on_mixed(self, message: str) -> None:
        if self.observer is not None and self.node is not None:
            self.observer.on_problem(self.node, message)


def last_uses(graph: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
    """Node -> values whose last use it is; a value without a use dies at once."""
    last: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        last[node] = node
        for argument in node.all_input_nodes:
            last[argument] = node
    frees: dict[fx.Node, list[fx.Node]] = {}
    for node, user in last.items():
        frees.setdefault(user, []).append(node)
    return frees
