"""One rank's part of a run: executes the graph, writes the trace, checks values and contract."""

import hashlib
import json
import resource
from dataclasses import asdict, dataclass
from typing import Any

import psutil
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from emulator.faults.catalogue import inject_on_rank
from emulator.faults.on_rank import FaultyCollectives
from emulator.jobs.prepare import Prepared
from emulator.model.batch import own_caches
from emulator.runtime.board import PeerFailed
from emulator.runtime.collectives import Collectives
from emulator.runtime.executor import Executor
from emulator.runtime.rank_process import RankContext
from emulator.runtime.rank_weights import local_shard
from emulator.runtime.shape_mode import ShapeMode
from emulator.trace.record import TraceWriter
from emulator.trace.summary import collective_log, expert_rows, summarise_boundaries, summarise_collectives
from emulator.verify.blame import Captured
from emulator.verify.contract import Breach, check_trace
from emulator.verify.values import ValueCheck, ValueReport


def run_on_rank(prepared: Prepared, context: RankContext) -> dict[str, Any]:
    """One rank's part: runs its steps on one set of caches, writes the trace, checks values and contract of each.
    Returns its report."""
    rank, dp = context.rank, prepared.mesh.index("dp", context.rank)
    path = prepared.out_dir / f"rank_{rank}.jsonl" if prepared.out_dir else None
    writer = TraceWriter(path, trace_header(prepared, rank))
    steps: list[dict[str, Any]] = []
    caches: dict[str, Any] = {}
    try:
        with torch.no_grad():
            for parts in prepared.schedule:
                steps.append(_run_step(parts[dp], context, writer, caches))
    finally:
        writer.close()
    log = json.dumps(collective_log(writer.records))
    return {
        "rank": rank,
        "steps": steps,
        "log_hash": hashlib.sha256(log.encode()).hexdigest(),
        "collectives": summarise_collectives(writer.records) if rank == 0 else None,
        "boundaries": summarise_boundaries(writer.records) if rank == 0 else None,
        "expert_rows": expert_rows(writer.records),
        "memory": _peak(writer.records),
        "peak_rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "pss_mb": proportional_mb(),
    }


def _peak(records: list[dict[str, Any]]) -> dict[str, Any]:
    """The memory record of the step in which the rank held most, and the number of that step."""
    steps = [r for r in records if r["kind"] == "memory"]
    step = max(range(len(steps)), key=lambda i: steps[i]["peak_bytes"])
    return {"step": step, **{k: v for k, v in steps[step].items() if k not in ("kind", "phase", "modules")}}


def _run_step(part: Prepared, context: RankContext, writer: TraceWriter, caches: dict[str, Any]) -> dict[str, Any]:
    """{values, cache_hash (after it), breaches, num_breaches} of one step. caches: of the steps before, empty at
    first."""
    first_record = len(writer.records)
    writer.append({"kind": "step", "step": part.step, **step_header(part)})
    common = _common(part, context, writer)
    values: ValueReport | None = None
    cache_hash: str | None = None
    if part.scenario.mode == "shape":
        run_shapes(part, context.rank, common)
    else:
        check, executor = _value_run(part, context.rank, common, caches)
        executor.run()
        values, cache_hash = check.report, _cache_hash(caches)
    breaches: list[Breach] = []
    if part.contract is not None:
        records = writer.records[first_record:]
        breaches = check_trace(part.contract, records, part.symbols, part.rank_graph.plan.variants)
    return {
        "values": asdict(values) if values else None,
        "cache_hash": cache_hash,
        "breaches": [asdict(b) for b in breaches[:50]],
        "num_breaches": len(breaches),
    }


def _cache_hash(caches: dict[str, Any]) -> str:
    """Of every bit of a rank's caches."""
    digest = hashlib.sha256()
    for cache in (*caches["latent_caches"], *caches["index_caches"]):
        digest.update(cache.view(torch.uint8).numpy())
    return digest.hexdigest()


@dataclass(frozen=True)
class Retrace:
    """What a rank met in a second run. step: the last one it ran; failures: wrong values in it; captured: values and
    token ids of the named nodes there; raised: the node in which this rank raised by itself."""

    step: int
    failures: list[dict[str, Any]]
    captured: Captured
    raised: str | None = None


def retrace_on_rank(prepared: Prepared, last: int, names: frozenset[str], context: RankContext) -> Retrace:
    """The same run again up to step `last`, without trace or contract; an error ends it and is part of the answer."""
    caches: dict[str, Any] = {}
    dp = prepared.mesh.index("dp", context.rank)
    with torch.no_grad():
        for parts in prepared.schedule[: last + 1]:
            part = parts[dp]
            check, executor = _value_run(
                part, context.rank, _common(part, context, TraceWriter(None, {})), caches, names
            )
            error: Exception | None = None
            try:
                executor.run()
            except Exception as raised:
                error = raised
                context.board.abort()  # the others need not wait
                break
    node = executor.node if error is not None and not isinstance(error, PeerFailed) else None
    failures = asdict(check.report)["failures"]
    return Retrace(part.step, failures, executor.captured, node.name if node is not None else None)


