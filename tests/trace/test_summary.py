"""Summaries of hand-made records: layers merged, differing dimensions null, only payload counted."""

from typing import Any

import pytest

from emulator.layout.plan import layer_of
from emulator.trace.summary import collective_log, summarise_boundaries, summarise_collectives

Record = dict[str, Any]


def call(op: str, module: str, given: list[int], made: list[int], **changes: Any) -> Record:
    return {
        "kind": "op", "op": op, "module": module, "group": "tp", "traffic": "payload", "bytes": 100,
        "attrs": {"dim": 0}, "inputs": [{"shape": given, "dtype": "float64"}],
        "outputs": [{"shape": made, "dtype": "float64"}], **changes,
    }  # fmt: skip


def test_layers_are_merged() -> None:
    records = [call("all_gather", f"model.layers.{i}.self_attn", [3, 10], [12, 10], bytes=7 + i) for i in range(4)]
    assert summarise_collectives(records) == [
        {
            "group": "tp", "op": "all_gather", "dim": 0, "module": "model.layers.*.self_attn",
            "input_shape": [3, 10], "output_shape": [12, 10], "count": 4, "bytes_per_rank": 7 + 8 + 9 + 10,
        }
    ]  # fmt: skip


def test_dimensions_that_differ_between_layers_are_null() -> None:
    module = "model.layers.{}.mlp.experts.gate_up_proj"
    rows = [([6, 10], [8, 10]), ([6, 10], [5, 10]), ([4, 10], [5, 10])]
    records = [call("all_to_all", module.format(i), *r, group="ep") for i, r in enumerate(rows)]
    (row,) = summarise_collectives(records)
    assert (row["input_shape"], row["output_shape"], row["count"]) == ([None, 10], [None, 10], 3)


def test_a_dimension_once_null_stays_null() -> None:
    records = [call("all_to_all", "m", [n, 10], [3, 10]) for n in (6, 4, 4)]
    assert summarise_collectives(records)[0]["input_shape"] == [None, 10]


APART = [
    ("op", {"op": "reduce_scatter"}),
    ("group", {"group": "ep"}),
    ("dim", {"attrs": {"dim": 1}}),
    ("module", {"module": "lm_head"}),
    ("leg of an exchange", {"attrs": {"dim": 0, "leg": "expert-rows"}}),
]


@pytest.mark.parametrize("change", [a[1] for a in APART], ids=[a[0] for a in APART])
def test_different_calls_are_kept_apart(change: Record) -> None:
    first = call("all_gather", "model.layers.0.self_attn", [3, 10], [12, 10])
    rows = summarise_collectives([first, first | change, first])
    assert [r["count"] for r in rows] == [2, 1]


@pytest.mark.parametrize("traffic", ["metadata", "verification"])
def test_only_payload_is_counted(traffic: str) -> None:
    records = [
        call("all_gather", "m", [3, 10], [12, 10]),
        call("all_gather", "m", [3], [12], traffic=traffic),
    ]
    assert [r["count"] for r in summarise_collectives(records)] == [1]


def test_only_transitions_between_layouts_are_counted() -> None:
    # pad and unpad are local; slice sends nothing but is a transition of the layout
    ops = ["linear", "pad", "unpad", "slice", "all_reduce", "reduce_scatter", "all_gather", "all_to_all"]
    records = [call(op, "m", [3, 10], [12, 10]) for op in ops]
    records.append({"kind": "boundary", "module": "m", "port": "input", "layer": None, "layout": "x", "shape": [1]})
    assert [r["op"] for r in summarise_collectives(records)] == ops[3:]


def test_summaries_do_not_write_into_the_records() -> None:
    records = [call("all_to_all", "m", [n, 10], [3, 10]) for n in (6, 4)]
    summarise_collectives(records)
    assert [r["inputs"][0]["shape"] for r in records] == [[6, 10], [4, 10]]


def test_boundaries_in_order() -> None:
    edges = [
        {"layer": i, "module": f"model.layers.{i}.mlp", "port": "output", "layout": "local-token", "shape": [3, 10]}
        for i in (0, 1)
    ]
    records = [{"kind": "boundary", "seq": 5, "dtype": "float64", "node": "n", **e} for e in edges]
    assert summarise_boundaries([records[0], call("slice", "m", [4], [1]), records[1]]) == edges


def test_the_log_of_calls_is_in_order_and_tells_what_ranks_must_agree_on() -> None:
    records = [
        call("all_gather", "model.layers.0.self_attn", [3, 10], [12, 10]),
        call("slice", "model.layers.0.self_attn.o_proj", [12, 10], [3, 10]),  # sends nothing
        call("linear", "m", [3, 10], [3, 10], group=None),
        call("all_to_all", "m", [1, 8], [4, 2], traffic="metadata", attrs={"dim": 1}, group="ep"),  # sends all the same
        call("all_gather", "m", [3], [12], traffic="verification"),  # what the checks send is not part of the run
        call("all_reduce", "m", [3, 10], [3, 10], attrs={}),
    ]
    assert collective_log(records) == [
        ("tp", "all_gather", "model.layers.0.self_attn", 0, "float64"),
        ("ep", "all_to_all", "m", 1, "float64"),
        ("tp", "all_reduce", "m", None, "float64"),
    ]


@pytest.mark.parametrize(
    ("module", "layer"),
    [("model.layers.12.mlp.experts", 12), ("model.layers.0", 0), ("lm_head", None), ("model.norm", None), ("", None)],
)
def test_layer_of(module: str, layer: int | None) -> None:
    assert layer_of(module) == layer
