"""The layout map: ops along x, ranks along y, folded by kinds of layers.

Layers whose ops, layouts and failures are the same on every rank are one kind, and so are steps that hold the same
kinds; the map shows the first layer of each kind.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from emulator.export.wall_clock import is_collective
from emulator.layout.plan import module_pattern
from emulator.report_html.failures import Place, marks_of

Op = Mapping[str, Any]

# state of the value that an op leaves -> its index in the page's colours
STATES = (
    "full-token",
    "local-token",
    "partial",
    "feature shard",
    "expert or token rows",
    "other (weights, caches)",
    "not run",
)
_OTHER, _NOT_RUN = len(STATES) - 2, len(STATES) - 1


def state_of(layout: str) -> int:
    """The state of a value by its layout's name."""
    if "+" in layout or "partial" in layout:
        return STATES.index("partial")
    word = layout.removeprefix("group-")
    if word == "token":
        return STATES.index("full-token")
    if word in ("full-token", "local-token"):
        return STATES.index(word)
    if word.endswith("-rows"):
        return STATES.index("expert or token rows")
    return STATES.index("feature shard") if word.startswith("shard(") else _OTHER


class Words:
    """Texts by number: each is in the page once."""

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}

    def __call__(self, text: str) -> int:
        return self.numbers.setdefault(text, len(self.numbers))


def layout_map(
    steps: Sequence[Mapping[str, Any]], ops: Sequence[Sequence[Sequence[Op]]], places: Sequence[Place], words: Words
) -> list[dict[str, Any]]:
    """One entry per kind of step. ops: by step, rank and place in the step; verification traffic is left out.

    Entry: {steps (numbers), phase, plan, requests, kinds}; kind: {layers (numbers; empty outside layers), columns [[op,
    module within the layer, collective 0 or 1], ...], cells [rank][column]: [state, text, token window, mark]}. Texts
    are numbers of `words`.
    """
    found: dict[tuple, dict[str, Any]] = {}
    for step, by_rank in zip(steps, ops):
        kinds = _kinds([[op for op in own if op["traffic"] != "verification"] for own in by_rank], places, step["step"])
        key = (step["phase"], step["plan"], tuple(kinds))
        if key in found:
            found[key]["steps"].append(step["step"])
            continue
        found[key] = {
            "steps": [step["step"]], "phase": step["phase"], "plan": step["plan"], "requests": step["requests"],
            "kinds": [_drawn(layers, segment, words) for layers, segment in kinds.values()],
        }  # fmt: skip
    return list(found.values())


_Column = tuple[str, str, int]  # op, module without its layer, collective
_Cell = tuple[Op | None, int]  # record, mark
_Segment = tuple[list[_Column], list[list[_Cell]]]


def _kinds(by_rank: list[list[Op]], places: Sequence[Place], step: int) -> dict[tuple, tuple[list[int], _Segment]]:
    """Signature -> (layers, the first such layer), in the order of the run."""
    columns, layers, rows = _aligned(by_rank, places, step)
    kinds: dict[tuple, tuple[list[int], _Segment]] = {}
    at = 0
    for layer, group in groupby(layers):
        width = len(list(group))
        segment = columns[at : at + width], [row[at : at + width] for row in rows]
        signature = _signature(segment, layer is None)
        kinds.setdefault(signature, ([], segment))[0].extend([] if layer is None else [layer])
        at += width
    return kinds


def _aligned(
    by_rank: list[list[Op]], places: Sequence[Place], step: int
) -> tuple[list[_Column], list[int | None], list[list[_Cell]]]:
    """Columns after the rank that came furthest, the layer of each, and each rank's cells under them."""
    keyed = [_keyed(own) for own in by_rank]
    longest = max(keyed, key=len)
    columns = [(op["op"], _short(op["module"]), int(is_collective(op))) for op, _ in longest.values()]
    rows: list[list[_Cell]] = []
    for rank, mine in enumerate(keyed):
        marks = marks_of(by_rank[rank], places, rank, step)
        found = [mine.get(key) for key in longest]
        rows.append([(None, 0) if cell is None else (cell[0], marks.get(cell[1], 0)) for cell in found])
    return columns, _layers([op["layer"] for op, _ in longest.values()]), rows


def _layers(layers: list[int | None]) -> list[int | None]:
    """What all layers share (such as lengths) is worked out inside the first layer that needs it, and shown there."""
    inside = [layer for layer in layers if layer is not None]
    if not inside:
        return layers
    first, last = layers.index(inside[0]), len(layers) - layers[::-1].index(inside[-1])
    for i in range(first, last):
        if layers[i] is None:
            layers[i] = layers[i - 1]
    return layers


def _keyed(own: Sequence[Op]) -> dict[tuple, tuple[Op, int]]:
    """What stands for the same op on every rank -> (record, its position)."""
    seen: Counter[tuple] = Counter()
    keyed = {}
    for position, op in enumerate(own):
        name = (op["node"], op["op"], op["traffic"])
        keyed[*name, seen[name]] = op, position
        seen[name] += 1
    return keyed


def _short(module: str) -> str:
    """A module's name inside its layer."""
    return module_pattern(module).removeprefix("model.layers.*").removeprefix(".").removeprefix("model.") or module


def _signature(segment: _Segment, outside: bool) -> tuple:
    columns, rows = segment
    layouts = tuple(
        tuple((tuple(t["layout"] for t in (*op["inputs"], *op["outputs"])) if op else None, mark) for op, mark in row)
        for row in rows
    )
    return tuple(columns), layouts, outside


def _drawn(layers: list[int], segment: _Segment, words: Words) -> dict[str, Any]:
    columns, rows = segment
    return {
        "layers": layers,
        "columns": [[words(op), words(module), collective] for op, module, collective in columns],
        "cells": [[_cell(op, mark, words) for op, mark in row] for row in rows],
    }


def _cell(op: Op | None, mark: int, words: Words) -> list[int]:
    if op is None:
        return [_NOT_RUN, words("this rank did not get here"), words(""), mark]
    sides = (" + ".join(describe(tensor) for tensor in op[side]) for side in ("inputs", "outputs"))
    window = "real tokens {} to {}".format(*op["window"]) if op["window"] else ""
    return [state_of(op["outputs"][0]["layout"]), words("\n-> ".join(sides)), words(window), mark]


def describe(tensor: Mapping[str, Any]) -> str:
    """`[4096, 6144] full-token`."""
    return f"{tensor['shape']} {tensor['layout']}"
