"""Where a plan and a contract differ, without running ranks: one rank's shapes are worked out in this process."""

from dataclasses import asdict
from typing import Any

from emulator.errors import UsageError
from emulator.jobs.prepare import Prepared, prepare
from emulator.jobs.rank import run_shapes, step_header
from emulator.layout.plan import load_plan, module_pattern
from emulator.runtime.collectives import Unattended
from emulator.scenario import Scenario
from emulator.trace.record import TraceWriter
from emulator.trace.summary import summarise_collectives
from emulator.verify.contract import Breach, check_trace, load_contract


class _NoBoard:
    def set_status(self, rank: int, text: str) -> None:
        pass


def check_plan(scenario: Scenario, contract: str | None = None) -> dict[str, Any]:
    """The scenario's plan against a contract (default: its own), on rank 0's shapes.

    {verdict, plan, contract, first_boundary (text, or None), differences [{module (with * for layers), port, layers,
    expected, found, detail}], collectives}. Raises UsageError for a plan without a contract, or bad input.
    """
    name = contract or load_plan(scenario.plan, scenario.variants).contract
    if name is None:
        raise UsageError(f"plan {scenario.plan} names no contract: say which with --contract")
    shapes = scenario.model_copy(update={"mode": "shape", "contract": name})
    part = prepare(shapes, graph_only=True)
    records = rank_records(part)
    assert part.contract is not None
    breaches = check_trace(part.contract, records, part.symbols, part.rank_graph.plan.variants)
    at_boundary = next((b for b in breaches if b.port != "inside"), None)
    return {
        "verdict": "fail" if breaches else "pass",
        "plan": part.rank_graph.plan.name,
        "contract": name,
        "description": load_contract(name).description,
        "first_boundary": None if at_boundary is None else _told(at_boundary),
        "differences": _by_pattern(breaches),
        "collectives": summarise_collectives(records),
    }


def rank_records(part: Prepared, rank: int = 0) -> list[dict[str, Any]]:
    """The trace records of one rank of a step in shape mode, without the other ranks."""
    writer = TraceWriter(None, {})
    writer.append({"kind": "step", "step": part.step, **step_header(part)})
    board: Any = _NoBoard()
    collectives = Unattended(part.mesh, rank, board, None, 0.0)
    common = {"mesh": part.mesh, "rank": rank, "collectives": collectives, "board": board, "writer": writer}
    run_shapes(part, rank, {**common, "phase": part.phase})
    return writer.records


def _told(breach: Breach) -> str:
    return f"{breach.detail}; the contract: {breach.expected.get('layout')} {breach.expected.get('shape')}"


def _by_pattern(breaches: list[Breach]) -> list[dict[str, Any]]:
    """Breaches that differ by layer only are one difference."""
    found: dict[tuple, dict[str, Any]] = {}
    for breach in breaches:
        module = module_pattern(breach.module)
        key = module, breach.port, breach.what, str(breach.expected), str(breach.found)
        told = {k: v for k, v in asdict(breach).items() if k in ("port", "expected", "found", "detail", "what")}
        entry = found.setdefault(key, {"module": module, **told, "layers": []})
        if breach.layer is not None:
            entry["layers"].append(breach.layer)
    return list(found.values())
