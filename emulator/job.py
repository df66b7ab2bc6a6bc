"""One run of a scenario: prepare once, run on every rank, check, summarise."""

import hashlib
import json
import resource
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from emulator.errors import LayoutError
from emulator.layout.lowering import lower
from emulator.layout.placement import Layout
from emulator.layout.plan import load_plan
from emulator.layout.rank_graph import RankGraph
from emulator.model.batch import Request, build_batch, own_caches
from emulator.model.config import ModelConfig
from emulator.model.layers import Batch
from emulator.model.program import Program, build_program
from emulator.model.weights import Checkpoint, seeded, weight_groups
from emulator.runtime.board import Board
from emulator.runtime.collectives import Collectives
from emulator.runtime.executor import Executor
from emulator.runtime.mesh import Mesh
from emulator.runtime.rank_weights import fake_shard, local_shard
from emulator.runtime.routing import BalancedRouting
from emulator.runtime.shared import map_shared, remove_shared, shared_folder, write_shared
from emulator.runtime.world import RankContext, World
from emulator.scenario import Scenario
from emulator.trace.record import TraceWriter
from emulator.trace.summary import collective_log, summarise_boundaries, summarise_collectives
from emulator.verify.contract import Contract, check_trace, load_contract, symbols_of
from emulator.verify.expected import choices_needed
from emulator.verify.reference import is_choice, run_reference, tolerances
from emulator.verify.values import ValueCheck, ValueReport


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
    tolerance: Mapping[str, float]
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
    if scenario.static_check and rank_graph.violations:
        first, more = rank_graph.violations[0], len(rank_graph.violations) - 1
        rest = f" ({more} more like it)" if more else ""
        raise LayoutError(f"static check: plan {plan.name}: {first}{rest}. --no-static-check runs it all the same")
    contract = load_contract(plan.contract) if plan.contract else None
    symbols = symbols_of(config, rank_graph.tokens, mesh.sizes)
    prepared = Prepared(scenario, config, mesh, program, rank_graph, contract, symbols, None, {}, {}, {}, out_dir)
    if scenario.mode == "real" and not graph_only:
        prepared.weights = load_weights(program, scenario)
        add_batch(prepared)
        add_reference(prepared)
    return prepared


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
    scenario, program = prepared.scenario, prepared.program
    assert prepared.batch is not None
    at = {node.name: node.meta["origin"] for node in prepared.rank_graph.graph.nodes}
    keep = {at[b.node] for b in prepared.rank_graph.boundaries if at[b.node]} | choices_needed(program)
    keep |= {node.name for node in program.graph.nodes if is_choice(node)}
    prepared.reference = run_reference(program, prepared.weights, own_caches(prepared.batch), keep=keep)
    prepared.tolerance = tolerances(
        program, prepared.weights, own_caches(prepared.batch), prepared.reference, scenario.torch_dtype, scenario.seed
    )


def run_on_rank(prepared: Prepared, context: RankContext) -> dict[str, Any]:
    """One rank's part: executes the graph, writes the trace, checks values and contract. Returns its report."""
    scenario, rank_graph, mesh, rank = prepared.scenario, prepared.rank_graph, prepared.mesh, context.rank
    path = prepared.out_dir / f"rank_{rank}.jsonl" if prepared.out_dir else None
    writer = TraceWriter(path, trace_header(prepared, rank))
    collectives = Collectives(mesh, rank, context.board, context.transport, context.timeout)
    common: dict[str, Any] = {
        "mesh": mesh, "rank": rank, "collectives": collectives, "board": context.board, "writer": writer,
    }  # fmt: skip
    values: ValueReport | None = None
    try:
        with torch.no_grad():
            if scenario.mode == "shape":
                _run_shapes(prepared, rank, common)
            else:
                values = _run_values(prepared, rank, common)
    finally:
        writer.close()
    breaches = []
    if prepared.contract is not None:
        breaches = check_trace(prepared.contract, writer.records, prepared.symbols, rank_graph.plan.variants)
    log = json.dumps(collective_log(writer.records))
    return {
        "rank": rank,
        "values": asdict(values) if values else None,
        "breaches": [asdict(b) for b in breaches[:50]],
        "num_breaches": len(breaches),
        "log_hash": hashlib.sha256(log.encode()).hexdigest(),
        "collectives": summarise_collectives(writer.records) if rank == 0 else None,
        "boundaries": summarise_boundaries(writer.records) if rank == 0 else None,
        "num_records": len(writer.records),
        "peak_rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "pss_mb": proportional_mb(),
    }


