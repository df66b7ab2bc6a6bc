"""Which tokens a rank's rows are: a vector of global token ids (padding = -1) beside every token value.

Ids move by the transitions that move the values, as verification traffic. They tell one full row from one local row,
and a rank's own window from another's, where shapes cannot.
"""

import time
from collections.abc import Callable

import torch
from torch import Tensor, fx

from emulator.layout.placement import Layout, Tokens
from emulator.ops.registry import LOCAL, op_name
from emulator.ops.transition import TRANSITIONS
from emulator.runtime.collectives import Collectives


class Shadow:
    """Token ids of the values alive on one rank."""

    def __init__(
        self, tokens: Tokens, collectives: Collectives, on_traffic: Callable[[fx.Node, Tensor, Tensor, float], None]
    ):
        """on_traffic(node, sent, received, start) is called for ids that travelled between ranks."""
        self.tokens, self.collectives, self.on_traffic = tokens, collectives, on_traffic
        self.ids: dict[fx.Node, Tensor] = {}

    def drop(self, node: fx.Node) -> None:
        self.ids.pop(node, None)

    def follow(self, node: fx.Node, value: object) -> str | None:
        """Derives the ids of a node's value; returns what is wrong with them, or None."""
        layout = node.meta["layout"]
        if isinstance(layout, tuple):
            layout = layout[0]
        if layout.kind not in ("token", "group"):
            return None
        problem = None
        if node.op == "placeholder":
            self.ids[node] = self._given(layout)
        elif op_name(node.target) in TRANSITIONS:
            self.ids[node] = self._move(node, layout)
        else:
            known = [self.ids[n] for n in node.all_input_nodes if n in self.ids]
            if not known:
                return None
            self.ids[node] = known[0]
            if any(not torch.equal(known[0], other) for other in known[1:]):
                problem = "rows of different tokens meet: " + " and ".join(describe_ids(k) for k in known)
        if isinstance(value, Tensor) and value.shape[0] != self.ids[node].shape[0]:
            problem = f"{value.shape[0]} rows, but their tokens are {describe_ids(self.ids[node])}"
        return problem

    def _given(self, layout: Layout) -> Tensor:
        """Tokens of a graph input: the batch, or this rank's window of it."""
        if layout.on("tp") == LOCAL:
            return self.tokens.ids(self.collectives.mesh.index("tp", self.collectives.rank))
        return torch.arange(self.tokens.real)

    def _move(self, node: fx.Node, layout: Layout) -> Tensor:
        source, *args = node.args
        assert isinstance(source, fx.Node)
        ids, name = self.ids[source], op_name(node.target)
        names = {"node": node.name, "module": node.meta["module"], "layout": "token ids"}
        if name == "pad":
            return torch.ops.emulator.pad(ids, *args) if args[0] == 0 else ids
        if name == "unpad":
            return torch.ops.emulator.unpad(ids, *args) if args[0] == 0 else ids
        if name in ("all_reduce", "wait", "regroup"):
            return ids
        axis, size, *dims = args
        if name in ("slice", "reduce_scatter"):  # a reduction leaves each rank its block of the (common) rows
            cut, joined = dims[0] == 0, False
        elif name == "all_gather":
            cut, joined = False, dims[0] == 0
        else:
            assert name == "all_to_all", name
            cut, joined = dims[0] == 0, dims[1] == 0
        if cut:
            return self.collectives.call("slice", ids, axis, size, 0, **names)
        if not joined:
            return ids
        start = time.perf_counter()
        gathered = self.collectives.call("all_gather", ids, axis, size, 0, **names)
        self.on_traffic(node, ids, gathered, start)
        return gathered


def describe_ids(ids: Tensor) -> str:
    """Token ids for people: runs as start..end (end excluded), padding by count."""
    real = ids[ids >= 0].tolist()
    runs: list[list[int]] = []
    for token in real:
        if runs and token == runs[-1][1]:
            runs[-1][1] += 1
        else:
            runs.append([token, token + 1])
    text = ", ".join(f"{a}..{b}" for a, b in runs[:4]) + (", ..." if len(runs) > 4 else "")
    num_pads = len(ids) - len(real)
    return (text or "none") + (f" + {num_pads} padding" if num_pads else "")
