"""All faults by name, and how a run gets one."""

import difflib
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from emulator.errors import UsageError
from emulator.faults import behaviour, engine, gathers, metadata, reductions, transitions, weights
from emulator.faults.fault import Fault
from emulator.faults.on_graph import GraphEdit
from emulator.faults.on_rank import RankSite
from emulator.layout.rank_graph import RankGraph
from emulator.runtime.mesh import Mesh

FAULTS: dict[str, Fault] = {
    fault.name: fault
    for module in (gathers, reductions, weights, metadata, transitions, behaviour, engine)
    for fault in vars(module).values()
    if isinstance(fault, Fault)
}


def find_fault(name: str) -> Fault:
    """The fault of this name; UsageError, with names close to it, when there is none."""
    if name not in FAULTS:
        close = difflib.get_close_matches(name, FAULTS, n=3)
        hint = f"did you mean {', '.join(close)}?" if close else "see `emulator inject --list`"
        raise UsageError(f"fault {name!r} unknown; {hint}")
    return FAULTS[name]


def inject_in_graph(name: str | None, rank_graph: RankGraph) -> RankGraph:
    """The graph that all ranks run under a fault. UsageError when the fault does not apply to it."""
    if name is None or find_fault(name).kind != "graph":
        return rank_graph
    edit = GraphEdit(rank_graph)
    _inject(find_fault(name), edit)
    return edit.done()


def inject_on_rank(
    name: str | None,
    rank_graph: RankGraph,
    mesh: Mesh,
    rank: int,
    weights: Mapping[str, Tensor],
    inputs: dict[str, Any],
) -> RankSite | None:
    """What one rank holds, is told and does under a fault; None when that is the graph's business only."""
    if name is None or find_fault(name).kind == "graph":
        return None
    site = RankSite(rank_graph, mesh, rank, weights, inputs)
    _inject(find_fault(name), site)
    return site


def _inject(fault: Fault, into: GraphEdit | RankSite) -> None:
    try:
        fault.inject(into)
    except UsageError as error:
        plan = ", ".join((fault.plan, *(f"{k}={v}" for k, v in fault.variants.items())))
        raise UsageError(
            f"fault {fault.name}: {error} (it is made for plan {plan}, {fault.layers} layers or more)"
        ) from None
