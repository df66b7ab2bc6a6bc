"""What a run needs before any rank starts: graph, contract, weights, batch and reference values."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from torch import Tensor

from emulator.errors import LayoutError, UsageError
from emulator.faults.catalogue import find_fault, inject_in_graph
from emulator.layout.lowering import lower
from emulator.layout.placement import Tokens
from emulator.layout.plan import Plan, load_plan, module_pattern, plan_for
from emulator.layout.rank_graph import RankGraph, Violation
from emulator.model.batch import Request, batch_inputs, own_caches
from emulator.model.config import ModelConfig
from emulator.model.layers import Batch
from emulator.model.program import Program, build_program
from emulator.model.quantised import Range, needs_ranges
from emulator.model.structure import INDEXER_FIELDS, has_dsa_structure
from emulator.model.weights import Checkpoint, Source, seeded, weight_groups
from emulator.model.workload import build_workload, phase_of
from emulator.passes.apply import apply_pass
from emulator.passes.repetition import expand
from emulator.runtime.mesh import Mesh
from emulator.runtime.shared import map_shared, remove_shared, shared_folder, write_shared
from emulator.scenario import Scenario, StepRequests
from emulator.trace.record import fresh_folder
from emulator.verify.choices import choices_of
from emulator.verify.contract import Contract, load_contract, symbols_of
from emulator.verify.expected import Peer, choices_needed
from emulator.verify.quantised import (
    QuantisationError,
    float_program,
    input_ranges,
    quantisation_error,
    row_parallel,
)
from emulator.verify.reference import Tolerance, largest_tolerance, run_reference, tolerances

_CALIBRATION_TOKENS = 128
_CALIBRATION_INDEX = 1009  # of a dp rank that no run has: its tokens are nobody's


@dataclass
class Prepared:
    """One step of one dp rank: all that is the same on its ranks, built once.

    weights (the same in all parts) and reference are empty in shape mode. batch: its caches are as they are before the
    step. schedule: every step's parts, by dp rank; they share one schedule.
    """

    scenario: Scenario
    config: ModelConfig
    mesh: Mesh
    program: Program
    rank_graph: RankGraph
    contract: Contract | None
    symbols: dict[str, int]
    out_dir: Path | None
    requests: tuple[Request, ...]
    step: int = 0
    phase: str = "prefill"
    batch: Batch | None = None
    weights: Mapping[str, Tensor] = field(default_factory=dict)
    reference: Mapping[str, Tensor] = field(default_factory=dict)
    tolerance: Tolerance = field(default_factory=lambda: Tolerance({}, {}))
    schedule: list[list["Prepared"]] = field(default_factory=list, repr=False)
    quantisation: QuantisationError | None = None

    @property
    def parts(self) -> list["Prepared"]:
        """All parts, step by step."""
        return [part for step in self.schedule for part in step]

    @property
    def peers(self) -> list[Peer]:
        """Tokens and reference of every dp rank in this step: what this rank's experts may be sent."""
        return [Peer(part.rank_graph.tokens, part.reference) for part in self.schedule[self.step]]


def prepare(scenario: Scenario, out_dir: Path | None = None, *, graph_only: bool = False) -> Prepared:
    """Builds and lowers the Program; in real mode also the weights (mapped), the batches and the reference runs.

    Returns the first step's part of dp rank 0; its schedule holds all. Raises UsageError for bad input, LayoutError
    when the static check refuses the plan.
    """
    config = scenario.config()
    mesh = scenario.mesh(config)
    _check_structure(scenario, config)
    if scenario.fault and scenario.mode != "real":
        raise UsageError(f"fault {scenario.fault}: faults are injected in mode real only")
    program = build_program(config, scenario.options())
    if scenario.fault and program.quantised and find_fault(scenario.fault).kind == "weights":
        raise UsageError(f"fault {scenario.fault}: faults of weights change float values, quant must be none")
    graphs = _Graphs(scenario, program, mesh)
    schedule = [
        _parts(scenario, config, mesh, graphs, number, step, out_dir) for number, step in enumerate(scenario.steps())
    ]
    first = schedule[0][0]
    for step in schedule:
        for part in step:
            part.schedule = schedule
    if out_dir is not None and not graph_only:
        fresh_folder(out_dir)
    if scenario.mode == "real" and not graph_only:
        add_weights(first, load_weights(program, scenario))
        add_batches(first)
        add_references(first)
    return first


