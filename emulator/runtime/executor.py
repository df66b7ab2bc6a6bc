"""Runs a rank graph on one rank, node by node: real tensors or, under FakeTensorMode, shapes only."""

import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from torch import Tensor, fx

from emulator.layout.placement import Layout
from emulator.layout.rank_graph import Boundary, RankGraph
from emulator.ops.registry import OPS, R, op_name
from emulator.ops.transition import TRANSITIONS
from emulator.runtime.board import Board
from emulator.runtime.collectives import Collectives, bytes_sent, splits
from emulator.runtime.mesh import Mesh
from emulator.runtime.shadow import Shadow
from emulator.runtime.shape_mode import ShapeMode
from emulator.trace.record import TraceWriter
from emulator.trace.summary import layer_of


class Observer(Protocol):
    """Looks at values as they appear on a rank; on_value may return a tensor to go on with instead."""

    def on_value(self, node: fx.Node, value: Tensor, ids: Tensor | None) -> Tensor | None: ...
    def on_problem(self, node: fx.Node, message: str) -> None: ...


class Executor:
    """One rank's run of the graph.

    weights: parameter name and layout -> this rank's tensor. inputs: graph inputs by name. shapes: stands in for values in
    shape mode; None runs real tensors, with token-id shadows.
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
    ):
        self.rank_graph, self.mesh, self.rank = rank_graph, mesh, rank
        self.weights, self.inputs, self.collectives, self.board = weights, inputs, collectives, board
        self.writer, self.observer, self.shapes, self.phase = writer, observer, shapes, phase
        self.env: dict[fx.Node, Any] = {}
        self.shadow = Shadow(rank_graph.tokens, collectives) if shapes is None else None
        self.frees = last_uses(rank_graph.graph)
        self.edges: dict[str, list[Boundary]] = {}
        for boundary in rank_graph.boundaries:
            self.edges.setdefault(boundary.node, []).append(boundary)
        collectives.on_mixed = self._on_mixed
        collectives.evaluate = shapes.call if shapes is not None else None
        self.node: fx.Node | None = None
        self.started = time.perf_counter()

    def run(self) -> Any:
        """Executes every node in order and returns the graph's output."""
        result = None
        for node in self.rank_graph.graph.nodes:
            self.node = node
            if node.op == "output":
                result = self.env[node.args[0]]
            elif node.op == "placeholder":
                self.env[node] = self.inputs[node.target]
            elif node.op == "get_attr":
                self.env[node] = self.weights(node.target, node.meta["layout"])
            else:
                self.env[node] = self._call(node)
            if self.shadow is not None and node.op in ("placeholder", "call_function"):
                self._follow_tokens(node)
            self._record_edges(node)
            for dead in self.frees.get(node, ()):
                self.env.pop(dead, None)
                if self.shadow is not None:
                    self.shadow.drop(dead)
        return result

    def _call(self, node: fx.Node) -> Any:
        name = op_name(node.target)
        args = fx.map_arg(node.args, self.env.__getitem__)
        if name is None:
            return self._evaluate(node, args)
        self.board.set_status(self.rank, f"running {name} ({node.name}) of {node.meta['module']}")
        start = time.perf_counter()
        execute = self._transition if name in TRANSITIONS else self._compute
        value = execute(name, node, args)
        self._record(node, name, args, value, start)
        return value

    def _evaluate(self, node: fx.Node, args: tuple, **rank_args: Any) -> Any:
        if self.shapes is not None:
            return self.shapes.call(node.target, args, {**node.kwargs, **rank_args})
        return node.target(*args, **node.kwargs, **rank_args)

    def _compute(self, name: str, node: fx.Node, args: tuple) -> Any:
        if self.shapes is not None and name == "moe_dispatch":
            return self.shapes.dispatch(*args)
        rank_args = OPS[name].rank_args
        if rank_args is None:
            return self._evaluate(node, args)
        weight = next(a for a in node.args if isinstance(a, fx.Node) and a.meta["layout"].kind == "weight")
        axis = next((axis for axis, _ in weight.meta["layout"].placements), None)
        index = self.mesh.index(axis, self.rank) if axis else 0
        return self._evaluate(node, args, **rank_args(self.env[weight], index))

    def _transition(self, name: str, node: fx.Node, args: tuple) -> Tensor:
        if name in ("pad", "unpad"):
            return self._evaluate(node, args)
        source = node.args[0]
        if name == "all_to_all_rows":
            args = (args[0], *self._splits(node, args), *args[3:])
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
        if self.observer is not None:
            if problem:
                self.observer.on_problem(node, problem)
            if isinstance(value, Tensor):
                replacement = self.observer.on_value(node, value, self.shadow.ids.get(node))
                if replacement is not None:
                    self.env[node] = replacement

    def _on_mixed(self, message: str) -> None:
        if self.observer is not None and self.node is not None:
            self.observer.on_problem(self.node, message)

    def _record_edges(self, node: fx.Node) -> None:
        for edge in self.edges.get(node.name, ()):
            value = _describe(self.env[node], node.meta["layout"])
            self.writer.append(
                {
                    "kind": "boundary",
                    "node": node.name,
                    "module": edge.module,
                    "port": edge.port,
                    "value": node.meta["layout"].kind,
                    "layer": layer_of(edge.module),
                    "phase": self.phase,
                    "window": self._window(node.meta["layout"]),
                    **value,
                }
            )

    def _window(self, layout: Layout) -> list[int] | None:
        if layout.kind != "token" or layout.on("tp") == R:
            return None
        return list(self.rank_graph.tokens.window(self.mesh.index("tp", self.rank)))

    def _record(self, node: fx.Node, name: str, args: tuple, value: Any, start: float) -> None:
        meta, end = node.meta, time.perf_counter()
        nodes = [(n, v) for n, v in zip(node.args, args) if isinstance(n, fx.Node)]
        outputs = value if isinstance(value, tuple) else (value,)
        layouts = meta["layout"] if isinstance(meta["layout"], tuple) else (meta["layout"],) * len(outputs)
        attrs, axis, sent = self._attrs(node, name), None, 0
        if name in TRANSITIONS and name not in ("pad", "unpad"):
            axis, size = (node.args[3], node.args[4]) if name == "all_to_all_rows" else (node.args[1], node.args[2])
            kept = 0
            if name == "all_to_all_rows":
                sends, _ = self._splits(node, args)
                kept, attrs["leg"] = sends[self.mesh.index(str(axis), self.rank)], str(layouts[0])
                attrs["splits"] = sends
            sent = bytes_sent(name, args[0], size, kept)
        self.writer.append(
            {
                "kind": "op",
                "node": node.name,
                "op": "all_to_all" if name == "all_to_all_rows" else name,
                "module": meta["module"],
                "layer": layer_of(meta["module"]),
                "phase": self.phase,
                "group": axis,
                "inputs": [_describe(v, n.meta["layout"]) for n, v in nodes if isinstance(v, Tensor)],
                "outputs": [_describe(v, x) for v, x in zip(outputs, layouts)],
                "attrs": attrs,
                "window": self._window(layouts[0]),
                "traffic": meta["traffic"],
                "bytes": sent,
                "start": round(start - self.started, 7),
                "duration": round(end - start, 7),
            }
        )

    def _attrs(self, node: fx.Node, name: str) -> dict[str, Any]:
        if name in TRANSITIONS:
            names = {"pad": ("dim", "length"), "unpad": ("dim", "length"), "all_to_all": ("", "", "dim", "concat_dim")}
            names.update({n: ("", "", "dim") for n in ("all_gather", "reduce_scatter", "slice")})
            return {k: v for k, v in zip(names.get(name, ()), node.args[1:]) if k}
        return {
            k: v
            for k, v in zip(OPS[name].argument_names, node.args)
            if not isinstance(v, (fx.Node, list, tuple)) and v is not None
        }


def _describe(value: Tensor, layout: Layout) -> dict[str, Any]:
    return {"shape": list(value.shape), "dtype": str(value.dtype).removeprefix("torch."), "layout": str(layout)}


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
