"""Several plans on the same weights and batch, side by side: values, work, communication and memory of every rank."""

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from emulator.cost.device import load_device
from emulator.cost.local_rows import place_of
from emulator.cost.mapping import load_kernels
from emulator.cost.pricing import Pricer
from emulator.cost.replay import check_headers, priced
from emulator.errors import UsageError
from emulator.jobs.job import run
from emulator.layout.plan import load_plan
from emulator.ops.transition import COLLECTIVES
from emulator.scenario import Scenario
from emulator.trace.record import read_trace, steps_of, trace_files

ANY_DEVICE = "910C_752T"  # only work is counted, which no device changes


def compare(
    scenario: Scenario,
    plans: Sequence[str],
    out_dir: Path,
    on_progress: Callable[[str, str, float], None] | None = None,
) -> dict[str, Any]:
    """Runs the scenario under each plan, traces in out_dir/<plan>: {scenario, model, parallel, tokens, layers, mode,
    verdict, plans [{plan, verdict, checks, max_rel_error, collectives, ranks}]}.

    ranks: [{rank, checked, max_rel_error (of values on real rows, against the one reference of all plans), flops, sent
    {op: bytes}, calls {"group op": count}, peak_bytes, peak_at, weight_bytes, cache_bytes}]. on_progress(plan, stage,
    fraction). Raises UsageError for bad input and RankError when a rank fails.
    """
    if not plans:
        raise UsageError("--plans: name at least one plan")
    doubled = [plan for plan, times in Counter(Path(plan).stem for plan in plans).items() if times > 1]
    if doubled:
        raise UsageError(f"--plans: {doubled[0]} is named twice")
    offered = {plan: load_plan(plan).variants for plan in plans}
    for key in scenario.variants:
        if not any(key in variants for variants in offered.values()):
            raise UsageError(f"no plan of {', '.join(plans)} has a variant {key!r}")
    notify = on_progress or (lambda plan, stage, fraction: None)
    found = []
    for plan in plans:
        chosen = {k: v for k, v in scenario.variants.items() if k in offered[plan]}
        planned = scenario.model_copy(update={"plan": plan, "variants": chosen})
        folder = out_dir / Path(plan).stem
        summary = run(planned, folder, lambda stage, fraction, plan=plan: notify(plan, stage, fraction))  # type: ignore[misc]
        found.append(_of_plan(summary, folder))
    shared = ("scenario", "model", "parallel", "tokens", "layers", "mode", "dtype")
    verdict = "pass" if all(p["verdict"] == "pass" for p in found) else "fail"
    return {**{k: summary[k] for k in shared}, "verdict": verdict, "plans": found}


def _of_plan(summary: dict[str, Any], folder: Path) -> dict[str, Any]:
    work = trace_work(folder)
    ranks = []
    for values, counted in zip(summary["per_rank"], work):
        ranks.append({**{k: values[k] for k in ("rank", "checked", "failures", "max_rel_error")}, **counted})
    kept = ("plan", "variants", "verdict", "checks", "first_failure", "max_rel_error", "collectives", "wall_s")
    return {**{k: summary[k] for k in kept}, "ranks": ranks}


def trace_work(folder: Path) -> list[dict[str, Any]]:
    """Of every rank's trace, over all steps: {flops, sent, calls, peak_bytes, peak_at, weight_bytes, cache_bytes}.

    FLOPs are those of the kernels that the ops map to, on the rows that the ops have (a multiply-add counts as two).
    """
    traces = [read_trace(path) for path in trace_files(folder)]
    groups, table, pricer = check_headers(traces), load_kernels(), Pricer(load_device(ANY_DEVICE))
    found = []
    for rank, (header, records) in enumerate(traces):
        flops, sent, calls = 0.0, Counter[str](), Counter[str]()
        for step, of_step in steps_of(records):
            place = place_of(step, groups, rank, frozenset(), header["dtype"])
            for record in filter(priced, of_step):
                if record["op"] in COLLECTIVES:
                    sent[record["op"]] += record["bytes"]
                    calls[f"{record['group']} {record['op']}"] += 1
                else:
                    flops += sum(pricer(kernel)[1].flops for kernel in table.kernels(record, place))
        memory = [r for r in records if r["kind"] == "memory"]
        peak = max(memory, key=lambda r: r["peak_bytes"])
        found.append({
            "flops": flops, "sent": dict(sent), "calls": dict(calls),
            "peak_bytes": peak["peak_bytes"], "peak_at": f"{peak['op']} of {peak['module']}",
            "weight_bytes": max(r["weight_bytes"] for r in memory), "cache_bytes": memory[-1]["cache_bytes"],
        })  # fmt: skip
    return found