def _run_values(prepared: Prepared, rank: int, common: dict[str, Any]) -> ValueReport:
    assert prepared.batch is not None
    check = ValueCheck(
        prepared.program, prepared.rank_graph, prepared.mesh, rank, prepared.reference, prepared.tolerance,
        force_choices=prepared.scenario.dtype != "float64",
    )  # fmt: skip
    Executor(
        prepared.rank_graph,
        weights=lambda name, layout: local_shard(prepared.weights[name], layout, prepared.mesh, rank),
        inputs=own_caches(prepared.batch),
        observer=check,
        **common,
    ).run()
    return check.report


def _run_shapes(prepared: Prepared, rank: int, common: dict[str, Any]) -> None:
    config, scenario = prepared.config, prepared.scenario
    routing = BalancedRouting(
        prepared.mesh, rank, prepared.rank_graph.tokens, config.n_routed_experts, config.num_experts_per_tok
    )
    with FakeTensorMode():
        batch = build_batch_shapes(prepared)

        def weights(name: str, layout: Layout) -> Tensor:
            shape = tuple(prepared.program.parameters[name].shape)
            return fake_shard(name, shape, scenario.torch_dtype, layout, prepared.mesh)

        Executor(prepared.rank_graph, weights=weights, inputs=batch, routing=routing, **common).run()


