"""check_graph: a user's own rank graph on real ranks, compared node by node with the same graph on one device."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn

from emulator.errors import UsageError
from emulator.jobs.locate import Case, locate
from emulator.layout.placement import Layout, Tokens, parse_want, parse_weight
from emulator.layout.plan import Plan, load_plan
from emulator.layout.propagation import propagate
from emulator.layout.rank_graph import Boundary, RankGraph, Violation, behind_moves, copy_graph
from emulator.model.program import Program
from emulator.ops.registry import LOCAL, op_name
from emulator.ops.transition import TRANSITIONS
from emulator.passes.normalise import normalise
from emulator.runtime.collectives import Collectives
from emulator.runtime.executor import Executor
from emulator.runtime.mesh import Mesh
from emulator.runtime.rank_process import RankContext
from emulator.runtime.rank_weights import local_shard
from emulator.runtime.threads import single_thread
from emulator.runtime.world import World
from emulator.trace.record import TraceWriter
from emulator.trace.summary import summarise_collectives
from emulator.verify.expected import Peer
from emulator.verify.reference import Tolerance
from emulator.verify.values import ValueCheck

_WHO = "check_graph"
_RELATIVE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}


@dataclass
class GraphReport:
    """violations: broken layout rules, found without running. failures: wrong values, in graph order, by rank. culprit:
    first wrong node and why. collectives: counts by group and op, of rank 0. outputs: by rank."""

    violations: list[Violation]
    failures: list[dict[str, Any]] = field(default_factory=list)
    culprit: dict[str, Any] | None = None
    collectives: list[dict[str, Any]] = field(default_factory=list)
    outputs: list[Any] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        return not self.violations and not self.failures

    def __str__(self) -> str:
        lines = [f"layout: {v}" for v in self.violations]
        lines += [f"values: {f['node']} on rank {f['rank']}: {f['detail']}" for f in self.failures[:8]]
        if self.culprit:
            c = self.culprit
            lines.append(f"first wrong node: {c['node']} ({c['op']}) on ranks {c['ranks']}: {c['kind']}: {c['text']}")
        return "\n".join(lines) or "pass"


def check_graph(
    graph_module: fx.GraphModule,
    inputs: Mapping[str, Tensor],
    layouts: Mapping[str, str] | str,
    world: World | Mesh | int,
    *,
    tokens: int,
    reference: Callable[..., Tensor] | None = None,
    run_anyway: bool = False,
    timeout: float = 60.0,
) -> GraphReport:
    """Runs a rank graph of our ops, aten or torch functions and functional collectives on every rank of `world`.

    graph_module: what ONE rank executes, on its own part of each input and weight. inputs: WHOLE values by placeholder
    name; weights are the module's own parameters and buffers, whole as well. layouts: how placeholders and weights lie
    over the ranks: full-token, local-token, shard(d), partial for tokens (dim 0); replicated, tp:shard(d) for weights
    (default: replicated); or the name of a plan, whose rows are looked up by the weights' module names. tokens: real
    tokens T. reference: single-device function of the whole inputs (by name) that gives the whole output; by default
    the graph itself with its transitions taken out and whole weights, which also gives every node's value.

    A graph that breaks a layout rule is not run unless run_anyway. Raises UsageError for a graph, layout or input that
    makes no sense, and RankError when a rank fails.
    """
    mesh = world.mesh if isinstance(world, World) else world if isinstance(world, Mesh) else Mesh.of(world)
    with single_thread():
        checked = _Checked(graph_module, inputs, layouts, mesh, tokens, reference, timeout)
        report = GraphReport(checked.rank_graph.violations)
        if not report.violations or run_anyway:
            checked.run(report)
    return report


class _Checked:
    def __init__(
        self, module: fx.GraphModule, inputs: Mapping[str, Tensor], layouts: Mapping[str, str] | str, mesh: Mesh,
        tokens: int, reference: Callable[..., Tensor] | None, timeout: float,
    ):  # fmt: skip
        self.mesh, self.inputs, self.timeout = mesh, dict(inputs), timeout
        self.graph = _functions_only(module)
        normalise(self.graph, mesh.sizes, _WHO)
        self.weights = {n: t.detach() for n, t in (*module.named_parameters(), *module.named_buffers())}
        plan = load_plan(layouts) if isinstance(layouts, str) else Plan("user graph", "", None, {}, {})
        self.rank_graph = RankGraph(self.graph, mesh.sizes, Tokens(tokens, mesh.tp), plan)
        self._set_layouts({} if isinstance(layouts, str) else dict(layouts))
        self.rank_graph.violations = propagate(self.rank_graph)
        self.program = Program(None, None, self.graph, self.weights, ())  # type: ignore[arg-type]
        self.reference = self._run_whole(reference)
        self.tolerance = _tolerance(self.reference)
        values = [n for n in self.graph.nodes if n.op in ("call_function", "call_method") and n.name in self.reference]
        self.rank_graph.boundaries = [Boundary(n.meta["module"] or n.name, "output", n.name) for n in values]

    def _set_layouts(self, layouts: dict[str, str]) -> None:
        tokens = self.rank_graph.tokens
        names = {n.target for n in self.graph.nodes if n.op in ("placeholder", "get_attr")}
        unknown = sorted(set(layouts) - names)
        if unknown:
            raise UsageError(f"{_WHO}: layouts name {unknown[0]!r}; the graph has {', '.join(sorted(map(str, names)))}")
        for node in self.graph.nodes:
            node.meta.update(module=_module_of(node), traffic="payload", origin=node.name)
            if op_name(node.target) in TRANSITIONS:
                node.meta["origin"] = None  # its operand's value, in another layout
            if node.op == "placeholder":
                if node.target not in self.inputs:
                    raise UsageError(f"{_WHO}: no input {node.target!r} (given: {', '.join(self.inputs) or 'none'})")
                node.meta["layout"] = _layout(layouts.get(node.target, "full-token"), node.target, tokens)
            elif node.op == "get_attr":
                placements = self.rank_graph.plan.weight_of(node.target.rpartition(".")[0])
                word = layouts.get(node.target)
                node.meta["layout"] = (
                    _layout(word, node.target, tokens, kind="weight") if word else Layout("weight").placed(**placements)
                )

    def _run_whole(self, reference: Callable[..., Tensor] | None) -> dict[str, Tensor]:
        """Every node's value on one device: whole inputs and weights, transitions left out."""
        output = next(n for n in self.graph.nodes if n.op == "output").args[0]
        if reference is not None:
            if not isinstance(output, fx.Node):
                raise UsageError(f"{_WHO}: reference= needs a graph with one output")
            output.meta["origin"] = output.name
            return {output.name: reference(**self.inputs)}
        env: dict[fx.Node, Any] = {}
        for node in self.graph.nodes:
            if node.op == "placeholder":
                env[node] = self.inputs[node.target]
            elif node.op == "get_attr":
                env[node] = self.weights[node.target]
            elif node.op != "output":
                try:
                    env[node] = _evaluate(node, env)
                except Exception as error:
                    raise UsageError(
                        f"{_WHO}: node {node.name} cannot run on one device with whole values "
                        f"({type(error).__name__}: {str(error).splitlines()[0]}); give reference="
                    ) from error
        for node in self.graph.nodes:  # a transition holds the value that it moves
            if op_name(node.target) in TRANSITIONS and not node.meta["padded"]:
                node.meta["origin"] = behind_moves(node).name
        rows = {n for n in env if isinstance(n.meta["layout"], Layout) and n.meta["layout"].kind == "rows"}
        return {n.name: v for n, v in env.items() if isinstance(v, Tensor) and n not in rows}  # rows change their order

    # -- on the ranks -------------------------------------------------------------------------------------------------

    def run(self, report: GraphReport) -> None:
        world = World(self.mesh, timeout=self.timeout)
        results = world.run(self._on_rank, frozenset())
        report.failures = sorted((f for r in results for f in r[0]["failures"]), key=lambda f: (f["order"], f["rank"]))
        report.collectives, report.outputs = results[0][2], [r[1] for r in results]
        case = Case(
            self.program, self.rank_graph, self.mesh, self.weights, set(self.reference),
            lambda names: (self.reference, self.tolerance),
            lambda names: [r[3] for r in World(self.mesh, timeout=self.timeout).run(self._on_rank, names)],
        )  # fmt: skip
        report.culprit = locate(case, report.failures)

    def _on_rank(self, names: frozenset[str], context: RankContext) -> tuple[dict[str, Any], Any, list, dict]:
        mesh, rank, writer = self.mesh, context.rank, TraceWriter(None, {})
        check = ValueCheck(
            self.program,
            self.rank_graph,
            mesh,
            rank,
            [Peer(self.rank_graph.tokens, self.reference)] * mesh.dp,
            self.tolerance,
            force_choices=False,
        )
        layouts = {n.target: n.meta["layout"] for n in self.graph.nodes if n.op == "placeholder"}
        executor = Executor(
            self.rank_graph,
            mesh=mesh,
            rank=rank,
            weights=lambda name, layout: local_shard(self.weights[name], layout, mesh, rank),
            inputs={name: local_input(self.inputs[name], layout, mesh, rank) for name, layout in layouts.items()},
            collectives=Collectives(mesh, rank, context.board, context.transport, context.timeout),
            board=context.board,
            writer=writer,
            observer=check,
            capture=names,
        )
        with torch.no_grad():
            output = executor.run()
        return asdict(check.report), output, summarise_collectives(writer.records), executor.captured


