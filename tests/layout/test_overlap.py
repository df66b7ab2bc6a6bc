"""Where collectives start and where they are waited for: vLLM-Ascend's forward step and its layer-sharded weights."""

import pytest

from emulator.errors import UsageError
from emulator.layout.lowering import lower
from emulator.layout.plan import load_plan
from emulator.model.config import load_config
from emulator.model.program import build_program
from emulator.ops.registry import op_name


def _lowered(plan: str, tp: int = 2, tokens: int = 16, layers: int = 4):
    program = build_program(load_config("glm-5.1-mini").with_layers(layers))
    return lower(program, load_plan(plan), {"tp": tp, "ep": tp}, tokens)


def _order(rank_graph, layer: int) -> list[str]:
    """op module of the attention of a layer, in the order in which a rank works."""
    prefix = f"model.layers.{layer}.self_attn"
    found = []
    for node in rank_graph.graph.nodes:
        name, module = op_name(node.target), node.meta.get("module", "")
        if name and (module + ".").startswith(prefix + "."):
            found.append(f"{name} {module.removeprefix(prefix).strip('.')}")
    return found


@pytest.mark.parametrize("plan", ["dsa_cp_engine", "dsa_cp_engine_c"])
def test_the_kv_gather_overlaps_q_b_proj_and_the_weight_gather_attention(plan):
    order = _order(_lowered(plan), 1)
    # steps 1 to 12 of the engine's forward step: key side, gather #1, q_b_proj, wait #1 and weight gather, caches,
    # indexer, attention, o_proj
    sequence = [
        "dsa_indexer_key indexer.wk", "all_gather cache", "linear q_b_proj", "wait cache", "all_gather o_proj",
        "cache_write cache", "dsa_indexer_topk indexer", "mla_sparse_attention attn", "wait o_proj", "linear o_proj",
    ]  # fmt: skip
    places = [order.index(step) for step in sequence]
    assert places == sorted(places)


def test_a_wait_names_its_collective_and_the_collective_its_wait():
    nodes = {node.name: node for node in _lowered("dsa_cp_engine").graph.nodes}
    waits = [node for node in nodes.values() if op_name(node.target) == "wait"]
    assert len(waits) == 2 * 4
    assert all(node.args[0].meta["async"] == node.name for node in waits)
    assert all(list(node.args[0].users) == [node] for node in waits)


@pytest.mark.parametrize("plan", ["dsa_cp_engine_decode", "dsa_cp_engine_c_decode", "dsa_cp", "sp"])
def test_other_plans_start_nothing_early(plan):
    assert not any(op_name(node.target) == "wait" for node in _lowered(plan).graph.nodes)


def test_layer_sharded_weights_are_broadcast_one_layer_ahead():
    """tp 2, 4 layers: reaching layers 0, 1, 2, 3 broadcasts layers 1, 2, 3, 0 from owners 1, 0, 1, 0."""
    rank_graph = _lowered("dsa_cp_engine_a")
    for projection in ("q_b_proj", "o_proj"):
        reached, sent, owners = -1, [], []
        for node in rank_graph.graph.nodes:
            module = node.meta.get("module", "")
            if op_name(node.target) == "broadcast" and module.endswith(projection):
                sent.append((reached + 1, int(module.split(".")[2])))  # before q_b_proj of the layer reached
                owners.append(node.args[3])
            if op_name(node.target) == "linear" and module.endswith("q_b_proj"):
                reached += 1
        assert sent == [(0, 1), (1, 2), (2, 3), (3, 0)]
        assert owners == [1, 0, 1, 0]


def test_the_first_layer_is_in_the_window_when_a_step_begins():
    rank_graph = _lowered("dsa_cp_engine_a")
    names = {n.name: str(n.meta["layout"]) for n in rank_graph.graph.nodes if n.op == "get_attr"}
    of_layer = {k: v for k, v in names.items() if "layers_0_self_attn_o_proj" in k}
    assert sorted(of_layer.values()) == ["replicated", "tp:owner(0)"]
    last = [n for n in rank_graph.graph.nodes if op_name(n.target) == "broadcast" and not n.users]
    assert [(n.meta["module"], n.meta["async"]) for n in last] == [
        ("model.layers.0.self_attn.q_b_proj", None), ("model.layers.0.self_attn.o_proj", None),
    ]  # fmt: skip


def _plan(tmp_path, row: str) -> str:
    path = tmp_path / "mine.toml"
    path.write_text(f'description = "x"\nextends = "dsa_cp_engine"\n[modules]\n{row}\n')
    return str(path)


def test_a_collective_cannot_start_before_what_it_needs(tmp_path):
    row = '"model.layers.*.self_attn.cache" = { input = "full-token", start = "model.layers.*.input_layernorm" }'
    with pytest.raises(UsageError, match=r"all_gather of model\.layers\.0\.self_attn\.cache cannot start before"):
        _lowered(_plan(tmp_path, row))


def test_a_start_names_a_module(tmp_path):
    row = '"model.layers.*.self_attn.cache" = { input = "full-token", start = "model.layers.*.self_attn.q_proj" }'
    with pytest.raises(UsageError, match=r"starts before 'model.layers.\*.self_attn.q_proj', which is no module"):
        _lowered(_plan(tmp_path, row))
