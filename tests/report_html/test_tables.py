"""The page's tables, on a made timeline whose times are whole numbers."""

from typing import Any

import pytest

from emulator.cost.kernel import Cost, Kernel, Slice, Timeline
from emulator.cost.totals import by_bound, by_source
from emulator.report_html import tables


def boundary(module: str, port: str, layout: str, shape: list[int], layer: int | None = 0) -> dict[str, Any]:
    return {"module": module, "port": port, "layout": layout, "shape": shape, "layer": layer}


NORM, CACHE = "model.layers.0.input_layernorm", "model.layers.0.self_attn.cache"


def test_boundaries_of_one_layer() -> None:
    zero = [
        boundary(NORM, "input", "local-token", [4, 6]), boundary(NORM, "output", "local-token", [4, 6]),
        boundary(CACHE, "output", "replicated", [9, 9]), boundary("model.norm", "input", "full-token", [8, 6], None),
        boundary("model.layers.1.mlp", "input", "full-token", [8, 6], 1),
    ]  # fmt: skip
    one = [boundary(NORM, "input", "local-token", [4, 6]), boundary(NORM, "output", "full-token", [8, 6])]
    two = [boundary(NORM, "input", "local-token", [3, 6]), boundary(NORM, "output", "full-token", [8, 6])]
    rows = tables.boundary_rows([zero, one, two], [0], [["model.layers.*.input_layernorm", "output"]])
    assert [(r["module"], r["port"], r["layout"], r["shape"], r["ok"]) for r in rows] == [
        (NORM, "input", "local-token", [4, 6], True), (NORM, "output", "local-token", [4, 6], False),
    ]  # fmt: skip
    assert [r["others"] for r in rows] == ["[3, 6] on rank 2", "full-token [8, 6] on ranks 1-2"]
    (row,) = tables.boundary_rows([zero, one, two], [None], [["model.norm", "input"]])
    assert (row["module"], row["ok"], row["others"]) == ("model.norm", False, "")


def test_ranks_in_words() -> None:
    assert tables.ranks_text([3]) == "rank 3"
    assert tables.ranks_text([0, 1, 2, 5, 7, 8]) == "ranks 0-2, 5, 7-8"


def piece(rank: int, module: str, op: str, start: float, seconds: float, wait: float = 0.0, **more: Any) -> Slice:
    record = {
        "op": op, "module": module, "layer": 0, "traffic": "payload", "group": "tp" if op == "all_gather" else None,
        "attrs": {"dim": 0}, "bytes": 100, "inputs": [{"shape": [4, 6]}], "outputs": [{"shape": [8, 6]}], **more,
    }  # fmt: skip
    stream = "comm" if op == "all_gather" else "compute"
    cost = Cost(0.0, 0.0, seconds, "communication" if op == "all_gather" else "cube", "analytic")
    return Slice(rank, stream, start, seconds, wait, record, 0, ((Kernel("matmul", {}), cost),))  # type: ignore[arg-type]


def step() -> Timeline:
    """Rank 0: 2 at work, 3 waiting, 4 gathering beside 1 of work. Rank 1: 5 at work, 4 gathering, 3 at work."""
    zero = (
        piece(0, "model.layers.0.mlp", "linear", 0, 2), piece(0, "model.layers.0.mlp", "all_gather", 5, 4, 3),
        piece(0, "model.layers.1.mlp", "linear", 6, 1),
    )  # fmt: skip
    one = (
        piece(1, "model.layers.0.mlp", "linear", 0, 5),
        piece(1, "model.layers.0.mlp", "all_gather", 5, 4, inputs=[{"shape": [3, 6]}], bytes=75),
        piece(1, "model.norm", "rms_norm", 9, 3),
    )
    return Timeline(0, "hand", 12.0, (zero, one), (((0, 1), (1, 1)),))


def test_where_each_rank_spends_its_time() -> None:
    assert tables.rank_rows([step()]) == [
        {"compute": 3, "communication": 3, "wait": 3, "idle": 3},
        {"compute": 8, "communication": 4, "wait": 0, "idle": 0},
    ]
    twice = tables.rank_rows([step(), step()])
    assert [sum(row.values()) for row in twice] == [24, 24]


def test_time_by_module_and_stream() -> None:
    assert tables.module_rows([step()], 2) == [
        {"module": "model.layers.*.mlp", "stream": "compute", "seconds": [3, 5]},
        {"module": "model.layers.*.mlp", "stream": "comm", "seconds": [4, 4]},
        {"module": "model.norm", "stream": "compute", "seconds": [0, 3]},
    ]


def test_collectives_over_ranks_and_steps() -> None:
    (row,) = tables.collective_rows([step(), step()], priced=True)
    assert (row["group"], row["op"], row["module"], row["count"], row["bytes"]) == (
        "tp", "all_gather", "model.layers.*.mlp", 2, 200,
    )  # fmt: skip
    assert (row["input"], row["output"]) == ([None, 6], [8, 6])
    assert (row["seconds"], row["wait"]) == ([8, 8], [0, 6])
    (row,) = tables.collective_rows([step()], priced=False)
    assert (row["seconds"], row["wait"]) == (None, None)


def test_shares_sum_up_to_one() -> None:
    assert tables.shares([step()], by_source) == {"analytic": 1.0}
    # 11 of compute and 8 of communication
    assert tables.shares([step()], by_bound) == pytest.approx({"cube": 11 / 19, "communication": 8 / 19})
    assert list(tables.shares([step()], by_bound)) == ["cube", "communication"]


def test_memory_of_any_form_is_flattened() -> None:
    assert tables.memory_rows({"rank": 0, "peak": {"weights_bytes": 7, "kv": [1, 2]}}) == [
        ["rank", 0], ["peak.weights_bytes", 7], ["peak.kv", [1, 2]],
    ]  # fmt: skip
