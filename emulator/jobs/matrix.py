"""The detection matrix: every fault on two models, ranks and token counts; what finds it, where, and as what."""

import re
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from emulator.errors import RankError
from emulator.faults.catalogue import FAULTS, find_fault
from emulator.faults.fault import Case, Fault
from emulator.jobs import job
from emulator.jobs.prepare import prepare
from emulator.layout.placement import Tokens
from emulator.layout.plan import module_pattern
from emulator.model.workload import build_workload
from emulator.scenario import Parallel, Scenario, load_scenario, parse_requests
from emulator.trace.record import read_trace, trace_files
from emulator.verify.contract import check_folder, load_contract

MODELS = ("glm-5.1-mini", "deepseek-v3.2-mini")
TOKENS = {2: (16, 13, 1), 4: (16, 13, 3)}  # by tp: they divide, they do not, fewer than ranks
CHECKS = ("static", "shapes", "counts", "values", "rank error")
_DOING = re.compile(r"(?:running|waiting in) (\S+) \(\S+\) of (\S+)")
_TIMEOUT_S = 30.0  # no cell takes a second, but the machine may be busy

State = Literal["detected", "no effect", "missed", "unexpected"]
STATES: tuple[State, ...] = ("detected", "no effect", "missed", "unexpected")


@dataclass(frozen=True)
class Cell:
    """One run of the matrix. requests: of a ragged batch (the command line's form), in place of one of `tokens`."""

    fault: str
    model: str
    tp: int
    tokens: int
    requests: str = ""


@dataclass(frozen=True)
class Outcome:
    """What came of one cell.

    state: unexpected is a failure where the fault claims to have no effect. reason: of having none. seen: CHECKS that
    failed. node_right, diagnosis_right: None where nothing was named, and where there was nothing to diagnose (values
    are right, or a rank failed before they were compared). place, kind, text: what was named.
    """

    cell: Cell
    state: State
    reason: str = ""
    seen: tuple[str, ...] = ()
    node_right: bool | None = None
    diagnosis_right: bool | None = None
    place: str = ""
    kind: str = ""
    text: str = ""
    seconds: float = 0.0


def cells(
    faults: Iterable[str] | None = None, models: Iterable[str] | None = None, tps: Iterable[int] | None = None,
    tokens: Iterable[int] | None = None, requests: Iterable[str] | None = None,
) -> Iterator[Cell]:  # fmt: skip
    """The matrix, or the part of it with these faults, models, tp sizes and token counts, or these batches."""
    for fault in faults or FAULTS:
        for model in models or MODELS:
            for tp in tps or TOKENS:
                name = find_fault(fault).name
                if requests:
                    yield from (Cell(name, model, tp, _num_tokens(batch), batch) for batch in requests)
                else:
                    yield from (Cell(name, model, tp, n) for n in tokens or TOKENS.get(tp, (16, 13, tp - 1)))


