"""One rank's part of a run: executes the graph, writes the trace, checks values and contract."""

import hashlib
import json
import resource
from dataclasses import asdict
from typing import Any

import psutil
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from emulator.faults.catalogue import inject_on_rank
from emulator.faults.on_rank import FaultyCollectives
from emulator.model.batch import own_caches
from emulator.prepare import Prepared
from emulator.runtime.collectives import Collectives
from emulator.runtime.executor import Executor
from emulator.runtime.rank_process import RankContext
from emulator.runtime.rank_weights import local_shard
from emulator.runtime.shape_mode import ShapeMode
from emulator.trace.record import TraceWriter
from emulator.trace.summary import collective_log, summarise_boundaries, summarise_collectives
from emulator.verify.blame import Captured
from emulator.verify.contract import check_trace
from emulator.verify.values import ValueCheck, ValueReport


def run_on_rank(prepared: Prepared, context: RankContext) -> dict[str, Any]:
    """One rank's part: executes the graph, writes the trace, checks values and contract. Returns its report."""
    scenario, rank_graph, rank = prepared.scenario, prepared.rank_graph, context.rank
    path = prepared.out_dir / f"rank_{rank}.jsonl" if prepared.out_dir else None
    writer = TraceWriter(path, trace_header(prepared, rank))
    common = _common(prepared, context, writer)
    values: ValueReport | None = None
    try:
        with torch.no_grad():
            if scenario.mode == "shape":
                _run_shapes(prepared, rank, common)
            else:
                values = _run_values(prepared, rank, common)[0]
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
        "peak_rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "pss_mb": proportional_mb(),
    }


def capture_on_rank(prepared: Prepared, names: frozenset[str], context: RankContext) -> Captured:
    """The same run again, without trace or contract: the values and token ids of the named nodes on this rank."""
    with torch.no_grad():
        return _run_values(prepared, context.rank, _common(prepared, context, TraceWriter(None, {})), names)[1]


def _common(prepared: Prepared, context: RankContext, writer: TraceWriter) -> dict[str, Any]:
    collectives = Collectives(prepared.mesh, context.rank, context.board, context.transport, context.timeout)
    collectives.log = context.log
    return {
        "mesh": prepared.mesh, "rank": context.rank, "collectives": collectives, "board": context.board,
        "writer": writer,
    }  # fmt: skip


def _run_values(
    prepared: Prepared, rank: int, common: dict[str, Any], capture: frozenset[str] = frozenset()
) -> tuple[ValueReport, Captured]:
    assert prepared.batch is not None
    check = ValueCheck(
        prepared.program, prepared.rank_graph, prepared.mesh, rank, prepared.reference, prepared.tolerance,
        force_choices=prepared.scenario.dtype != "float64",
    )  # fmt: skip
    inputs = own_caches(prepared.batch)
    site = inject_on_rank(
        prepared.scenario.fault, prepared.rank_graph, prepared.mesh, rank, prepared.weights, inputs
    )  # fmt: skip
    if site is not None:
        common = {**common, "collectives": FaultyCollectives(common["collectives"], site.stand_ins)}
    executor = Executor(
        site.rank_graph if site else prepared.rank_graph,
        weights=site.weight
        if site
        else lambda name, layout: local_shard(prepared.weights[name], layout, prepared.mesh, rank),
        inputs=inputs,
        observer=check,
        capture=capture,
        **common,
    )
    executor.run()
    return check.report, executor.captured


def _run_shapes(prepared: Prepared, rank: int, common: dict[str, Any]) -> None:
    config = prepared.config
    shapes = ShapeMode(
        prepared.mesh, rank, prepared.rank_graph.tokens, config.n_routed_experts, config.num_experts_per_tok,
        prepared.scenario.torch_dtype,
    )  # fmt: skip
    parameters = prepared.program.parameters
    with FakeTensorMode():
        Executor(
            prepared.rank_graph,
            weights=lambda name, layout: shapes.weight(name, tuple(parameters[name].shape), layout),
            inputs=build_batch_shapes(prepared),
            shapes=shapes,
            **common,
        ).run()


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
        "variants": dict(prepared.rank_graph.plan.variants), "mesh": prepared.mesh.describe(), "mode": scenario.mode,
        "dtype": scenario.dtype, "symbols": prepared.symbols,
    }  # fmt: skip


def proportional_mb() -> float:
    """Memory of this process in MiB, pages shared with other processes divided among them."""
    try:
        return psutil.Process().memory_full_info().pss / 2**20
    except (AttributeError, psutil.Error):
        return psutil.Process().memory_info().rss / 2**20
