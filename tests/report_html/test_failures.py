"""Which cells of the layout map are red."""

from typing import Any

from emulator.report_html.failures import SOME_RANK, THIS_RANK, Place, marks_of, places_of


def op(node: str, module: str) -> dict[str, Any]:
    return {"node": node, "module": module}


OPS = [
    op("norm", "model.layers.0.input_layernorm"), op("q", "model.layers.0.self_attn.q_a_proj"),
    op("attn", "model.layers.0.self_attn.attn"), op("o", "model.layers.0.self_attn.o_proj"),
    op("q_1", "model.layers.1.self_attn.q_a_proj"),
]  # fmt: skip


def hit(module: str, port: str, *, node: str | None = None, ranks: tuple[int, ...] = (), rank: int = 0) -> dict:
    return marks_of(OPS, [Place(module, port, node, ranks, None)], rank, 0)


def test_a_boundary_is_the_first_or_last_op_of_its_module() -> None:
    assert hit("model.layers.0.self_attn", "input") == {1: SOME_RANK}
    assert hit("model.layers.0.self_attn", "output") == {3: SOME_RANK}
    assert hit("model.layers.0.self_attn", "inside") == {1: SOME_RANK, 2: SOME_RANK, 3: SOME_RANK}
    assert hit("model.layers.*.self_attn.q_a_proj", "inside") == {1: SOME_RANK, 4: SOME_RANK}
    assert hit("model.layers.0.self_attn.q", "output") == {}  # no prefix of a name
    assert hit("model.layers.0.self_attn", "inside", node="attn") == {2: SOME_RANK}


def test_ranks_and_steps() -> None:
    assert hit("model.layers.0.self_attn.attn", "output", ranks=(1,), rank=1) == {2: THIS_RANK}
    assert hit("model.layers.0.self_attn.attn", "output", ranks=(1,), rank=0) == {}
    place = Place("model.layers.0.self_attn.attn", "output", None, (), 3)
    assert marks_of(OPS, [place], 0, 2) == {}
    assert marks_of(OPS, [place], 0, 3) == {2: SOME_RANK}
    known = Place("model.layers.0.self_attn.attn", "output", None, (0,), 3)
    for places in ([place, known], [known, place]):
        assert marks_of(OPS, places, 0, 3) == {2: THIS_RANK}


def test_places_of_a_summary() -> None:
    summary = {
        "first_failure": {"module": "a.b", "port": "input", "rank": 2, "step": 1},
        "culprit": {"node": "n", "module": "a", "ranks": [0, 2], "step": 1},
        "broken_boundaries": [["a.b", "input"]],
    }
    assert places_of(summary) == [
        Place("a.b", "input", None, (2,), 1), Place("a", "inside", "n", (0, 2), 1), Place("a.b", "input", None, (), 1),
    ]  # fmt: skip
    assert places_of({"first_failure": None, "culprit": None, "broken_boundaries": []}) == places_of({}) == []
