"""The rank graph: the one SPMD graph that every rank runs, with a layout on every value."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from torch import fx

from emulator.layout.placement import Tokens
from emulator.layout.plan import Plan
from emulator.ops.registry import op_name
from emulator.ops.transition import TRANSITIONS


def behind_moves(node: fx.Node) -> fx.Node:
    """The node that computed a value, behind the transitions that have moved it since."""
    while op_name(node.target) in TRANSITIONS:
        node = node.args[0]  # type: ignore[assignment]
    return node


def copy_graph(graph: fx.Graph) -> fx.Graph:
    """The same graph with the same node names; meta are copied."""
    new = fx.Graph()
    result = new.graph_copy(graph, {})
    new.output(result).meta.update(graph.output_node().meta)
    return new


@dataclass(frozen=True)
class Boundary:
    """A value crossing a module's edge. port: input, output, output1 (second output). node: name in the rank graph."""

    module: str
    port: str
    node: str


def in_order(edges: Iterable[Boundary], graph: fx.Graph) -> list[Boundary]:
    """Boundaries in the order in which a rank meets them: outputs of a node before inputs; else as they were found."""
    order = {node.name: i for i, node in enumerate(graph.nodes)}
    return sorted(edges, key=lambda b: (order[b.node], b.port == "input"))


@dataclass(frozen=True)
class Violation:
    """A broken layout rule, found without running. node: its name in the rank graph, where there is one."""

    module: str
    op: str
    found: str
    allowed: str
    reason: str
    node: str = ""

    def __str__(self) -> str:
        return f"{self.module}: {self.op} found {self.found}; allowed: {self.allowed}. Why: {self.reason}"


@dataclass
class RankGraph:
    """sizes: length of each mesh axis. Node meta: module; layout (a tuple for several outputs); origin (name of the
    Program node whose value it holds, if any); traffic (payload, or metadata: made by hosts, not counted)."""

    graph: fx.Graph
    sizes: Mapping[str, int]
    tokens: Tokens
    plan: Plan
    boundaries: list[Boundary] = field(default_factory=list)
    violations: list[Violation] = field(default_factory=list)