def _check_structure(scenario: Scenario, config: ModelConfig) -> None:
    """UsageError when the plan needs a structure that the model does not have."""
    plan = load_plan(scenario.plan, scenario.variants)
    if plan.needs == "dsa" and not has_dsa_structure(config):
        raise UsageError(
            f"plan {plan.name} is DSA context parallelism, but model {scenario.model} has no indexer "
            f"({', '.join(INDEXER_FIELDS)}): its attention is dense MLA, use --plan sp or tp"
        )


class _Graphs:
    """Rank graphs of a scenario, one per plan and token count: dp ranks and steps that look alike share one."""

    def __init__(self, scenario: Scenario, program: Program, mesh: Mesh):
        self.scenario, self.program, self.mesh = scenario, program, mesh
        self._made: dict[tuple[str, Tokens], RankGraph] = {}

    def of(self, plan: Plan, tokens: Tokens) -> RankGraph:
        """Lowered, passed through the scenario's passes and faults; LayoutError when the static check refuses it."""
        if (plan.name, tokens) not in self._made:
            self._made[plan.name, tokens] = self._make(plan, tokens)
        return self._made[plan.name, tokens]

    def _make(self, plan: Plan, tokens: Tokens) -> RankGraph:
        scenario = self.scenario
        rank_graph = lower(self.program, plan, self.mesh.sizes, tokens)
        for spec in scenario.passes:
            rank_graph = apply_pass(rank_graph, self.program.parameters, spec)
        rank_graph = expand(inject_in_graph(scenario.fault, rank_graph))
        if scenario.static_check and rank_graph.violations:
            raise LayoutError(told_violations(rank_graph, scenario.passes), rank_graph.violations)
        return rank_graph


def _parts(
    scenario: Scenario, config: ModelConfig, mesh: Mesh, graphs: _Graphs, number: int, step: StepRequests,
    out_dir: Path | None,
) -> list[Prepared]:  # fmt: skip
    """The dp ranks' parts of a step; phase, plan and padding come from the requests of all."""
    phase = phase_of(step)
    plan = plan_for(scenario.plan, scenario.variants, phase)
    named = scenario.contract or (plan.contract if not scenario.passes else None)
    contract = load_contract(named) if named else None
    counts = [sum(r.query for r in requests) for requests in step]
    parts = []
    for requests, count in zip(step, counts):
        # a batch without tokens keeps one padding row per rank, so that its ranks join every collective
        rows = max(counts) if plan.pads_to_dp_max else count
        order = plan.order if mesh.tp > 1 else "contiguous"
        if scenario.fault and order != "contiguous":
            raise UsageError(
                f"fault {scenario.fault}: plan {plan.name} has its tokens in {order} order, and faults know contiguous "
                "windows only"
            )
        rank_graph = graphs.of(plan, Tokens(count, mesh.tp, max(rows, 1), order))
        symbols = symbols_of(config, rank_graph.tokens, mesh.sizes, mtp=scenario.mtp)
        own = tuple(requests)
        parts.append(
            Prepared(scenario, config, mesh, graphs.program, rank_graph, contract, symbols, out_dir, own, number, phase)
        )
    return parts


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
    ranges = _calibrated(program, source, scenario) if needs_ranges(program.quantised) else None
    return _shared(weight_groups(program, source, scenario.torch_dtype, ranges))


