"""What a run needs before any rank starts: graph, contract, weights, batch and reference values."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from emulator.errors import LayoutError, UsageError
from emulator.faults.catalogue import inject_in_graph
from emulator.layout.lowering import lower
from emulator.layout.plan import load_plan, module_pattern
from emulator.layout.rank_graph import RankGraph, Violation
from emulator.model.batch import Request, build_batch, own_caches
from emulator.model.config import ModelConfig
from emulator.model.layers import Batch
from emulator.model.program import Program, build_program
from emulator.model.weights import Checkpoint, seeded, weight_groups
from emulator.passes.apply import apply_pass
from emulator.runtime.mesh import Mesh
from emulator.runtime.shared import map_shared, remove_shared, shared_folder, write_shared
from emulator.scenario import Scenario
from emulator.trace.record import fresh_folder
from emulator.verify.choices import is_choice
from emulator.verify.contract import Contract, load_contract, symbols_of
from emulator.verify.expected import choices_needed
from emulator.verify.reference import Tolerance, run_reference, tolerances


@dataclass
class Prepared:
    """All that is the same on every rank, built once. weights and reference are empty in shape mode."""

    scenario: Scenario
    config: ModelConfig
    mesh: Mesh
    program: Program
    rank_graph: RankGraph
    contract: Contract | None
    symbols: dict[str, int]
    batch: Batch | None
    weights: Mapping[str, Tensor]
    reference: Mapping[str, Tensor]
    tolerance: Tolerance
    out_dir: Path | None


def prepare(scenario: Scenario, out_dir: Path | None = None, *, graph_only: bool = False) -> Prepared:
    """Builds and lowers the Program; in real mode also the weights (mapped), the batch and the reference run.

    Raises UsageError for bad input, LayoutError when the static check refuses the plan.
    """
    config = scenario.config()
    mesh = scenario.mesh(config)
    plan = load_plan(scenario.plan, scenario.variants)
    program = build_program(config, scenario.options())
    rank_graph = lower(program, plan, mesh.sizes, scenario.tokens)
    for spec in scenario.passes:
        rank_graph = apply_pass(rank_graph, program.parameters, spec)
    if scenario.fault and scenario.mode != "real":
        raise UsageError(f"fault {scenario.fault}: faults are injected in mode real only")
    rank_graph = inject_in_graph(scenario.fault, rank_graph)
    if scenario.static_check and rank_graph.violations:
        raise LayoutError(told_violations(rank_graph, scenario.passes), rank_graph.violations)
    named = scenario.contract or (plan.contract if not scenario.passes else None)
    contract = load_contract(named) if named else None
    symbols = symbols_of(config, rank_graph.tokens, mesh.sizes)
    if out_dir is not None and not graph_only:
        fresh_folder(out_dir)
    prepared = Prepared(
        scenario, config, mesh, program, rank_graph, contract, symbols, None, {}, {}, Tolerance({}, {}), out_dir
    )
    if scenario.mode == "real" and not graph_only:
        prepared.weights = load_weights(program, scenario)
        add_batch(prepared)
        add_reference(prepared)
    return prepared


def told_violations(rank_graph: RankGraph, passes: list[str]) -> str:
    """Every broken rule, those that differ by layer only in one line, behind one line that says what to do."""
    what = f"plan {rank_graph.plan.name}" + "".join(f" with pass {spec}" for spec in passes)
    alike: dict[tuple[str, ...], list[Violation]] = {}
    for v in rank_graph.violations:
        alike.setdefault((module_pattern(v.module), v.op, v.allowed, v.reason), []).append(v)
    told = [f"{vs[0]}" + (f" ({len(vs)} layers)" if len(vs) > 1 else "") for vs in alike.values()]
    if len(told) == 1:
        return f"static check: {what}: {told[0]}. --no-static-check runs it all the same"
    lines = "".join(f"\n  {i}. {line}" for i, line in enumerate(told, 1))
    total = len(rank_graph.violations)
    return f"static check: {what}: {total} broken rules (--no-static-check runs it all the same):{lines}"


def load_weights(program: Program, scenario: Scenario) -> dict[str, Tensor]:
    """The Program's weights, once on this host: written to shared memory, mapped, and unlinked (the maps live on)."""
    source = seeded(scenario.seed) if scenario.weights == "seed" else Checkpoint(Path(scenario.weights))
    folder = shared_folder()
    try:
        write_shared(weight_groups(program, source, scenario.torch_dtype), folder)
        return map_shared(folder)
    finally:
        remove_shared(folder)


def add_batch(prepared: Prepared) -> None:
    """One prefill request of the scenario's tokens, with empty caches."""
    scenario = prepared.scenario
    prepared.batch = build_batch(
        prepared.config, [Request(scenario.tokens)], seed=scenario.seed, dtype=scenario.torch_dtype,
        block_size=prepared.program.options.block_size,
    )  # fmt: skip


def add_reference(prepared: Prepared) -> None:
    """Runs the reference for every value that a rank will be compared with."""
    at = {node.name: node.meta["origin"] for node in prepared.rank_graph.graph.nodes}
    keep = {at[b.node] for b in prepared.rank_graph.boundaries if at[b.node]}
    prepared.reference, prepared.tolerance = reference_of(prepared, keep)


def reference_of(prepared: Prepared, names: set[str]) -> tuple[dict[str, Tensor], Tolerance]:
    """The reference's values of these Program nodes, and of all discrete choices, with their tolerances."""
    scenario, program = prepared.scenario, prepared.program
    assert prepared.batch is not None
    keep = names | choices_needed(program) | {node.name for node in program.graph.nodes if is_choice(node)}
    inputs = own_caches(prepared.batch)
    reference = run_reference(program, prepared.weights, inputs, keep=keep)
    inputs = own_caches(prepared.batch)
    return reference, tolerances(program, prepared.weights, inputs, reference, scenario.torch_dtype, scenario.seed)