def _tolerance(reference: Mapping[str, Tensor]) -> Tolerance:
    absolute = {}
    for name, value in reference.items():
        scale = float(value.abs().max()) if value.numel() and value.dtype != torch.bool else 0.0
        absolute[name] = _RELATIVE.get(value.dtype, 0.0) * scale
    return Tolerance(absolute, {})


def local_input(value: Tensor, layout: Layout, mesh: Mesh, rank: int) -> Tensor:
    """This rank's part of a whole input; local-token rows end in NaN (or -1) padding."""
    if layout.kind != "token" or layout.tokens is None or layout.on("tp") != LOCAL:
        return local_shard(value, layout, mesh, rank)
    tokens = layout.tokens
    padded = torch.ops.emulator.pad(value, 0, tokens.padded, *tokens.arrangement) if tokens.rearranged else value
    return padded.chunk(tokens.parts)[mesh.index("tp", rank)].clone()


def _functions_only(module: fx.GraphModule) -> fx.Graph:
    """A copy of the graph in which submodules are entered, so that every node is a function, a method or a weight."""
    if all(n.op != "call_module" for n in module.graph.nodes):
        return copy_graph(module.graph)

    class Tracer(fx.Tracer):
        def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
            return False

    return Tracer().trace(module)


def _module_of(node: fx.Node) -> str:
    """The user's module, where the trace knows it."""
    stack = node.meta.get("nn_module_stack")
    if stack:
        return str(next(reversed(stack.values()))[0])
    return node.target.rpartition(".")[0] if node.op == "get_attr" else node.meta.get("module", "")


def _layout(word: str, name: str, tokens: Tokens, kind: str = "token") -> Layout:
    where = f"{_WHO}: layout of {name}"
    if kind == "weight" or word == "replicated" or ":" in word:
        return Layout("weight").placed(**parse_weight(word, where))
    return Layout("token", (), tokens).placed(**parse_want(word, where)[1])


def _evaluate(node: fx.Node, env: Mapping[fx.Node, Any]) -> Any:
    args, kwargs = fx.map_arg((node.args, node.kwargs), env.__getitem__)
    if op_name(node.target) in TRANSITIONS:
        return args[0]
    if node.op == "call_method":
        return getattr(args[0], node.target)(*args[1:], **kwargs)
    return node.target(*args, **kwargs)