def faulty_scenario(fault: Fault, scenario: str, overrides: dict[str, Any]) -> Scenario:
    """A scenario with a fault, under the plan and sizes that the fault is made for unless `overrides` say others."""
    given = {
        **overrides, "fault": fault.name, "static_check": False, "plan": overrides.get("plan") or fault.plan,
        "variants": {**fault.variants, **(overrides.get("variants") or {})},
        "timeout": overrides.get("timeout") or fault.timeout, "mtp": overrides.get("mtp") or fault.mtp,
    }  # fmt: skip
    loaded = load_scenario(scenario, given)
    if fault.ep_parts is None or loaded.parallel.ep is not None:
        return loaded
    ep = max(1, loaded.parallel.tp // fault.ep_parts)
    return loaded.model_copy(update={"parallel": loaded.parallel.model_copy(update={"ep": ep})})


def scenario_of(cell: Cell) -> Scenario:
    """What a cell runs: the fewest layers that show its fault."""
    fault = find_fault(cell.fault)
    parallel = Parallel(tp=cell.tp, ep=max(1, cell.tp // fault.ep_parts) if fault.ep_parts else None)
    return Scenario(
        name=cell.fault, model=cell.model, plan=fault.plan, variants=dict(fault.variants), parallel=parallel,
        tokens=cell.tokens, layers=fault.layers, mtp=fault.mtp, fault=fault.name, static_check=False,
        timeout=fault.timeout or _TIMEOUT_S, step=[parse_requests(cell.requests)] if cell.requests else [],
    )  # fmt: skip


def _num_tokens(requests: str) -> int:
    [of_rank] = parse_requests(requests).by_dp_rank()
    return sum(r.query for r in of_rank)


def case_of(scenario: Scenario) -> Case:
    """What a claim of no effect may look at."""
    config = scenario.config()
    mesh = scenario.mesh(config)
    [[requests]] = scenario.steps()
    workload = build_workload(
        config, [requests], seed=scenario.seed, dp_index=0, dtype=scenario.torch_dtype,
        block_size=scenario.options().block_size,
    )  # fmt: skip
    return Case(config, mesh, Tokens(scenario.num_tokens, mesh.tp), workload.steps[0].input_ids)


def run_cell(cell: Cell) -> Outcome:
    """Runs one cell on ranks forked from this process."""
    started = time.perf_counter()
    fault, scenario = find_fault(cell.fault), scenario_of(cell)
    reason = fault.no_effect(case_of(scenario)) or ""
    with tempfile.TemporaryDirectory() as folder:
        try:
            summary = job.run(scenario, Path(folder))
        except RankError as error:
            found = _of_error(fault, scenario, error)
        else:
            found = _of_summary(fault, summary, _breaches(scenario, summary, Path(folder)))
    failed = bool(found["seen"])
    state: State = "detected" if failed else "no effect" if reason else "missed"
    if failed and reason:
        state = "unexpected"
    return Outcome(cell, state, reason, seconds=round(time.perf_counter() - started, 2), **found)


def _breaches(scenario: Scenario, summary: dict[str, Any], folder: Path) -> set[str]:
    """What the contract's breaches are about, on all ranks."""
    name = next((c["name"].split()[1] for c in summary["checks"] if c["name"].startswith("contract")), None)
    if name is None:
        return set()
    traces = [read_trace(path) for path in trace_files(folder)]
    return {b["what"] for b in check_folder(load_contract(name), traces)["breaches"]}


def _of_summary(fault: Fault, summary: dict[str, Any], breaches: set[str]) -> dict[str, Any]:
    failed = {c["name"].split()[0] for c in summary["checks"] if not c["passed"]}
    seen = {
        "static": "static" in failed, "shapes": bool(breaches & {"shape", "layout"}), "counts": "count" in breaches,
        "values": "values" in failed, "rank error": False,
    }  # fmt: skip
    assert not failed or any(seen.values()), failed
    culprit, first = summary.get("culprit"), summary["first_failure"] or {}
    found: dict[str, Any] = {"seen": tuple(c for c in CHECKS if seen[c])}
    if culprit:
        found |= {
            "node_right": _is_there(fault, culprit["module"], culprit["op"]),
            "diagnosis_right": culprit["kind"] in fault.diagnoses,
            "place": f"{culprit['op']} of {culprit['module']}", "kind": culprit["kind"], "text": culprit["text"],
        }  # fmt: skip
    elif failed:
        values = "values" in failed
        found |= {
            "node_right": _is_there(fault, first["module"], None), "diagnosis_right": False if values else None,
            "place": first["module"], "text": first["detail"],
        }  # fmt: skip
    return found


def _of_error(fault: Fault, scenario: Scenario, error: RankError) -> dict[str, Any]:
    """A rank that raised, stalled or made another call: the report names what it, or a rank it met, was doing."""
    report = error.report
    blamed = [report.get("doing") or "", *(report.get("others", {}).get(r) or "" for r in report.get("culprits", ()))]
    named = [match for text in blamed if (match := _DOING.search(text))]
    culprit = report.get("culprit")
    broken = prepare(scenario, graph_only=True).rank_graph.violations
    return {
        "seen": ("static", "rank error") if broken else ("rank error",),
        "node_right": any(_is_there(fault, m[2], m[1]) for m in named),
        "diagnosis_right": culprit["kind"] in fault.diagnoses if culprit else None,
        "place": f"{named[0][1]} of {named[0][2]}" if named else "",
        "kind": culprit["kind"] if culprit else report.get("kind", ""),
        "text": culprit["text"] if culprit else str(error),
    }


def _is_there(fault: Fault, module: str, op: str | None) -> bool:
    """Whether a node is where the fault's first wrong node is; op None: only the module is known."""
    pattern = module_pattern(module)
    return any(
        p.module == pattern and (op is None or not p.ops or op in p.ops) for p in fault.places
    )  # fmt: skip


@dataclass(frozen=True)
class Row:
    """All cells of one fault."""

    fault: str
    kind: str
    outcomes: tuple[Outcome, ...]

    def count(self, *states: State) -> int:
        return sum(o.state in states for o in self.outcomes)

    @property
    def seen(self) -> dict[str, int]:
        """By check, in how many cells it failed."""
        return {c: sum(c in o.seen for o in self.outcomes) for c in CHECKS}

    @property
    def reasons(self) -> list[str]:
        """Why it has no effect in some cells."""
        return list(dict.fromkeys(o.reason for o in self.outcomes if o.state == "no effect"))


def rows(outcomes: Iterable[Outcome]) -> list[Row]:
    """Outcomes by fault, in their order."""
    by_fault: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        by_fault.setdefault(outcome.cell.fault, []).append(outcome)
    return [Row(name, find_fault(name).kind, tuple(found)) for name, found in by_fault.items()]


def totals(outcomes: list[Outcome]) -> dict[str, Any]:
    """{faults, cells, a number per state, node and diagnosis {right, of}, seconds, only}.

    only: by check, the faults that no other check sees in any cell.
    """
    only = {c: [r.fault for r in rows(outcomes) if {o.seen for o in r.outcomes if o.seen} == {(c,)}] for c in CHECKS}
    return {
        "faults": len(rows(outcomes)), "cells": len(outcomes),
        **{state: sum(o.state == state for o in outcomes) for state in STATES},
        "node": _share([o.node_right for o in outcomes]), "diagnosis": _share([o.diagnosis_right for o in outcomes]),
        "seconds": round(sum(o.seconds for o in outcomes), 1), "only": only,
    }  # fmt: skip


def _share(judged: list[bool | None]) -> dict[str, int]:
    known = [j for j in judged if j is not None]
    return {"right": sum(known), "of": len(known)}


def as_json(outcomes: list[Outcome]) -> dict[str, Any]:
    """{totals, cells: [{fault, model, tp, tokens, state, reason, seen, node_right, ...}]}."""
    flat = []
    for outcome in outcomes:
        fields = asdict(outcome)
        flat.append({**fields.pop("cell"), **fields})
    return {"totals": totals(outcomes), "cells": flat}
