"""From what a rank executes to trace records (schema in trace/record.py)."""

import time
from typing import Any

from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor

from emulator.layout.placement import Layout, Tokens
from emulator.layout.plan import layer_of
from emulator.ops.registry import OPS, R
from emulator.ops.transition import COLLECTIVES, TRANSITIONS
from emulator.runtime.collectives import bytes_sent
from emulator.runtime.mesh import Mesh
from emulator.trace.record import TraceWriter

_TRANSITION_ATTRS = {
    "pad": ("dim", "length", "order", "parts"),
    "unpad": ("dim", "length", "order", "parts"),
    "broadcast": ("", "", "owner"),
    "all_to_all": ("", "", "dim", "concat_dim"),
    "all_gather": ("", "", "dim"),
    "reduce_scatter": ("", "", "dim"),
    "slice": ("", "", "dim"),
}


class Recorder:
    """Writes one rank's records."""

    def __init__(self, writer: TraceWriter, mesh: Mesh, rank: int, tokens: Tokens, phase: str):
        self.writer, self.mesh, self.rank, self.tokens, self.phase = writer, mesh, rank, tokens, phase
        self.started = time.perf_counter()

    def op(
        self, node: fx.Node, name: str, args: tuple, value: Any, start: float, splits: list[int] | None = None
    ) -> None:
        """One executed op. args: the node's arguments as values; splits: rows sent to each rank of an uneven
        all_to_all."""
        layouts = _layouts(node)
        outputs = value if isinstance(value, tuple) else (value,)
        inputs = [(n, v) for n, v in zip(node.args, args) if isinstance(n, fx.Node) and isinstance(v, Tensor)]
        attrs, axis, sent = _attrs(node, name), None, 0
        if splits is not None:
            axis, size = node.args[3], node.args[4]
            attrs.update(leg=str(layouts[0]), splits=splits)
            sent = bytes_sent(name, args[0], size, splits[self.mesh.index(axis, self.rank)])
        elif name in COLLECTIVES or name == "slice":
            axis, size = node.args[1], node.args[2]
            sent = bytes_sent(name, args[0], size)
        elif name == "grouped_matmul" and not isinstance(args[2], FakeTensor):
            attrs["expert_rows"] = args[2].sum(0).tolist()  # of each expert held here
        if "async" in node.meta and name in COLLECTIVES:
            attrs["async"] = {"start": node.name, "wait": node.meta["async"]}
        if name == "wait":
            attrs["of"] = node.args[0].name
        self._append(
            node,
            start,
            op="all_to_all" if name == "all_to_all_rows" else name,
            group=axis,
            inputs=[describe(v, n.meta["layout"]) for n, v in inputs],
            outputs=[describe(v, layout) for v, layout in zip(outputs, layouts)],
            attrs=attrs,
            traffic=node.meta["traffic"],
            bytes=sent,
        )

    def token_ids(self, node: fx.Node, sent: Tensor, received: Tensor, start: float) -> None:
        """Token ids that travelled beside a value: verification traffic."""
        axis, size = node.args[1], node.args[2]
        self._append(
            node,
            start,
            op="all_gather",
            group=axis,
            inputs=[describe(sent, node.args[0].meta["layout"])],
            outputs=[describe(received, node.meta["layout"])],
            attrs={"dim": 0},
            traffic="verification",
            bytes=bytes_sent("all_gather", sent, size),
        )

    def boundary(self, node: fx.Node, value: Tensor, module: str, port: str) -> None:
        """A value that crosses a module's edge."""
        layout = node.meta["layout"]
        self.writer.append(
            {
                "kind": "boundary",
                "node": node.name,
                "module": module,
                "port": port,
                "value": layout.kind,
                "layer": layer_of(module),
                "phase": self.phase,
                "window": self._window(layout),
                **describe(value, layout),
            }
        )

    def memory(self, report: dict[str, Any]) -> None:
        """The peak of what the rank held in this step (LiveMemory.report)."""
        self.writer.append({"kind": "memory", "phase": self.phase, **report})

    def _append(self, node: fx.Node, start: float, **fields: Any) -> None:
        module = node.meta["module"]
        self.writer.append(
            {
                "kind": "op",
                "node": node.name,
                "module": module,
                "layer": layer_of(module),
                "phase": self.phase,
                **fields,
                "window": self._window(_layouts(node)[0]),
                "start": round(start - self.started, 7),
                "duration": round(time.perf_counter() - start, 7),
            }
        )

    def _window(self, layout: Layout) -> list[int] | None:
        if layout.kind != "token" or layout.on("tp") == R or self.tokens.order != "contiguous":
            return None
        return list(self.tokens.window(self.mesh.index("tp", self.rank)))


def describe(value: Tensor, layout: Layout) -> dict[str, Any]:
    """{shape, dtype, layout} of a value."""
    return {"shape": list(value.shape), "dtype": str(value.dtype).removeprefix("torch."), "layout": str(layout)}


def _layouts(node: fx.Node) -> tuple[Layout, ...]:
    layout = node.meta["layout"]
    return layout if isinstance(layout, tuple) else (layout,)


def _attrs(node: fx.Node, name: str) -> dict[str, Any]:
    """Static arguments that matter for cost."""
    if name in TRANSITIONS:
        return {k: v for k, v in zip(_TRANSITION_ATTRS.get(name, ()), node.args[1:]) if k}
    named = zip(OPS[name].argument_names, node.args)
    return {k: v for k, v in named if not isinstance(v, (fx.Node, list, tuple)) and v is not None}
