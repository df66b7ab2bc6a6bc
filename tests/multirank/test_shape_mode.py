"""Full-size runs by shape: the published numbers of DESIGN section 4 and of the RFC, on 16 ranks."""

import pytest

from emulator.jobs.job import run
from emulator.scenario import load_scenario


def _counts(summary: dict) -> dict[tuple, int]:
    totals: dict[tuple, int] = {}
    for c in summary["collectives"]:
        key = (c["group"], c["op"], c["dim"])
        totals[key] = totals.get(key, 0) + c["count"]
    return totals


def _at(summary: dict, module: str, port: str) -> list[tuple[str, list[int]]]:
    return [(b["layout"], b["shape"]) for b in summary["boundaries"] if b["module"] == module and b["port"] == port]


@pytest.fixture(scope="module")
def glm() -> dict:
    """GLM-5.1 at full width, 3 dense layers and 1 MoE layer, tp 16 ep 16."""
    return run(load_scenario("glm-5.1", {"layers": 4}))


def test_shapes_of_the_rfc_table(glm):
    assert glm["verdict"] == "pass"
    layer = "model.layers.3."
    assert _at(glm, layer + "self_attn", "input") == [("full-token", [4096, 6144])]
    assert _at(glm, layer + "self_attn.attn", "output") == [("full-token", [4096, 64, 256])]
    assert _at(glm, layer + "self_attn.o_proj", "input") == [("local-token", [256, 64, 256])]
    assert _at(glm, layer + "self_attn.o_proj", "output") == [("local-token", [256, 6144])]
    assert _at(glm, layer + "post_attention_layernorm", "output1") == [("local-token", [256, 6144])]
    assert _at(glm, layer + "mlp.gate", "output") == [("local-token", [256, 256])]
    assert _at(glm, layer + "mlp.topk", "output1") == [("local-token", [256, 8])]
    assert _at(glm, layer + "mlp", "output") == [("local-token", [256, 6144])]
    assert ("full-token", [4096, 2048]) in _at(glm, layer + "self_attn.indexer", "output")


def test_balanced_routing_moves_2048_rows_each_way(glm):
    exchanges = [c for c in glm["collectives"] if c["op"] == "all_to_all"]
    assert [(c["input_shape"], c["output_shape"], c["count"]) for c in exchanges] == [
        ([2048, 6144], [2048, 6144], 1)
    ] * 2


def test_no_value_has_more_rows_than_tokens(glm):
    assert max(b["shape"][0] for b in glm["boundaries"] if b["layout"] in ("full-token", "local-token")) == 4096


def test_four_layer_counts(glm):
    assert _counts(glm) == {
        ("tp", "reduce_scatter", 0): 4,  # embedding + 3 dense
        ("tp", "all_gather", 0): 8,  # 4 attention + 3 dense + final norm
        ("tp", "all_gather", 1): 1,  # logits
        ("tp", "slice", 0): 4,
        ("ep", "all_to_all", None): 2,
    }


@pytest.mark.slow
@pytest.mark.parametrize(("model", "layers", "moe"), [("glm-5.1", 78, 75), ("deepseek-v3.2", 61, 58)])
def test_whole_models(model, layers, moe):
    summary = run(load_scenario(model))
    assert summary["verdict"] == "pass"
    assert _counts(summary) == {
        ("tp", "reduce_scatter", 0): 4,
        ("tp", "all_gather", 0): layers + 4,
        ("tp", "all_gather", 1): 1,
        ("tp", "slice", 0): layers,
        ("ep", "all_to_all", None): 2 * moe,
    }
    baseline = _counts(run(load_scenario(model, {"plan": "tp"})))
    assert baseline["tp", "all_reduce", None] == layers + 4
    assert baseline["tp", "all_gather", 0] == moe


def test_uneven_tokens_agree_on_split_sizes():
    # 4099 tokens on 16 ranks: 257 rows each, 13 padding rows on the last; every split list must match its peer's
    summary = run(load_scenario("glm-5.1", {"layers": 4, "tokens": 4099}))
    assert summary["verdict"] == "pass"
    dispatch = next(c for c in summary["collectives"] if c["op"] == "all_to_all")
    assert dispatch["input_shape"] == [257 * 8, 6144]