def build_batch_shapes(prepared: Prepared) -> dict[str, Any]:
    """Graph inputs of one prefill request under the current fake mode."""
    config, tokens = prepared.config, prepared.scenario.tokens
    block = prepared.program.options.block_size
    slots, dtype = (-(-tokens // block) + 1) * block, prepared.scenario.torch_dtype
    latent = torch.empty((slots, config.kv_lora_rank + config.qk_rope_head_dim), dtype=dtype)
    index = torch.empty((slots, config.index_head_dim), dtype=dtype)
    ids = torch.empty(tokens, dtype=torch.int64)
    lens = torch.empty(1, dtype=torch.int64)
    return {
        "input_ids": ids,
        "positions": ids.clone(),
        "slots": ids.clone(),
        "token_mask": torch.empty(tokens, dtype=torch.bool),
        "query_lens": lens,
        "kv_lens": lens.clone(),
        "block_table": torch.empty((1, -(-tokens // block)), dtype=torch.int64),
        "latent_caches": [latent] * config.num_hidden_layers,
        "index_caches": [index] * config.num_hidden_layers,
    }


def trace_header(prepared: Prepared, rank: int) -> dict[str, Any]:
    """First line of a rank's trace: all that a check needs without the scenario."""
    scenario = prepared.scenario
    return {
        "rank": rank, "scenario": scenario.name, "model": scenario.model, "plan": prepared.rank_graph.plan.name,
        "variants": dict(prepared.rank_graph.plan.variants), "mesh": asdict(prepared.mesh), "mode": scenario.mode,
        "dtype": scenario.dtype, "symbols": prepared.symbols,
    }  # fmt: skip


def run(
    scenario: Scenario, out_dir: Path | None = None, on_progress: Callable[[str, float], None] | None = None
) -> dict[str, Any]:
    """Runs a scenario on ranks forked from this process and returns the summary (see README for its fields).

    out_dir: where traces and summary.json go; None writes nothing. on_progress(stage, fraction) is called as it goes.
    Raises UsageError for bad input and RankError when a rank fails.
    """
    started = time.perf_counter()
    notify = on_progress or (lambda stage, fraction: None)
    notify("preparing", 0.0)
    with single_thread():  # no thread pool may exist when the ranks are forked
        prepared = prepare(scenario, out_dir)
        world = World(prepared.mesh, timeout=scenario.timeout, communicate=scenario.mode == "real")
        num_signs = prepared.mesh.size * sum(n.op == "call_function" for n in prepared.rank_graph.graph.nodes)

        def progress(board: Board) -> None:
            notify("running", min(1.0, sum(board.status(r)[0] for r in range(prepared.mesh.size)) / num_signs))

        reports = world.run(lambda context: run_on_rank(prepared, context), progress)
    return summarise(prepared, reports, time.perf_counter() - started)


def summarise(prepared: Prepared, reports: list[dict[str, Any]], wall_s: float) -> dict[str, Any]:
    """The summary object of `--json`, also written to out_dir/summary.json."""
    scenario, plan = prepared.scenario, prepared.rank_graph.plan
    checks, failures = _checks(prepared, reports)
    values = [r["values"] for r in reports if r["values"]]
    first = min(failures, key=lambda f: (f["order"], f["rank"]), default=None)
    own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    summary = {
        "scenario": scenario.name,
        "model": scenario.model,
        "plan": plan.name,
        "variants": dict(plan.variants),
        "parallel": {"tp": prepared.mesh.tp, "dp": prepared.mesh.dp, "ep": prepared.mesh.ep},
        "tokens": scenario.tokens,
        "layers": prepared.config.num_hidden_layers,
        "mode": scenario.mode,
        "dtype": scenario.dtype,
        "verdict": "pass" if all(c["passed"] for c in checks) else "fail",
        "checks": checks,
        "first_failure": {k: v for k, v in first.items() if k != "order"} if first else None,
        "collectives": reports[0]["collectives"],
        "boundaries": reports[0]["boundaries"],
        "max_abs_error": max((v["max_abs_error"] for v in values), default=None),
        "max_rel_error": max((v["max_rel_error"] for v in values), default=None),
        "max_error_in_tolerances": max((v["worst"] for v in values), default=None),
        "choice_flips": max((v["flips"] for v in values), default=None),
        "wall_s": round(wall_s, 3),
        "peak_rss_mb": {
            "total": round(own + sum(r["pss_mb"] for r in reports), 1),
            "per_rank": round(max(r["peak_rss_mb"] for r in reports), 1),
        },
        "out_dir": str(prepared.out_dir) if prepared.out_dir else None,
    }
    if prepared.out_dir:
        prepared.out_dir.mkdir(parents=True, exist_ok=True)
        (prepared.out_dir / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    return summary


def _checks(prepared: Prepared, reports: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """([{name, passed, detail}], failures that name a module and a rank)."""
    checks: list[dict[str, Any]] = []
    failures: list[dict[str, Any]] = []

    def add(name: str, passed: bool, detail: str) -> None:
        checks.append({"name": name, "passed": passed, "detail": detail})

    violations = prepared.rank_graph.violations
    text = (
        f"{len(violations)} broken rules, run on request; first: {violations[0]}"
        if violations
        else "every op's layout rule holds"
    )
    add("static layout", not violations, text)
    values = [r for r in reports if r["values"]]
    if values:
        found = [f for r in values for f in r["values"]["failures"]]
        failures += found
        checked = sum(r["values"]["checked"] for r in values)
        bad = len({f["rank"] for f in found})
        detail = f"{checked} boundary values on {len(reports)} ranks"
        add("values", not found, detail + (f"; wrong on {bad} ranks" if bad else " equal the one-process reference"))
    if prepared.contract is not None:
        breaches = [(r["rank"], b) for r in reports for b in r["breaches"]]
        for rank, b in breaches:
            entry = {
                "layer": b["layer"],
                "module": b["module"],
                "rank": rank,
                "expected": b["expected"],
                "found": b["found"],
            }
            failures.append({**entry, "detail": b["detail"], "order": 10**9 + (b["layer"] or 0)})
        total = sum(r["num_breaches"] for r in reports)
        detail = (
            breaches[0][1]["detail"]
            if breaches
            else "boundaries, shapes and exact collective counts hold on every rank"
        )
        add(
            f"contract {prepared.rank_graph.plan.contract}",
            not breaches,
            f"{total} breaches; first: {detail}" if breaches else detail,
        )
    same = len({r["log_hash"] for r in reports}) == 1
    add("collective order", same, "the same on every rank" if same else "ranks made different calls")
    return checks, failures


def proportional_mb() -> float:
    """Memory of this process in MiB, pages shared with other processes divided among them."""
    try:
        return psutil.Process().memory_full_info().pss / 2**20
    except (AttributeError, psutil.Error):
        return psutil.Process().memory_info().rss / 2**20


@contextmanager
def single_thread() -> Iterator[None]:
    """One torch thread within, the caller's setting after."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
