"""first_difference: silent on equal graphs however they are written down, and it names what was planted."""

import operator
from collections.abc import Callable

import pytest
import torch
from torch import fx

from emulator.layout.placement import Layout
from emulator.layout.rank_graph import RankGraph
from emulator.ops.registry import LOCAL, op_name
from emulator.passes.compare import Difference, first_difference
from emulator.passes.repetition import fold

ops = torch.ops.emulator
Fresh = Callable[..., RankGraph]


def find(graph: RankGraph, op: str, module: str) -> fx.Node:
    """The first node of an op in a module."""
    return next(n for n in graph.graph.nodes if op_name(n.target) == op and n.meta["module"] == module)


def output(node: fx.Node, index: int) -> fx.Node:
    return next(user for user in node.users if user.args[1] == index)


def insert(graph: RankGraph, before: fx.Node, target: Callable, args: tuple, **meta: object) -> fx.Node:
    with graph.graph.inserting_before(before):
        node = graph.graph.call_function(target, args)
    node.meta.update(origin=None, traffic="payload", **meta)
    return node


# --- equal graphs ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("plan", ["tp", "sp", "dsa_cp"])
def test_names_do_not_count(plan: str, fresh: Fresh) -> None:
    other = fresh(plan)
    for i, node in enumerate(list(other.graph.nodes)):
        if node.op == "call_function":
            node._rename(f"n{len(other.graph.nodes) - i}")
    assert first_difference(fresh(plan), other) is None


def test_plans_differ(fresh: Fresh) -> None:
    # the first thing that sp does otherwise than tp: the embedding's partial sums become local rows
    found = first_difference(fresh("tp", tokens=96), fresh("sp", tokens=96))
    assert found is not None
    assert (found.node_a, found.node_b, found.module) == ("all_reduce", "reduce_scatter", "model.embed_tokens")
    assert "all_reduce of model.embed_tokens" in found.what
    assert "reduce_scatter of model.embed_tokens" in found.what


def test_order_of_independent_nodes_does_not_count(fresh: Fresh) -> None:
    other = fresh()
    last_input = [n for n in other.graph.nodes if n.op == "placeholder"][-1]
    for node in list(other.graph.nodes):
        if node.op == "get_attr":
            last_input.append(node)
    # the key side before the query side
    find(other, "linear", "model.layers.3.self_attn.q_a_proj").prepend(
        find(other, "linear", "model.layers.3.self_attn.kv_a_proj_with_mqa")
    )
    other.graph.lint()
    names, expected = ([n.name for n in g.graph.nodes] for g in (other, fresh()))
    assert names != expected
    assert first_difference(fresh(), other) is None
    assert first_difference(other, fresh()) is None


def test_spelling_of_a_call_does_not_count(fresh: Fresh) -> None:
    other = fresh()
    linear = find(other, "linear", "model.layers.0.self_attn.q_a_proj")
    assert linear.args[2] is None
    linear.target, linear.args = ops.linear.default, linear.args[:2]  # an overload, and the default left out
    embedding = find(other, "embedding", "model.embed_tokens")
    embedding.kwargs = {"vocab_start": 0}
    swiglu = find(other, "swiglu", "model.layers.0.mlp")
    swiglu.args, swiglu.kwargs = swiglu.args[:1], {"up": swiglu.args[1]}
    assert first_difference(fresh(), other) is None
    embedding.kwargs = {"vocab_start": 78}
    found = first_difference(fresh(), other)
    assert found is not None
    assert found.what == "argument vocab_start is 0, in the second 78"


def test_a_weight_may_be_fetched_twice(fresh: Fresh) -> None:
    other = fresh()
    absorb = find(other, "mla_absorb", "model.layers.1.self_attn.kv_b_proj")
    with other.graph.inserting_before(absorb):
        again = other.graph.node_copy(absorb.args[0])
    absorb.update_arg(0, again)
    linear = find(other, "linear", "model.layers.1.self_attn.o_proj")
    with other.graph.inserting_before(linear):
        other.graph.node_copy(linear.args[1])
    assert first_difference(fresh(), other) is None


# --- fused and unfused norms -----------------------------------------------------------------------------------------


