"""What a rank's trace says about communication and boundaries, in the shape of `--json`."""

from collections.abc import Iterable
from typing import Any

from emulator.layout.plan import module_pattern

COUNTED = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast", "slice")


def summarise_collectives(records: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """[{group, op, dim, module, input_shape, output_shape, count, bytes_per_rank}] over the whole run.

    Calls of all layers are summed; module has `*` for the layer number; a dimension that differs between layers (an
    uneven all_to_all) is null; bytes_per_rank is what this rank sends in all of them. Only payload is counted.
    """
    rows: dict[tuple, dict[str, Any]] = {}
    for record in records:
        if record["kind"] != "op" or record["op"] not in COUNTED or record["traffic"] != "payload":
            continue
        module, dim = module_pattern(record["module"]), record["attrs"].get("dim")
        key = (record["group"], record["op"], dim, module, record["attrs"].get("leg"))
        shapes = record["inputs"][0]["shape"], record["outputs"][0]["shape"]
        row = rows.get(key)
        if row is None:
            rows[key] = {
                "group": record["group"], "op": record["op"], "dim": dim, "module": module,
                "input_shape": shapes[0], "output_shape": shapes[1], "count": 1, "bytes_per_rank": record["bytes"],
            }  # fmt: skip
            continue
        row["count"] += 1
        row["bytes_per_rank"] += record["bytes"]
        for name, shape in zip(("input_shape", "output_shape"), shapes):
            row[name] = [a if a == b else None for a, b in zip(row[name], shape)]
    return list(rows.values())


def expert_rows(records: Iterable[dict[str, Any]]) -> int:
    """Rows that this rank's experts worked on, of all layers and steps."""
    return sum(
        r["inputs"][0]["shape"][0]
        for r in records
        if r["kind"] == "op" and r["op"] == "grouped_matmul" and r["module"].endswith("gate_up_proj")
    )


def summarise_boundaries(records: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """[{layer, module, port, layout, shape}] of every value that crosses a module's edge, in order."""
    keys = ("layer", "module", "port", "layout", "shape")
    return [{k: r[k] for k in keys} for r in records if r["kind"] == "boundary"]


def collective_log(records: Iterable[dict[str, Any]]) -> list[tuple]:
    """The order of communicating calls on one rank; it must be the same on all ranks of a group."""
    return [
        (r["group"], r["op"], r["module"], r["attrs"].get("dim"), r["outputs"][0]["dtype"])
        for r in records
        if r["kind"] == "op" and r["group"] is not None and r["op"] != "slice" and r["traffic"] != "verification"
    ]
