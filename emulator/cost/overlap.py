"""Which collectives of a step run beside compute, and from where to where.

A record may say so itself: attrs["async"] = {"start": node, "wait": node}: it is issued before the node `start` runs
and waited for before the node `wait` runs (null: in the next step). Where no record of a step says so:

* the gather of the KV row (an all_gather of module self_attn.cache) is issued where it stands, and waited for at the
  first later record of its layer that takes its output (same shape, dtype and layout);
* a gather or broadcast of a weight depends on no activation. It is issued after the KV gather of its layer has been
  waited for (vLLM-Ascend, sfa_v1), or else before the first record of the module that holds it (self_attn, mlp), and
  waited for at the first record of its own module that takes its output.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from emulator.cost.comm import COLLECTIVES, is_weight
from emulator.cost.mapping import Contradiction

Record = Mapping[str, Any]
# positions before which a collective is issued and waited for; None: the next step waits
Span = tuple[int, int | None]


def async_spans(records: Sequence[tuple[int, Record]]) -> dict[int, Span]:
    """Position of a collective -> where it is issued and waited for. records: (position in the step, priced record).

    Raises Contradiction (with the position as its second argument) for an unknown node, or a wait before the start.
    """
    if any("async" in record["attrs"] for _, record in records):
        return _told(records)
    spans: dict[int, Span] = {}
    kv_waits: dict[Any, int] = {}
    firsts = _first_records(records)
    for at, (position, record) in enumerate(records):
        if record["op"] == "all_gather" and record["module"].endswith("self_attn.cache"):
            wait = _consumer(records, at, lambda r, layer=record["layer"]: r["layer"] == layer)
            if wait is not None:
                spans[position] = position, wait
                kv_waits[record["layer"]] = wait
    for at, (position, record) in enumerate(records):
        if record["op"] in ("all_gather", "broadcast") and is_weight(record["inputs"][0]["layout"]):
            wait = _consumer(records, at, lambda r, module=record["module"]: r["module"] == module)
            if wait is None:
                continue
            holder = record["module"].rpartition(".")[0]
            start = firsts[holder]
            if holder.endswith("self_attn"):
                start = kv_waits.get(record["layer"], start)
            spans[position] = min(start, position), wait
    return spans


def _first_records(records: Sequence[tuple[int, Record]]) -> dict[str, int]:
    """Position of the first record in or below each module."""
    firsts: dict[str, int] = {}
    for position, record in records:
        module = record["module"]
        while module:
            firsts.setdefault(module, position)
            module = module.rpartition(".")[0]
    return firsts


def _told(records: Sequence[tuple[int, Record]]) -> dict[int, Span]:
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


def _consumer(records: Sequence[tuple[int, Record]], at: int, near: Any) -> int | None:
    """Position of the first later record close by that takes the output of record number `at`."""
    output = records[at][1]["outputs"][0]
    return next((p for p, r in records[at + 1 :] if near(r) and output in r["inputs"]), None)