def unfuse(graph: RankGraph, layer: str = "") -> int:
    """Writes every add_rms_norm2 and add_rms_norm (of a layer) as add and rms_norm; returns how many."""
    fused = [n for n in graph.graph.nodes if op_name(n.target) in ("add_rms_norm", "add_rms_norm2")]
    fused = [n for n in fused if n.meta["module"].startswith(layer)]
    for node in fused:
        x, residual, weight, eps = node.args
        layout = node.meta["layout"][0] if isinstance(node.meta["layout"], tuple) else node.meta["layout"]
        # a hand-written layer adds outside the norm's module
        parent = node.meta["module"].rpartition(".")[0]
        total = insert(graph, node, ops.add, (residual, x), layout=layout, module=parent)
        normed = insert(graph, node, ops.rms_norm, (total, weight, eps), layout=layout, module=node.meta["module"])
        if op_name(node.target) == "add_rms_norm":
            node.replace_all_uses_with(normed)
        else:
            for user in list(node.users):
                user.replace_all_uses_with((normed, total)[user.args[1]])
                graph.graph.erase_node(user)
        graph.graph.erase_node(node)
    return len(fused)


@pytest.mark.parametrize("plan", ["tp", "sp", "dsa_cp"])
@pytest.mark.parametrize("model", ["glm-5.1-mini", "deepseek-v3.2-mini"])
def test_fused_norms_equal_add_and_norm(model: str, plan: str, fresh: Fresh) -> None:
    other = fresh(plan, model)
    assert unfuse(other) == 5 + 4 + 1  # after attention, before it (not in layer 0), at the end
    assert first_difference(fresh(plan, model), other) is None
    assert first_difference(other, fresh(plan, model)) is None


def test_an_unfused_norm_must_still_be_the_same_norm(fresh: Fresh) -> None:
    other = fresh()
    unfuse(other, "model.layers.3.input_layernorm")
    norm = find(other, "rms_norm", "model.layers.3.input_layernorm")
    norm.update_arg(2, 2e-5)
    found = first_difference(fresh(), other)
    assert found is not None
    assert (found.node_b, found.module) == (norm.name, "model.layers.3.input_layernorm")
    assert found.what == "argument eps is 1e-05, in the second 2e-05"


def test_an_add_of_something_else_is_no_fused_norm(fresh: Fresh) -> None:
    other = fresh()
    unfuse(other, "model.layers.3.input_layernorm")
    total = next(n for n in other.graph.nodes if op_name(n.target) == "add" and n.meta["module"] == "model.layers.3")
    total.update_arg(0, output(find(other, "add_rms_norm2", "model.layers.1.post_attention_layernorm"), 1))
    found = first_difference(fresh(), other)
    assert found is not None
    assert found.node_b == total.name
    assert "argument residual is add_rms_norm2_4[1] (add of model.layers.2.post_attention_layernorm)" in found.what
    assert "add_rms_norm2_2[1] (add of model.layers.1.post_attention_layernorm)" in found.what


# --- planted differences ---------------------------------------------------------------------------------------------


def eps(g: RankGraph) -> None:
    find(g, "add_rms_norm2", "model.layers.3.input_layernorm").update_arg(3, 2e-5)


def earlier_residual(g: RankGraph) -> None:
    node = find(g, "add_rms_norm2", "model.layers.3.input_layernorm")
    node.update_arg(1, output(find(g, "add_rms_norm2", "model.layers.1.post_attention_layernorm"), 1))


def residual_gathered(g: RankGraph) -> None:
    node = find(g, "add_rms_norm2", "model.layers.3.input_layernorm")
    layout = node.meta["layout"][1].placed()
    node.update_arg(1, insert(g, node, ops.all_gather, (node.args[1], "tp", 4, 0), module="x", layout=layout))


def cut_left_out(g: RankGraph) -> None:
    node = find(g, "slice", "model.layers.3.self_attn.o_proj")
    node.replace_all_uses_with(node.args[0])


def sum_not_scattered(g: RankGraph) -> None:
    node = find(g, "reduce_scatter", "model.layers.1.mlp.down_proj")
    node.target, node.args = ops.all_reduce, node.args[:3]


def other_axis(g: RankGraph) -> None:
    find(g, "all_gather", "model.layers.3.self_attn").update_arg(1, "ep")


