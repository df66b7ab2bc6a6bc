"""From the reports of all ranks to one verdict: checks, first failure, and the summary object of `--json`."""

import json
import resource
from typing import Any

import torch

from emulator.prepare import Prepared
from emulator.trace.summary import layer_of


def summarise(
    prepared: Prepared, reports: list[dict[str, Any]], wall_s: float, culprit: dict[str, Any] | None = None
) -> dict[str, Any]:
    """The summary object of `--json`, also written to out_dir/summary.json. culprit: what locate.locate found."""
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
        "first_failure": {k: v for k, v in first.items() if k not in ("order", "node", "edges")} if first else None,
        "culprit": culprit,
        "broken_boundaries": sorted({tuple(e) for f in failures for e in f.get("edges", [(f["module"], f["port"])])}),
        "collectives": reports[0]["collectives"],
        "boundaries": reports[0]["boundaries"],
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
    }
    if prepared.out_dir:
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
    for v in violations[:1]:
        sides = {"expected": {"layout": v.allowed}, "found": {"layout": v.found}}
        place = {"layer": layer_of(v.module), "module": v.module, "port": "inside", "rank": 0, "order": 2 * 10**9}
        failures.append({**place, **sides, "detail": v.reason})
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
        keys = ("layer", "module", "port", "expected", "found", "detail")
        failures += [{**{k: b[k] for k in keys}, "rank": rank, "order": 10**9 + b["seq"]} for rank, b in breaches]
        total = sum(r["num_breaches"] for r in reports)
        detail = (
            breaches[0][1]["detail"]
            if breaches
            else "boundaries, shapes and exact collective counts hold on every rank"
        )
        add(
            f"contract {prepared.scenario.contract or prepared.rank_graph.plan.contract}",
            not breaches,
            f"{total} breaches; first: {detail}" if breaches else detail,
        )
    same = len({r["log_hash"] for r in reports}) == 1
    add("collective order", same, "the same on every rank" if same else "ranks made different calls")
    return checks, failures


def _in_eps(values: list[dict[str, Any]], dtype: torch.dtype) -> float | None:
    """The largest relative error in units of the run dtype's eps."""
    return max((v["max_rel_error"] for v in values), default=0.0) / torch.finfo(dtype).eps if values else None