def _shared(groups: Iterator[dict[str, Tensor]]) -> dict[str, Tensor]:
    folder = shared_folder()
    try:
        write_shared(groups, folder)
        return map_shared(folder)
    finally:
        remove_shared(folder)


def _calibrated(program: Program, source: Source, scenario: Scenario) -> dict[str, Range]:
    """Ranges of the activations that have static scales, over a batch of its own: the same for every plan and workload
    of a model and seed."""
    plain, dtype = float_program(program), scenario.torch_dtype
    weights = _shared(weight_groups(plain, source, dtype))
    workload = build_workload(
        program.whole_config, [[Request(_CALIBRATION_TOKENS)]], seed=scenario.seed, dp_index=_CALIBRATION_INDEX,
        dtype=dtype, block_size=program.options.block_size,
    )  # fmt: skip
    return input_ranges(plain, weights, batch_inputs(workload.steps[0]), needs_ranges(program.quantised))


def add_weights(prepared: Prepared, weights: Mapping[str, Tensor]) -> None:
    for part in prepared.parts:
        part.weights = weights


def add_batches(prepared: Prepared) -> None:
    """The batches of all steps; a step's caches are filled in as the reference reaches it (add_references)."""
    scenario = prepared.scenario
    for dp, parts in enumerate(zip(*prepared.schedule)):
        workload = build_workload(
            prepared.program.whole_config, [part.requests for part in parts], seed=scenario.seed, dp_index=dp,
            dtype=scenario.torch_dtype, block_size=prepared.program.options.block_size,
        )  # fmt: skip
        for part, batch in zip(parts, workload.steps):
            part.batch = batch
        if workload.prefix is not None and prepared.weights:
            inputs = batch_inputs(workload.prefix)  # the caches are written in place: they are the first step's
            run_reference(prepared.program, prepared.weights, inputs, keep=set())


def add_references(prepared: Prepared) -> None:
    """Runs the reference, step by step on the same caches, for every value that a rank will be compared with."""
    for parts in zip(*prepared.schedule):
        for step, part in enumerate(parts):
            at = {node.name: node.meta["origin"] for node in part.rank_graph.graph.nodes}
            keep = {at[b.node] for b in part.rank_graph.boundaries if at[b.node]}
            part.reference, part.tolerance, caches = _run_part(part, keep)
            if part.program.quantised:
                assert part.batch is not None
                both = own_caches(part.batch), own_caches(part.batch)
                part.quantisation = quantisation_error(part.program, part.weights, both, row_parallel(part.rank_graph))
            if step + 1 < len(parts):
                following = parts[step + 1]
                following.batch = replace(following.batch, **caches)
    for of_ranks in prepared.schedule:
        tolerance = largest_tolerance([part.tolerance for part in of_ranks])  # experts hold rows of every dp rank
        for part in of_ranks:
            part.tolerance = tolerance


def reference_of(part: Prepared, names: set[str]) -> tuple[dict[str, Tensor], Tolerance]:
    """The reference's values of these Program nodes, and of all discrete choices, with their tolerances."""
    return _run_part(part, names)[:2]


def _run_part(part: Prepared, names: set[str]) -> tuple[dict[str, Tensor], Tolerance, dict[str, list[Tensor]]]:
    """(values, tolerances, caches after the step)."""
    scenario, program = part.scenario, part.program
    assert part.batch is not None
    keep = names | choices_needed(program) | choices_of(program.graph)
    inputs = own_caches(part.batch)
    in_shards = row_parallel(part.rank_graph) if program.quantised else None
    reference = run_reference(program, part.weights, inputs, keep=keep, in_shards=in_shards)
    caches = {name: inputs[name] for name in ("latent_caches", "index_caches")}
    again = own_caches(part.batch)
    tolerance = tolerances(program, part.weights, again, reference, scenario.torch_dtype, scenario.seed, in_shards)
    return reference, tolerance, caches
