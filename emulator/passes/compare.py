"""Compares two rank graphs node for node: what each node computes, from what, in which layout and for which module.

Names and the order of independent nodes do not count; the order of communication does. Nodes are numbered by what they
compute, from the inputs on, so that equal nodes of both graphs get equal numbers; where a node of one graph has no
equal in the other, the graphs part.
"""

import operator
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from emulator.layout.rank_graph import RankGraph
from emulator.ops.registry import op_name
from emulator.passes.effects import communicates, schema_of, written
from emulator.passes.repetition import expand

_FUSED_NORMS = ("add_rms_norm", "add_rms_norm2")


@dataclass(frozen=True)
class Difference:
    """The first place where two rank graphs part.

    position: index of node_a in the first graph after expansion, of node_b in the second where the first has no such
    node (node_a None; node_b is None where the second has none). module: of that node. what: what differs.
    """

    position: int
    node_a: str | None
    node_b: str | None
    module: str
    what: str

    def __str__(self) -> str:
        nodes = f"{self.node_a or 'nothing'} in the first graph, {self.node_b or 'nothing'} in the second"
        if self.node_a == self.node_b:
            nodes = f"{self.node_a} in both graphs"
        return f"{self.module or 'outside all modules'}: node {self.position}, {nodes}: {self.what}"


@dataclass(eq=False)
class _Item:
    """One computation. arguments: by name; operands are _Items. A fused norm is two items of one fx node."""

    node: fx.Node
    position: int
    op: Any
    arguments: dict[str, Any]
    layout: Any
    module: str | None
    talks: bool = False
    number: int = field(default=-1)

    @property
    def fused(self) -> bool:
        return op_name(self.node.target) in _FUSED_NORMS

    def described(self) -> str:
        """add_rms_norm2_4[1] (add of model.layers.2.input_layernorm)"""
        name = self.op if isinstance(self.op, str) else getattr(self.op, "__name__", str(self.op))
        word = {"get_attr": "weight", "placeholder": "input"}.get(name, name.rpartition("::")[2])
        output = f"[{int(self.op == 'emulator::add')}]" if self.fused else ""
        return f"{self.node.name}{output} ({word} of {self.node.meta.get('module', '') or 'no module'})"

    def argument_word(self, name: str) -> str:
        """What a user's graph calls the argument."""
        return {"x": "residual", "y": "x"}[name] if self.fused and self.op == "emulator::add" else name


def first_difference(a: RankGraph, b: RankGraph, *, modules: bool = True, layouts: bool = True) -> Difference | None:
    """The first difference of two rank graphs after expansion of their regions, in the order of `a`; None if equal.

    Compared are op, constant arguments (defaults filled in), operands, writes to the same operand and their order,
    order of communication, and unless switched off layouts and modules. add_rms_norm(2)(x, r) equals add(r, x)
    followed by rms_norm; the module of an add before a norm does not count, because a fused norm names only one.
    """
    graph_a, graph_b = expand(a), expand(b)
    items_a, items_b = _items(graph_a.graph), _items(graph_b.graph)
    table: dict[Any, int] = {}
    for items in (items_a, items_b):
        _number(items, table, modules, layouts)
    in_a, in_b = {i.number for i in items_a}, {i.number for i in items_b}
    only_a = [i for i in items_a if i.number not in in_b]
    only_b = [i for i in items_b if i.number not in in_a]
    if only_a:
        return _explain(only_a, only_b, modules, layouts)
    if only_b:
        extra = only_b[0]
        what = f"only the second graph has {extra.described()} of {_named(extra)}"
        return Difference(extra.position, None, extra.node.name, extra.node.meta.get("module", ""), what)
    return _order_of_communication(items_a, items_b)