def _common(part: Prepared, context: RankContext, writer: TraceWriter) -> dict[str, Any]:
    collectives = Collectives(part.mesh, context.rank, context.board, context.transport, context.timeout)
    collectives.log = context.log
    return {
        "mesh": part.mesh, "rank": context.rank, "collectives": collectives, "board": context.board,
        "writer": writer, "phase": part.phase,
    }  # fmt: skip


def _value_run(
    part: Prepared, rank: int, common: dict[str, Any], caches: dict[str, Any],
    capture: frozenset[str] = frozenset(),
) -> tuple[ValueCheck, Executor]:  # fmt: skip
    """A rank's run of a step, ready to start, and its check. caches: filled in by the first step."""
    assert part.batch is not None
    check = ValueCheck(
        part.program, part.rank_graph, part.mesh, rank, part.peers, part.tolerance,
        force_choices=part.scenario.dtype != "float64",
    )  # fmt: skip
    inputs = {**own_caches(part.batch), **caches}
    caches.update({name: inputs[name] for name in ("latent_caches", "index_caches")})
    site = inject_on_rank(part.scenario.fault, part.rank_graph, part.mesh, rank, part.weights, inputs)
    if site is not None:
        common = {**common, "collectives": FaultyCollectives(common["collectives"], site.stand_ins)}
    executor = Executor(
        site.rank_graph if site else part.rank_graph,
        weights=site.weight if site else lambda name, layout: local_shard(part.weights[name], layout, part.mesh, rank),
        inputs=inputs,
        observer=check,
        capture=capture,
        **common,
    )
    return check, executor


def run_shapes(part: Prepared, rank: int, common: dict[str, Any]) -> None:
    """A rank's run of a step on shapes only."""
    config = part.config
    tokens = [peer.tokens for peer in part.peers]
    shapes = ShapeMode(
        part.mesh, rank, tokens, config.n_routed_experts, config.num_experts_per_tok, part.scenario.torch_dtype
    )
    parameters = part.program.parameters
    with FakeTensorMode():
        Executor(
            part.rank_graph,
            weights=lambda name, layout: shapes.weight(name, parameters[name], layout),
            inputs=build_batch_shapes(part),
            shapes=shapes,
            **common,
        ).run()


def build_batch_shapes(part: Prepared) -> dict[str, Any]:
    """Graph inputs of the part's requests under the current fake mode."""
    config, block = part.program.whole_config, part.program.options.block_size
    requests = [r for r in part.requests if r.query]
    tokens, dtype = sum(r.query for r in requests), part.scenario.torch_dtype
    blocks = [-(-(r.query + r.context) // block) for r in requests]
    slots = (sum(blocks) + 1) * block
    latent = torch.empty((slots, config.kv_lora_rank + config.qk_rope_head_dim), dtype=dtype)
    index = torch.empty((slots, config.index_head_dim), dtype=dtype)
    ids = torch.empty(tokens, dtype=torch.int64)
    lens = torch.empty(len(requests), dtype=torch.int64)
    return {
        "input_ids": ids,
        "next_ids": ids.clone(),
        "positions": ids.clone(),
        "slots": ids.clone(),
        "token_mask": torch.empty(tokens, dtype=torch.bool),
        "query_lens": lens,
        "kv_lens": lens.clone(),
        "block_table": torch.empty((len(requests), max(blocks, default=1)), dtype=torch.int64),
        "latent_caches": [latent] * config.num_hidden_layers,
        "index_caches": [index] * config.num_hidden_layers,
    }


def trace_header(prepared: Prepared, rank: int) -> dict[str, Any]:
    """First line of a rank's trace: what is the same in all its steps."""
    scenario = prepared.scenario
    return {
        "rank": rank, "scenario": scenario.name, "model": scenario.model, "mesh": prepared.mesh.describe(),
        "mode": scenario.mode, "dtype": scenario.dtype, "quant": scenario.quant,
    }  # fmt: skip


def step_header(part: Prepared) -> dict[str, Any]:
    """First record of a step: all that a check of it needs without the scenario."""
    plan = part.rank_graph.plan
    return {
        "phase": part.phase, "plan": plan.name, "variants": dict(plan.variants), "symbols": part.symbols,
        "order": part.rank_graph.tokens.order,
        "requests": [[r.query, r.context] for r in part.requests],
    }  # fmt: skip


def proportional_mb() -> float:
    """Memory of this process in MiB, pages shared with other processes divided among them."""
    try:
        return psutil.Process().memory_full_info().pss / 2**20
    except (AttributeError, psutil.Error):
        return psutil.Process().memory_info().rss / 2**20
