"""From the reports of all ranks to one verdict: checks, first failure, and the summary object of `--json`."""

import json
import resource
from typing import Any

import torch

from emulator.cost.replay import Options
from emulator.cost.summary import price_folder
from emulator.errors import UsageError
from emulator.jobs.prepare import Prepared
from emulator.layout.plan import layer_of
from emulator.layout.rank_graph import Violation
from emulator.layout.windows import GlobalBatch, check_invariants, local_batches


def summarise(
    prepared: Prepared, reports: list[dict[str, Any]], wall_s: float, culprit: dict[str, Any] | None = None
) -> dict[str, Any]:
    """The summary object of `--json`, also written to out_dir/summary.json. culprit: what locate.locate found."""
    scenario, plan = prepared.scenario, prepared.rank_graph.plan
    checks, failures = _checks(prepared, reports)
    values = [step["values"] for r in reports for step in r["steps"] if step["values"]]
    first = min(failures, key=lambda f: (f["step"], f["order"], f["rank"]), default=None)
    own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    summary = {
        "scenario": scenario.name,
        "model": scenario.model,
        "plan": plan.name,
        "variants": dict(plan.variants),
        "parallel": {"tp": prepared.mesh.tp, "dp": prepared.mesh.dp, "ep": prepared.mesh.ep},
        "tokens": scenario.num_tokens,
        "steps": _steps(prepared),
        "layers": prepared.config.num_hidden_layers,
        "mode": scenario.mode,
        "dtype": scenario.dtype,
        "quant": scenario.quant,
        "verdict": "pass" if all(c["passed"] for c in checks) else "fail",
        "checks": checks,
        "first_failure": {k: v for k, v in first.items() if k not in ("order", "node", "edges")} if first else None,
        "culprit": culprit,
        "broken_boundaries": sorted({tuple(e) for f in failures for e in f.get("edges", [(f["module"], f["port"])])}),
        "collectives": reports[0]["collectives"],
        "boundaries": reports[0]["boundaries"],
        "per_rank": [_of_rank(report) for report in reports],
        "forward_memory": _forward_memory(reports),
        "quantisation": _quantisation(prepared),
        "expert_rows": _expert_rows([r["expert_rows"] for r in reports]),
        "max_abs_error": max((v["max_abs_error"] for v in values), default=None),
        "max_rel_error": max((v["max_rel_error"] for v in values), default=None),
        "max_error_in_tolerances": max((v["worst"] for v in values), default=None),
        "max_error_in_eps": _in_eps(values, scenario.torch_dtype),
        "choice_flips": max((v["flips"] for v in values), default=None),
        "wall_s": round(wall_s, 3),
        "peak_rss_mb": {
            "total": round(own + sum(r["pss_mb"] for r in reports), 1),
            "per_rank": round(max(r["peak_rss_mb"] for r in reports), 1),
        },
        "out_dir": str(prepared.out_dir) if prepared.out_dir else None,
        "cost": _cost(prepared),
    }
    if prepared.out_dir:
        (prepared.out_dir / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    return summary


def _cost(prepared: Prepared) -> dict[str, Any] | None:
    """The run priced on its device, or why it cannot be; None where no device or no trace folder is given."""
    if prepared.scenario.device is None or prepared.out_dir is None:
        return None
    try:
        return price_folder(prepared.out_dir, prepared.scenario.device, Options(quant=prepared.scenario.quant))
    except UsageError as error:
        return {"error": str(error)}


def _steps(prepared: Prepared) -> list[dict[str, Any]]:
    """What each step runs: phase, plan, and by dp rank its tokens, padded rows and [query, context] of its requests."""
    return [
        {
            "phase": parts[0].phase, "plan": parts[0].rank_graph.plan.name,
            "tokens": [part.rank_graph.tokens.real for part in parts],
            "padded": [part.rank_graph.tokens.padded for part in parts],
            "requests": [[[r.query, r.context] for r in part.requests] for part in parts],
        }
        for parts in prepared.schedule
    ]  # fmt: skip


def _expert_rows(per_rank: list[int]) -> dict[str, Any]:
    """Rows that each rank's experts worked on (all layers and steps), and how uneven they are."""
    mean = sum(per_rank) / len(per_rank)
    return {"per_rank": per_rank, "largest_over_mean": round(max(per_rank) / mean, 3) if mean else None}


def _forward_memory(reports: list[dict[str, Any]]) -> dict[str, Any]:
    """The peak of the rank that held most: where it was reached, and what was live (the largest values)."""
    highest = max(reports, key=lambda r: r["memory"]["peak_bytes"])
    return {"rank": highest["rank"], **highest["memory"]}


def _quantisation(prepared: Prepared) -> dict[str, Any] | None:
    """How far the quantised reference is from a float one, over all steps and dp ranks; None of float weights."""
    errors = [part.quantisation for part in prepared.parts if part.quantisation is not None]
    if not errors:
        return None
    worst = max(errors, key=lambda e: e.worst)
    return {
        "products": sum(e.products for e in errors), "largest_error_in_bounds": worst.worst, "module": worst.module,
        "logits_rel_error": max(e.logits for e in errors),
    }  # fmt: skip


def _of_rank(report: dict[str, Any]) -> dict[str, Any]:
    """What one rank compared and found, over all steps, and the peak of its activations and communication buffers."""
    values = [step["values"] for step in report["steps"] if step["values"]]
    return {
        "rank": report["rank"],
        "checked": sum(v["checked"] for v in values),
        "failures": sum(len(v["failures"]) for v in values),
        "max_rel_error": max((v["max_rel_error"] for v in values), default=None),
        "peak_bytes": report["memory"]["peak_bytes"],
        "memory": {k: v for k, v in report["memory"].items() if k != "live"},
    }


def failures_of(reports: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Wrong values of all ranks and steps."""
    return [
        {**failure, "step": number}
        for report in reports
        for number, step in enumerate(report["steps"])
        if step["values"]
        for failure in step["values"]["failures"]
    ]


def _checks(prepared: Prepared, reports: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """([{name, passed, detail}], failures that name a module and a rank)."""
    checks: list[dict[str, Any]] = []

    def add(name: str, problem: str, otherwise: str) -> None:
        checks.append({"name": name, "passed": not problem, "detail": problem or otherwise})

    violations = [(number, v) for number, step in enumerate(prepared.schedule) for v in step[0].rank_graph.violations]
    failures = [_of_violation(number, v) for number, v in violations[:1]]
    broken = f"{len(violations)} broken rules, run on request; first: {violations[0][1]}" if violations else ""
    add("static layout", broken, "every op's layout rule holds")
    if prepared.scenario.mode == "real":
        found = failures_of(reports)
        failures += found
        checked = sum(step["values"]["checked"] for r in reports for step in r["steps"])
        detail = f"{checked} boundary values on {len(reports)} ranks"
        bad = f"{detail}; wrong on {len({f['rank'] for f in found})} ranks" if found else ""
        add("values", bad, f"{detail} equal the one-process reference")
    problems = [problem for step in prepared.schedule for part in step for problem in _window_problems(part)]
    add("windows", "; ".join(problems[:3]), "every real row has one owner, and sees its keys there")
    if prepared.scenario.mode == "real":
        add("caches", *_caches(prepared, reports))
    if quantised := _quantisation(prepared):
        worst = f"largest error {quantised['largest_error_in_bounds']:.3g} of its bound, in {quantised['module']}"
        detail = f"{quantised['products']} products within quantisation error of dequantised weights ({worst})"
        add("quantisation", "" if quantised["largest_error_in_bounds"] <= 1 else worst, detail)
    for name, numbers in _contracts(prepared).items():
        breaches = [(r["rank"], n, b) for r in reports for n in numbers for b in r["steps"][n]["breaches"]]
        failures += [_of_breach(*breach) for breach in breaches]
        total = sum(r["steps"][n]["num_breaches"] for r in reports for n in numbers)
        detail = f"{total} breaches; first: {breaches[0][2]['detail']}" if breaches else ""
        add(f"contract {name}", detail, "boundaries, shapes and exact collective counts hold on every rank")
    same = len({r["log_hash"] for r in reports}) == 1
    add("collective order", "" if same else "ranks made different calls", "the same on every rank")
    return checks, failures


def _caches(prepared: Prepared, reports: list[dict[str, Any]]) -> tuple[str, str]:
    """(what is wrong, what holds): every tp rank of a dp rank has the same caches after every step."""
    for number in range(len(prepared.schedule)):
        for ranks in prepared.mesh.groups("tp"):
            odd = [r for r in ranks if _cache_hash(reports, r, number) != _cache_hash(reports, ranks[0], number)]
            if odd:
                return f"after step {number}, the caches of ranks {ranks[0]} and {odd[0]} differ", ""
    values = [step["values"] for r in reports for step in r["steps"] if step["values"]]
    caches, exact = (sum(v[k] for v in values) for k in ("caches", "exact_caches"))
    return "", f"bit-equal on the ranks of every tp group; {exact} of {caches} cache values bit-equal to the reference"


def _cache_hash(reports: list[dict[str, Any]], rank: int, step: int) -> str:
    return reports[rank]["steps"][step]["cache_hash"]


def _of_violation(step: int, violation: Violation) -> dict[str, Any]:
    sides = {"expected": {"layout": violation.allowed}, "found": {"layout": violation.found}}
    module = violation.module
    place = {"step": step, "layer": layer_of(module), "module": module, "port": "inside", "rank": 0, "order": 2 * 10**9}
    return {**place, **sides, "detail": violation.reason}


def _of_breach(rank: int, step: int, breach: dict[str, Any]) -> dict[str, Any]:
    told = {k: breach[k] for k in ("layer", "module", "port", "expected", "found", "detail")}
    return {**told, "rank": rank, "step": step, "order": 10**9 + breach["seq"]}


def _contracts(prepared: Prepared) -> dict[str, list[int]]:
    """Contract name -> numbers of the steps that it is checked on."""
    found: dict[str, list[int]] = {}
    for number, (part, *_) in enumerate(prepared.schedule):
        if part.contract is not None:
            found.setdefault(part.scenario.contract or str(part.rank_graph.plan.contract), []).append(number)
    return found


def _window_problems(part: Prepared) -> list[str]:
    """Broken invariants of the rows, lengths, positions and slots that each rank derives from the global batch."""
    requests = [r for r in part.requests if r.query]
    tokens = part.rank_graph.tokens
    slots = part.batch.slots.tolist() if part.batch is not None else range(tokens.real)
    batch = GlobalBatch(tuple(requests), tuple(slots), tokens.padded)
    runs = tokens.parts * len(tokens.windows(0))  # a rank's rows are one run, or several in another token order
    return check_invariants(batch, local_batches(batch, parts=runs))


def _in_eps(values: list[dict[str, Any]], dtype: torch.dtype) -> float | None:
    """The largest relative error in units of the run dtype's eps."""
    return max((v["max_rel_error"] for v in values), default=0.0) / torch.finfo(dtype).eps if values else None
