"""Tokens on their way to their experts and back: rows of an ep group, and rows that all_to_all deals out."""

from collections.abc import Mapping

from torch import fx
from torch.distributed.tensor.placement_types import Placement

from emulator.errors import LayoutError, UsageError
from emulator.layout.moves import Moves, Value, Wanted
from emulator.layout.placement import Kind, Tokens
from emulator.layout.plan import Plan
from emulator.ops.registry import LOCAL, R


class ExpertMoves(Moves):
    """values: by Program node."""

    def __init__(self, plan: Plan, sizes: Mapping[str, int], tokens: Tokens):
        super().__init__(plan, sizes, tokens)
        self.values: dict[fx.Node, Value] = {}

    def convert(self, value: Value, wanted: Wanted | None, module: str) -> Value:
        if wanted is None:
            return value
        if {wanted[0], value.layout.kind} == {"token", "group"}:
            if wanted[1].get("tp") == R:
                return self._regroup(value, module)
            return self._convert_group(value, wanted[0], module)
        if wanted[0] == value.layout.kind == "rows":
            return self._convert_rows(value, wanted[1], module)
        return super().convert(value, wanted, module)

    def _regroup(self, value: Value, module: str) -> Value:
        """Full rows taken as those of the ep group: no communication."""
        value = self.convert(value, ("token", {"tp": R}), module)
        key = (value.node, "group", R)
        if self.sizes["ep"] != self.sizes["tp"]:
            found = f"ep {self.sizes['ep']} is not tp {self.sizes['tp']}"
            raise UsageError(f"plan {self.plan.name}: {module} takes full tokens as those of its ep group, but {found}")
        if key not in self.converted:
            node = value.node
            if self.tokens.rearranged:
                node = self.insert("pad", (node, 0, self.tokens.padded, *self.tokens.arrangement), value.node, False)
            node = self.insert("regroup", (node, "ep", self.sizes["ep"]), value.node, True)
            self.converted[key] = Value(node, node.meta["layout"])
        self.request(self.converted[key].node, module)
        return self.converted[key]

    def _convert_group(self, value: Value, kind: Kind, module: str) -> Value:
        """Local rows to those of the whole ep group, and partial sums of these back to local rows."""
        tokens, size = self.tokens, self.sizes["ep"]
        if kind == "group":
            value = self.convert(value, ("token", {"tp": LOCAL}), module)
        if size == 1:
            return value
        key = (value.node, "ep", R if kind == "group" else LOCAL)
        if key not in self.converted:
            alone = self.sizes["tp"] == 1 and tokens.padded != tokens.real  # no tp cut has padded these rows
            node = value.node
            if kind == "group":
                if alone:
                    node = self.insert("pad", (node, 0, tokens.padded), value.node, False)
                node = self.insert("all_gather", (node, "ep", size, 0), value.node, True)
            else:
                node = self.insert("reduce_scatter", (node, "ep", size, 0), value.node, not alone)
                if alone:
                    node = self.insert("unpad", (node, 0, tokens.real), value.node, True)
            self.converted[key] = Value(node, node.meta["layout"])
        self.request(self.converted[key].node, module)
        return self.converted[key]

    def _convert_rows(self, value: Value, wanted: dict[str, Placement], module: str) -> Value:
        """Dispatched rows between the ranks of their tokens and the ranks of their experts: all_to_all on ep."""
        size, target = self.sizes["ep"], wanted["ep"]
        if size == 1 or value.layout.on("ep") == target:
            return value
        key = (value.node, "ep", target)
        if key not in self.converted:
            assert value.dispatch is not None
            counts = next(u for u in value.dispatch.users if u.args[1] == 1)
            if target == LOCAL and self._dispatches_group(value.dispatch):
                return self._slice_rows(value, counts, key, module)
            if value.layout.on("tp") == R and self.sizes["tp"] > 1 and target == LOCAL:
                raise LayoutError(
                    f"plan {self.plan.name}: {module} wants expert-rows of rows that every tp rank dispatched: "
                    "each row would reach its expert tp times (allowed: dispatch on local-token)"
                )
            token_counts = self.values[counts].node
            if value.node is token_counts:
                # [1, E] -> [S, X]: how many rows each source sends to each expert held here
                node = self.insert("all_to_all", (value.node, "ep", size, 1, 0), value.node, True)
                node.meta["traffic"] = "metadata"
            else:
                expert_counts = self._convert_rows(self.values[counts], {"tp": R, "ep": LOCAL}, module).node
                send, receive = (token_counts, expert_counts) if target == LOCAL else (expert_counts, token_counts)
                node = self.insert("all_to_all_rows", (value.node, send, receive, "ep", size), value.node, True)
            self.converted[key] = Value(node, node.meta["layout"], value.dispatch)
        self.request(self.converted[key].node, module)
        return self.converted[key]

    def _dispatches_group(self, dispatch: fx.Node) -> bool:
        rows = self.values[dispatch].node.args[0]
        return rows.meta["layout"].kind == "group"  # type: ignore[union-attr]

    def _slice_rows(self, value: Value, counts: fx.Node, key: tuple[fx.Node, str, Placement], module: str) -> Value:
        """Of the group's rows, which every rank dispatched, those of the experts held here: no communication."""
        size, count_node = self.sizes["ep"], self.values[counts].node
        if value.node is count_node:
            node = self.insert("slice", (value.node, "ep", size, 1), value.node, True)
            node.meta["traffic"] = "metadata"
        else:
            node = self.insert("slice_rows", (value.node, count_node, "ep", size), value.node, True)
        self.converted[key] = Value(node, node.meta["layout"], value.dispatch)
        self.request(node, module)
        return self.converted[key]
