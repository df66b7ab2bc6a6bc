"""Where a run's checks failed, as places on the layout map.

summary.json names a rank only for the first broken boundary and for the culprit; of other boundaries it says that they
broke on some rank.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from emulator.layout.plan import module_pattern

SOME_RANK, THIS_RANK = 1, 2


@dataclass(frozen=True)
class Place:
    """port: of a boundary; `inside` for all of a module. node: of one op. ranks: empty where not known. step: None for
    any."""

    module: str
    port: str
    node: str | None
    ranks: tuple[int, ...]
    step: int | None


def places_of(summary: Mapping[str, Any]) -> list[Place]:
    """All places that the summary names."""
    found = []
    if first := summary.get("first_failure"):
        found.append(Place(first["module"], first.get("port", "inside"), None, (first["rank"],), first["step"]))
    if culprit := summary.get("culprit"):
        found.append(Place(culprit["module"], "inside", culprit["node"], tuple(culprit["ranks"]), culprit.get("step")))
    step = first["step"] if first else None
    found += [Place(module, port, None, (), step) for module, port in summary.get("broken_boundaries", ())]
    return found


def marks_of(ops: Sequence[Mapping[str, Any]], places: Sequence[Place], rank: int, step: int) -> dict[int, int]:
    """Position in `ops` -> SOME_RANK or THIS_RANK, for the ops of one rank and step."""
    marks: dict[int, int] = {}
    for place in places:
        if place.step not in (None, step) or (place.ranks and rank not in place.ranks):
            continue
        for position in _hit(ops, place):
            marks[position] = max(marks.get(position, 0), THIS_RANK if place.ranks else SOME_RANK)
    return marks


def _hit(ops: Sequence[Mapping[str, Any]], place: Place) -> list[int]:
    """The ops at a place: those of the module, its first for an input, its last for an output."""
    if place.node is not None:
        return [i for i, op in enumerate(ops) if op["node"] == place.node]
    inside = [i for i, op in enumerate(ops) if _within(op["module"], place.module)]
    if place.port == "inside" or not inside:
        return inside
    return inside[:1] if place.port == "input" else inside[-1:]


def _within(module: str, outer: str) -> bool:
    if "*" in outer:
        module = module_pattern(module)
    return module == outer or module.startswith(outer + ".")
