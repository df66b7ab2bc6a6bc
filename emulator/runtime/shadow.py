"""Which tokens a rank's rows are: a vector of global token ids (padding = -1) beside every token value.

Ids move by the transitions that move the values, as verification traffic. They tell one full row from one local row,
and a rank's own window from another's, where shapes cannot.
"""

import torch
from torch import Tensor, fx

from emulator.layout.placement import Layout, Tokens
from emulator.ops.registry import op_name
from emulator.ops.transition import TRANSITIONS, pad_rows
from emulator.runtime.collectives import Collectives


class Shadow:
    """Token ids of the values alive on one rank."""

    def __init__(self, tokens: Tokens, collectives: Collectives):
        self.tokens, self.collectives = tokens, collectives
        self.ids: dict[fx.Node, Tensor] = {}

    def drop(self, node: fx.Node) -> None:
        self.ids.pop(node, None)

    def follow(self, node: fx.Node, value: object) -> str | None:
        """Derives the ids of a node's value; returns what is wrong with them, or None."""
        layout = node.meta["layout"]
        if isinstance(layout, tuple):
            layout = layout[0]
        if layout.kind != "token":
            return None
        problem = None
        if node.op == "placeholder":
            self.ids[node] = torch.arange(self.tokens.real)
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

    def _move(self, node: fx.Node, layout: Layout) -> Tensor:
        source, *args = node.args
        assert isinstance(source, fx.Node)
        ids, name = self.ids[source], op_name(node.target)
        names = {"node": node.name, "module": node.meta["module"], "layout": "token ids"}
        if name == "pad":
            return pad_rows(ids, 0, args[1]) if args[0] == 0 else ids
        if name == "unpad":
            return ids[: args[1]] if args[0] == 0 else ids
        if name == "all_reduce":
            return ids
        if name in ("slice", "reduce_scatter"):  # a reduction leaves each rank its block of the (common) rows
            axis, size, dim = args
            return self.collectives.call("slice", ids, axis, size, 0, **names) if dim == 0 else ids
        if name == "all_gather":
            axis, size, dim = args
            return self.collectives.call("all_gather", ids, axis, size, 0, **names) if dim == 0 else ids
        assert name == "all_to_all", name
        axis, size, split_dim, concat_dim = args
        if split_dim == 0:
            return self.collectives.call("slice", ids, axis, size, 0, **names)
        return self.collectives.call("all_gather", ids, axis, size, 0, **names) if concat_dim == 0 else ids


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