def _items(graph: fx.Graph) -> list[_Item]:
    items: list[_Item] = []
    made: dict[fx.Node, Any] = {}

    def add(node: fx.Node, position: int, op: Any, arguments: dict[str, Any], layout: Any) -> _Item:
        item = _Item(node, position, op, arguments, layout, node.meta.get("module", ""), communicates(node))
        items.append(item)
        return item

    for position, node in enumerate(graph.nodes):
        layout = node.meta.get("layout")
        arguments = {k: _resolved(v, made) for k, v in _arguments(node).items()}
        if node.op in ("placeholder", "get_attr"):
            made[node] = add(node, position, node.op, {"name": node.target}, layout)
        elif node.op == "output":
            add(node, position, "output", arguments, layout)
        elif op_name(node.target) in _FUSED_NORMS:
            layouts = layout if isinstance(layout, tuple) else (layout, layout)
            sum_of = {"x": arguments["residual"], "y": arguments["x"]}
            total = add(node, position, "emulator::add", sum_of, layouts[1])
            norm_of = {"x": total, "weight": arguments["weight"], "eps": arguments["eps"]}
            normed = add(node, position, "emulator::rms_norm", norm_of, layouts[0])
            made[node] = (normed, total) if op_name(node.target) == "add_rms_norm2" else normed
        elif node.target is operator.getitem and isinstance(made[node.args[0]], tuple):
            made[node] = made[node.args[0]][node.args[1]]
        else:
            made[node] = add(node, position, _operation(node.target), arguments, layout)
    for item in items:
        if item.op == "emulator::rms_norm" and item.arguments["x"].op == "emulator::add":
            item.arguments["x"].module = None
    return items


def _operation(target: Any) -> Any:
    """One name for torch.ops.ns.op and its default overload; other functions are their own name."""
    schema = schema_of(target)
    if schema is None:
        return target
    return f"{schema.name}.{schema.overload_name}" if schema.overload_name else schema.name


def _arguments(node: fx.Node) -> dict[str, Any]:
    """Arguments by name, with the schema's defaults filled in; by position where there is no schema."""
    schema = schema_of(node.target) if node.op == "call_function" else None
    if schema is None:
        return {str(i): v for i, v in enumerate(node.args)} | node.kwargs
    given = {a.name: v for a, v in zip(schema.arguments, node.args)} | node.kwargs
    defaults = {a.name: a.default_value for a in schema.arguments if a.has_default_value()}
    return {a.name: given.get(a.name, defaults.get(a.name)) for a in schema.arguments}


def _resolved(value: Any, made: dict[fx.Node, Any]) -> Any:
    """A hashable argument: operands are their items."""
    if isinstance(value, fx.Node):
        return made[value]
    if isinstance(value, (list, tuple)):
        return tuple(_resolved(v, made) for v in value)
    if isinstance(value, dict):
        return tuple((k, _resolved(v, made)) for k, v in value.items())
    return (value.start, value.stop, value.step) if isinstance(value, slice) else value


def _number(items: list[_Item], table: dict[Any, int], modules: bool, layouts: bool) -> None:
    """Numbers items by what they compute; equal computations of one graph get different numbers, in order.

    An operand that was written before is another value than it was.
    """
    seen: Counter[Any] = Counter()
    writes: Counter[Any] = Counter()

    def keyed(value: Any) -> Any:
        if isinstance(value, _Item):
            return ("operand", value.number, writes[value.number])
        return tuple(keyed(v) for v in value) if isinstance(value, tuple) else value

    for item in items:
        arguments = tuple((name, keyed(value)) for name, value in item.arguments.items())
        key = (item.op, arguments, item.module if modules else None, item.layout if layouts else None)
        nth = 0 if item.op in ("placeholder", "get_attr") else seen[key]  # fetching a weight twice is no work
        seen[key] += 1
        item.number = table.setdefault((key, nth), len(table))
        changed = {node.name for node in written(item.node)}
        for operand in _operands(item):
            if operand.node.name in changed:
                writes[operand.number] += 1


def _operands(item: _Item) -> list[_Item]:
    def flat(value: Any) -> Iterator[_Item]:
        if isinstance(value, _Item):
            yield value
        elif isinstance(value, tuple):
            for part in value:
                yield from flat(part)

    return list(flat(tuple(item.arguments.values())))


