"""The layout map's data: states, folding of layers and steps, ranks that stopped."""

from typing import Any

import pytest

from emulator.report_html.failures import Place
from emulator.report_html.layout_map import STATES, Words, layout_map, state_of


@pytest.mark.parametrize(
    ("layout", "state"),
    [
        ("full-token", "full-token"), ("group-token", "full-token"), ("local-token", "local-token"),
        ("group-local-token", "local-token"), ("partial", "partial"), ("local-token+partial", "partial"),
        ("group-partial", "partial"), ("shard(1)", "feature shard"), ("expert-rows", "expert or token rows"),
        ("token-rows", "expert or token rows"), ("replicated", "other (weights, caches)"),
        ("tp:shard(0)", "other (weights, caches)"),
    ],
)  # fmt: skip
def test_state_of_a_layout(layout: str, state: str) -> None:
    assert STATES[state_of(layout)] == state


def op(number: int, name: str, layer: int | None, layout: str = "full-token", **more: Any) -> dict[str, Any]:
    module = f"model.layers.{layer}.self_attn" if layer is not None else "model.norm"
    value = {"shape": [7, 5], "dtype": "float64", "layout": layout}
    return {
        "node": f"n{number}", "op": name, "module": module, "layer": layer, "group": None, "traffic": "payload",
        "inputs": [value], "outputs": [value], "window": None, "seq": number, **more,
    }  # fmt: skip


def step(number: int) -> dict[str, Any]:
    return {"step": number, "phase": "prefill", "plan": "tp", "requests": [[7, 0]]}


def three_layers(first: int = 0) -> list[dict[str, Any]]:
    ops = []
    for layer in range(3):
        ops += [op(first + 2 * layer, "linear", layer, "partial")]
        ops += [op(first + 2 * layer + 1, "all_reduce", layer, group="tp")]
    return [*ops, op(first + 6, "rms_norm", None)]


def shown(ops: list, places: list[Place] | None = None, steps: int = 1) -> tuple[list[dict[str, Any]], list[str]]:
    words = Words()
    return layout_map([step(n) for n in range(steps)], ops, places or [], words), list(words.numbers)


def test_layers_that_are_alike_are_one_kind() -> None:
    (drawn,), words = shown([[three_layers(), three_layers()]])
    layers, last = drawn["kinds"]
    assert layers["layers"] == [0, 1, 2]
    assert last["layers"] == []
    assert [(words[op], words[module], comm) for op, module, comm in layers["columns"]] == [
        ("linear", "self_attn", 0), ("all_reduce", "self_attn", 1),
    ]  # fmt: skip
    assert [[cell[0] for cell in row] for row in layers["cells"]] == [[2, 0], [2, 0]]  # partial, full-token
    assert words[layers["cells"][0][0][1]] == "[7, 5] partial\n-> [7, 5] partial"


def test_a_layer_that_differs_on_one_rank_stands_apart() -> None:
    other = three_layers()
    other[2] = op(2, "linear", 1, "local-token", window=[3, 7])
    (drawn,), words = shown([[three_layers(), other]])
    assert [kind["layers"] for kind in drawn["kinds"]] == [[0, 2], [1], []]
    cells = drawn["kinds"][1]["cells"]
    assert [row[0][0] for row in cells] == [STATES.index("partial"), STATES.index("local-token")]
    assert words[cells[1][0][2]] == "real tokens 3 to 7"


def test_a_layer_with_a_failure_stands_apart() -> None:
    place = Place("model.layers.2.self_attn", "output", None, (1,), 0)
    (drawn,), _ = shown([[three_layers(), three_layers()]], [place])
    assert [kind["layers"] for kind in drawn["kinds"]] == [[0, 1], [2], []]
    assert [[cell[3] for cell in row] for row in drawn["kinds"][1]["cells"]] == [[0, 0], [0, 2]]


def test_shapes_that_depend_on_data_do_not_set_layers_apart() -> None:
    ops = three_layers()
    ops[2] = op(2, "linear", 1, "partial", inputs=[{"shape": [9, 5], "dtype": "float64", "layout": "partial"}])
    (drawn,), _ = shown([[ops]])
    assert [kind["layers"] for kind in drawn["kinds"]] == [[0, 1, 2], []]


def test_a_rank_that_stopped_has_empty_cells() -> None:
    (drawn,), words = shown([[three_layers(), three_layers()[:3]]])
    assert [kind["layers"] for kind in drawn["kinds"]] == [[0], [1], [2], []]
    states = [[STATES[cell[0]] for cell in kind["cells"][1]] for kind in drawn["kinds"]]
    assert states == [["partial", "full-token"], ["partial", "not run"], ["not run", "not run"], ["not run"]]
    assert words[drawn["kinds"][1]["cells"][1][1][1]] == "this rank did not get here"


def test_what_layers_share_is_shown_in_the_layer_that_needs_it_first() -> None:
    ops = three_layers()
    ops.insert(1, op(50, "slice", None, "local-token", module="model.layers", group="tp"))
    (drawn,), words = shown([[ops]])
    assert [kind["layers"] for kind in drawn["kinds"]] == [[0], [1, 2], []]
    assert [words[c[0]] for c in drawn["kinds"][0]["columns"]] == ["linear", "slice", "all_reduce"]
    assert [c[2] for c in drawn["kinds"][0]["columns"]] == [0, 0, 1]  # a slice is no collective


def test_steps_that_are_alike_are_one_entry() -> None:
    verification = op(90, "all_gather", 0, group="tp", traffic="verification")
    first, second, third = three_layers(), [*three_layers(), verification], three_layers()[:-1]
    drawn, _ = shown([[first], [second], [third]], steps=3)
    assert [entry["steps"] for entry in drawn] == [[0, 1], [2]]