def other_weight(g: RankGraph) -> None:
    node = find(g, "linear", "model.layers.3.self_attn.q_a_proj")
    node.update_arg(1, find(g, "linear", "model.layers.2.self_attn.q_a_proj").args[1])


def other_cache(g: RankGraph) -> None:
    find(g, "cache_write", "model.layers.3.self_attn.cache").args[0].update_arg(1, 2)


def output_1_for_output_0(g: RankGraph) -> None:
    node = find(g, "moe_gate", "model.layers.3.mlp.gate")
    node.update_arg(0, output(node.args[0].args[0], 1))


def wrong_layout(g: RankGraph) -> None:
    node = find(g, "mla_sparse_attention", "model.layers.3.self_attn.attn")
    node.meta["layout"] = node.meta["layout"].placed(tp=LOCAL)


def wrong_module(g: RankGraph) -> None:
    find(g, "slice", "model.layers.3.self_attn.o_proj").meta["module"] = "model.layers.3.self_attn"


def split_weight(g: RankGraph) -> None:
    find(g, "linear", "model.layers.3.self_attn.q_a_proj").args[1].meta["layout"] = Layout("weight").placed(tp=LOCAL)


GRAPH_NODES = {
    # planted: (op and module of the node to name, what is said)
    eps: ("add_rms_norm2", "model.layers.3.input_layernorm", "argument eps is 1e-05, in the second 2e-05"),
    earlier_residual: ("add_rms_norm2", "model.layers.3.input_layernorm", "argument residual is add_rms_norm2_4[1] ("),
    residual_gathered: ("add_rms_norm2", "model.layers.3.input_layernorm", "in the second all_gather_9 (all_gather"),
    cut_left_out: (None, "model.layers.3.self_attn.o_proj", "argument 0 is slice_5 (slice of"),
    sum_not_scattered: ("reduce_scatter", "model.layers.1.mlp.down_proj", "in the second reduce_scatter_2 (all_reduce"),
    other_axis: ("all_gather", "model.layers.3.self_attn", "argument axis is 'tp', in the second 'ep'"),
    other_weight: ("linear", "model.layers.3.self_attn.q_a_proj", "argument weight is model_layers_3_self_attn_q_a_"),
    other_cache: (None, "model.layers.3.self_attn", "argument 1 is 3, in the second 2"),
    output_1_for_output_0: ("moe_gate", "model.layers.3.mlp.gate", "in the second add_rms_norm2_6[1] (add of"),
    wrong_layout: (
        "mla_sparse_attention",
        "model.layers.3.self_attn.attn",
        "layout is full-token of 97 tokens in 4, in the second local-token of 97 tokens in 4",
    ),
    wrong_module: (
        "slice",
        "model.layers.3.self_attn.o_proj",
        "module is model.layers.3.self_attn.o_proj, in the second model.layers.3.self_attn",
    ),
    split_weight: (None, "model.layers.3.self_attn.q_a_proj", "layout is replicated, in the second tp:shard(0)"),
}


@pytest.mark.parametrize("plant", GRAPH_NODES, ids=lambda f: f.__name__)
def test_a_planted_difference_is_named(plant: Callable[[RankGraph], None], fresh: Fresh) -> None:
    healthy, other = fresh(), fresh()
    plant(other)
    found = first_difference(healthy, other)
    assert found is not None
    op, module, what = GRAPH_NODES[plant]
    assert (found.module, found.node_a) == (module, found.node_b)
    assert what in found.what
    nodes = list(healthy.graph.nodes)
    assert nodes[found.position].name == found.node_a
    assert op_name(nodes[found.position].target) == op
    text = str(found)
    assert text == f"{module}: node {found.position}, {found.node_a} in both graphs: {found.what}"
    assert first_difference(other, healthy) is not None
    # found whatever is left out, unless it is the only thing that differs
    assert (first_difference(healthy, other, modules=False) is None) == (plant is wrong_module)
    assert (first_difference(healthy, other, layouts=False) is None) == (plant in (wrong_layout, split_weight))