def _explain(only_a: list[_Item], only_b: list[_Item], modules: bool, layouts: bool) -> Difference:
    """What sets the first node that only the first graph has apart from its likeliest counterpart in the second."""
    item = only_a[0]

    module = item.node.meta.get("module", "")

    def alike(other: _Item) -> tuple[bool, int]:
        same = sum(_same(item.arguments[k], other.arguments.get(k)) for k in item.arguments)
        return other.node.meta.get("module", "") == module, same + (item.layout == other.layout)

    def is_near(other: _Item, at_least: int) -> bool:
        shared = bool({i.number for i in _operands(item)} & {i.number for i in _operands(other)})
        return shared + (other.node.meta.get("module", "") == module) >= at_least

    candidates = [o for o in only_b if o.op == item.op and is_near(o, 1)]
    if not candidates:  # another op in its place, unless that has a counterpart itself
        taken = {(i.op, i.node.meta.get("module", "")) for i in only_a}
        near = [o for o in only_b if is_near(o, 2)]
        candidates = [o for o in near if (o.op, o.node.meta.get("module", "")) not in taken]
    if item.op in ("placeholder", "get_attr"):
        candidates = [o for o in candidates if o.arguments == item.arguments]
    if not candidates:
        what = f"only the first graph has {item.described()} of {_named(item)}"
        return Difference(item.position, item.node.name, None, module, what)
    other = max(candidates, key=alike)
    what = "; ".join(_differing(item, other, modules, layouts))
    return Difference(item.position, item.node.name, other.node.name, module, what)


def _differing(item: _Item, other: _Item, modules: bool, layouts: bool) -> Iterator[str]:
    if item.op != other.op:
        yield f"here stands {item.described()}, in the second {other.described()}"
        return
    found = False
    for name in {**item.arguments, **other.arguments}:
        mine, theirs = item.arguments.get(name), other.arguments.get(name)
        if not _same(mine, theirs):
            found = True
            yield f"argument {item.argument_word(name)} is {_shown(mine)}, in the second {_shown(theirs)}"
    if layouts and item.layout != other.layout:
        found = True
        yield f"layout is {_layout(item.layout)}, in the second {_layout(other.layout)}"
    if modules and item.module != other.module:
        found = True
        yield f"module is {item.module or 'none'}, in the second {other.module or 'none'}"
    if not found:
        yield "an operand was written before in one graph and not in the other, or the node occurs more often in one"


def _same(mine: Any, theirs: Any) -> bool:
    if isinstance(mine, _Item) and isinstance(theirs, _Item):
        return mine.number == theirs.number
    if isinstance(mine, tuple) and isinstance(theirs, tuple):
        return len(mine) == len(theirs) and all(_same(m, t) for m, t in zip(mine, theirs))
    return type(mine) is type(theirs) and mine == theirs


def _shown(value: Any) -> str:
    if isinstance(value, _Item):
        return value.described()
    return f"({', '.join(_shown(v) for v in value)})" if isinstance(value, tuple) else repr(value)


def _layout(layout: Any) -> str:
    if isinstance(layout, tuple):
        return f"({', '.join(_layout(x) for x in layout)})"
    tokens = getattr(layout, "tokens", None)
    return f"{layout}" + (f" of {tokens.real} tokens in {tokens.parts}" if tokens else "")


def _named(item: _Item) -> str:
    return ", ".join(o.node.name for o in _operands(item)) or "no operand"


def _order_of_communication(items_a: list[_Item], items_b: list[_Item]) -> Difference | None:
    calls_a, calls_b = ([i for i in items if i.talks] for items in (items_a, items_b))
    for index, (mine, theirs) in enumerate(zip(calls_a, calls_b)):
        if mine.number != theirs.number:
            what = f"communication {index} is {mine.described()}, in the second {theirs.described()}"
            module = mine.node.meta.get("module", "")
            return Difference(mine.position, mine.node.name, theirs.node.name, module, what)
    return None
