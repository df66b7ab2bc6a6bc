"""Which collectives of a step run beside compute, and from where to where.

A record says so: attrs["async"] = {"start": node, "wait": node}: it is issued before the node `start` runs and waited
for before the node `wait` runs (null: in the next step). Plans start gathers of the KV row and of weights ahead.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from emulator.cost.comm import COLLECTIVES
from emulator.cost.mapping import Contradiction

Record = Mapping[str, Any]
# positions before which a collective is issued and waited for; None: the next step waits
Span = tuple[int, int | None]


def async_spans(records: Sequence[tuple[int, Record]]) -> dict[int, Span]:
    """Position of a collective -> where it is issued and waited for. records: (position in the step, priced record).

    Raises Contradiction (with the position as its second argument) for an unknown node, or a wait before the start.
    """
    at_node: dict[str, int] = {}
    for position, record in records:
        at_node.setdefault(record["node"], position)
    spans: dict[int, Span] = {}
    for position, record in records:
        if "async" not in record["attrs"] or record["op"] not in COLLECTIVES:
            continue
        nodes = record["attrs"]["async"]
        for name in ("start", "wait"):
            if nodes.get(name) not in at_node and (name == "start" or nodes.get(name, "") is not None):
                raise Contradiction(f"async {name} names node {nodes.get(name)!r}, which no record has", position)
        start, wait = at_node[nodes["start"]], at_node.get(nodes["wait"])
        if wait is not None and wait < start:
            raise Contradiction(f"async: waited for at {nodes['wait']}, before it starts at {nodes['start']}", position)
        spans[position] = start, wait
    return spans