def test_work_done_twice_is_a_difference(fresh: Fresh) -> None:
    healthy, other = fresh(), fresh()
    gather = find(other, "all_gather", "model.layers.3.self_attn")
    with other.graph.inserting_after(gather):
        again = other.graph.node_copy(gather, lambda n: n)
    user = find(other, "unpad", "model.layers.3.self_attn")
    assert user.args[0] is gather
    only_there = first_difference(healthy, other)
    assert only_there is not None
    assert (only_there.node_a, only_there.node_b) == (None, again.name)
    assert "only the second graph has" in only_there.what
    only_here = first_difference(other, healthy)
    assert only_here is not None
    assert (only_here.node_a, only_here.node_b) == (again.name, None)
    assert str(only_here).startswith(f"model.layers.3.self_attn: node {only_here.position}, {again.name} in the first")


def test_the_first_of_several_is_named(fresh: Fresh) -> None:
    other = fresh()
    other_weight(other)
    find(other, "rms_norm", "model.layers.2.self_attn.q_a_layernorm").update_arg(2, 2e-5)
    find(other, "add_rms_norm", "model.norm").update_arg(3, 2e-5)
    found = first_difference(fresh(), other)
    assert found is not None
    assert found.module == "model.layers.2.self_attn.q_a_layernorm"


# --- order -----------------------------------------------------------------------------------------------------------


def swapped(graph: RankGraph) -> tuple[fx.Node, fx.Node]:
    """Two independent collectives of one MoE layer the other way round: ranks that disagree on it hang."""
    counts = find(graph, "all_to_all", "model.layers.3.mlp.experts")
    gather = find(graph, "all_gather", "model.layers.3.mlp.shared_experts")
    order = list(graph.graph.nodes)
    assert order.index(counts) < order.index(gather)
    counts.prepend(gather)
    graph.graph.lint()
    return counts, gather


def test_order_of_communication_counts(fresh: Fresh) -> None:
    variants = {"shared_experts": "gather_scatter"}
    other = fresh(variants=variants)
    counts, gather = swapped(other)
    found = first_difference(fresh(variants=variants), other)
    assert found is not None
    assert (found.node_a, found.node_b) == (counts.name, gather.name)
    talking = ("all_gather", "all_to_all", "all_to_all_rows", "reduce_scatter", "all_reduce")
    calls = [n.name for n in fresh(variants=variants).graph.nodes if op_name(n.target) in talking]
    assert found.what.startswith(f"communication {calls.index(counts.name)} is {counts.name} (all_to_all of")
    assert f"in the second {gather.name} (all_gather of model.layers.3.mlp.shared_experts)" in found.what


def test_order_of_writes_to_one_cache_counts(fresh: Fresh) -> None:
    def write_again(graph: RankGraph, first: bool) -> None:
        write = find(graph, "cache_write", "model.layers.3.self_attn.cache")
        meta = {"module": "model.layers.3.self_attn.cache", "layout": write.meta["layout"]}
        at = write if first else write.next
        insert(graph, at, ops.cache_write, (write.args[0], write.args[1], write.args[2], 8), **meta)

    one, other = fresh(), fresh()
    write_again(one, True)
    write_again(other, False)
    assert first_difference(one, one) is None
    found = first_difference(one, other)
    assert found is not None
    assert found.module == "model.layers.3.self_attn.cache"


# --- regions are looked through --------------------------------------------------------------------------------------


@pytest.mark.parametrize("plant", [eps, other_weight], ids=lambda f: f.__name__)
def test_a_difference_in_one_layer_is_named_in_folded_graphs(plant: Callable, fresh: Fresh) -> None:
    healthy, other = fresh(num_hidden_layers=12), fresh(num_hidden_layers=12)
    plant(other)
    found = first_difference(fold(healthy), fold(other))
    assert isinstance(found, Difference)
    assert found == first_difference(healthy, other)
    assert found.module.startswith("model.layers.3.")


def test_getitem_of_a_fused_norm_is_no_node(fresh: Fresh) -> None:
    # an output that nobody uses is no work
    other = fresh()
    norm = find(other, "add_rms_norm2", "model.layers.3.input_layernorm")
    insert(other, norm.next, operator.getitem, (norm, 1), module="", layout=norm.meta["layout"][1])
    assert first_difference(fresh(), other) is None
