"""Layout propagation: what layout every value of a rank graph has, and every rule that is broken on the way."""

import operator
from collections.abc import Mapping
from typing import Any, cast

from torch import fx
from torch.distributed.tensor.placement_types import Partial, Placement

from emulator.layout.placement import Kind, Layout, Tokens, placement_word
from emulator.layout.rank_graph import RankGraph, Violation
from emulator.layout.transition_rules import axis_of, transition_layout
from emulator.ops.foreign import foreign_rule, function_name
from emulator.ops.registry import LOCAL, OPS, Illegal, R, op_name
from emulator.ops.transition import TRANSITIONS


def propagate(rank_graph: RankGraph) -> list[Violation]:
    """Sets meta["layout"] and meta["padded"] (full rows with padding among them) on every node from the layouts of the
    graph's inputs and weights, and returns all violations; where a rule is broken it goes on with the likeliest layout.

    Nothing is taken from a node's name or module, or from what layout it had before.
    """
    violations: list[Violation] = []
    for node in rank_graph.graph.nodes:
        if node.op in ("placeholder", "get_attr"):
            node.meta.setdefault("padded", False)
        elif node.op == "output":
            results = node.all_input_nodes
            node.meta.update(layout=results[0].meta["layout"] if results else Layout("batch"), padded=False)
        else:
            found = infer(node, rank_graph.sizes, rank_graph.tokens)
            node.meta["layout"] = found.layout
            node.meta["padded"] = found.padded
            violations += found.violations
    return violations


class Inferred:
    """layout: of the node's output, a tuple for several. dead_end: no rule says how to go on after a violation."""

    def __init__(self, layout: Any, padded: bool, violations: list[Violation], dead_end: bool):
        self.layout, self.padded, self.violations, self.dead_end = layout, padded, violations, dead_end


def infer(node: fx.Node, sizes: Mapping[str, int], tokens: Tokens) -> Inferred:
    """Layout of a node's output from those of its operands (their meta["layout"])."""
    return _Inference(node, sizes, tokens).run()


class _Inference:
    def __init__(self, node: fx.Node, sizes: Mapping[str, int], tokens: Tokens):
        self.node, self.sizes, self.tokens = node, sizes, tokens
        self.name = op_name(node.target)
        self.operands = [n for n in node.all_input_nodes if isinstance(n.meta["layout"], Layout)]
        self.violations: list[Violation] = []
        self.dead_end = False

    def run(self) -> Inferred:
        node = self.node
        if node.target is operator.getitem:
            source = node.args[0].meta["layout"]  # type: ignore[union-attr]
            layout = source[node.args[1]] if isinstance(source, tuple) else source
            return Inferred(layout, node.args[0].meta.get("padded", False), [], False)  # type: ignore[union-attr]
        if self.name in TRANSITIONS:
            try:
                layout, padded = transition_layout(self.name, node, self.sizes, self.tokens)
            except Illegal as error:
                self._violate(axis_of(self.name, node), error)
                layout, padded = error.fallback
            return Inferred(layout, padded, self.violations, False)
        layout = self._compute()
        if any(n.meta.get("padded") for n in self.operands):
            reason = "padding rows of a gathered value stand among the tokens"
            self._violate("tp", Illegal(reason, "full-token after unpad"))
        return Inferred(layout, False, self.violations, self.dead_end)

    def _compute(self) -> Any:
        """Applies the op's rule on every axis on which an operand is not replicated."""
        if self.name is None:
            rule, kind = foreign_rule(self.node), self._kind()
            positional, named = [n.meta["layout"] for n in self.operands], {}
        else:
            op = OPS[self.name]
            rule, positional = op.rule, []
            kind = cast(Kind, op.output_kind) if op.output_kind else self.operands[0].meta["layout"].kind
            if kind == "token" and any(n.meta["layout"].kind == "group" for n in self.operands):
                kind = "group"
            named = {
                argument: value.meta["layout"]
                for argument, value in zip(op.argument_names, self.node.args)
                if isinstance(value, fx.Node)
            }
            named |= {k: v.meta["layout"] for k, v in self.node.kwargs.items() if isinstance(v, fx.Node)}
        base = Layout(kind, (), self.tokens)
        count = _num_outputs(self.node, self.name)
        per_axis: dict[str, Any] = {}
        for axis, size in self.sizes.items():
            if size == 1 or all(n.meta["layout"].on(axis) == R for n in self.operands):
                continue
            try:
                result = rule(*[v.on(axis) for v in positional], **{k: v.on(axis) for k, v in named.items()})
            except Illegal as error:
                self._violate(axis, error)
                result = error.fallback if error.fallback is not None else self._guess(axis)
                self.dead_end |= error.fallback is None
            per_axis[axis] = result if isinstance(result, tuple) else (result,) * count
        layouts = tuple(base.placed(**{axis: r[i] for axis, r in per_axis.items()}) for i in range(count))
        return layouts if count > 1 else layouts[0]

    def _kind(self) -> Kind:
        """A result is of its first token operand's kind: x @ w is tokens, not weights."""
        kinds = [n.meta["layout"].kind for n in self.operands]
        return next((k for k in kinds if k in ("token", "rows")), kinds[0] if kinds else "batch")

    def _guess(self, axis: str) -> Placement:
        """Goes on as if the operands had been right, so that one mistake is not told again at every later node."""
        found = {n.meta["layout"].on(axis) for n in self.operands if n.meta["layout"].kind in ("token", "rows")}
        if LOCAL in found:
            return LOCAL
        (only,) = found if len(found) == 1 else (R,)
        return R if isinstance(only, Partial) else only

    def _violate(self, axis: str, error: Illegal) -> None:
        shown = [n for n in self.operands if n.meta["layout"].kind != "batch"]
        words = [placement_word(n.meta["layout"].on(axis), n.meta["layout"].kind) for n in shown]
        tokens = {word for word, n in zip(words, shown) if n.meta["layout"].kind == "token"}
        if len(tokens) > 1:  # which is which
            words = [f"{w} ({n.name})" if n.meta["layout"].kind == "token" else w for w, n in zip(words, shown)]
        found = " x ".join(words)
        name = function_name(self.node)
        module = self.node.meta.get("module", "")
        self.violations.append(
            Violation(module, name, f"{found} on {axis}", error.allowed, error.reason, self.node.name)
        )


def _num_outputs(node: fx.Node, name: str | None) -> int:
    if name is not None:
        return len(node.target.default._schema.returns)  # type: ignore[union-attr]
    used = [user.args[1] for user in node.users if user.target is operator.getitem]
    if getattr(node.target, "__name__", node.target) == "split" and isinstance(node.args[1], (list, tuple)):
        return len(node.args[1])
    return 1 + max((i for i in used if isinstance(i, int)), default=0)
