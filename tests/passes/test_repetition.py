"""fold finds the runs of equal layers; expand gives back every node, with its name and meta, and every boundary."""

import operator
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import fx
from torch.distributed.tensor.placement_types import Shard

from emulator.errors import UsageError
from emulator.layout.placement import Layout
from emulator.layout.rank_graph import Boundary, RankGraph
from emulator.ops.registry import op_name
from emulator.passes.compare import first_difference
from emulator.passes.layers import layer_of, shifted
from emulator.passes.repetition import expand, fold

ops = torch.ops.emulator
Lower = Callable[..., RankGraph]
PLANS = ["tp", "sp", "dsa_cp"]
MODELS = [pytest.param("glm-5.1", 78, 5600, id="glm-5.1"), pytest.param("deepseek-v3.2", 61, 4400, id="deepseek-v3.2")]


def markers(graph: RankGraph, name: str) -> list[fx.Node]:
    return [n for n in graph.graph.nodes if op_name(n.target) == name]


def runs(graph: RankGraph) -> list[tuple[int, int]]:
    """(first layer, repeat) of every region."""
    return [(n.args[1], n.args[2]) for n in markers(graph, "region_begin")]


def described(graph: RankGraph) -> dict[str, tuple[Any, ...]]:
    """Everything about every node, by name."""
    return {
        n.name: (n.op, n.target, str(n.args), str(n.kwargs), dict(n.meta), {u.name for u in n.users})
        for n in graph.graph.nodes
    }


def assert_is_inverse(graph: RankGraph) -> RankGraph:
    folded = fold(graph)
    back = expand(folded)
    assert first_difference(graph, back) is None
    assert described(back) == described(graph)
    assert set(back.boundaries) == set(graph.boundaries)
    assert len(back.boundaries) == len(graph.boundaries)
    order = {n.name: i for i, n in enumerate(back.graph.nodes)}
    places = [order[b.node] for b in back.boundaries]
    assert places == sorted(places)
    back.graph.lint()
    folded.graph.lint()
    return folded


# --- runs and sizes --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize(("model", "layers", "nodes"), MODELS)
def test_whole_models_fold_into_one_dense_and_one_moe_region(
    model: str, layers: int, nodes: int, plan: str, full_size: Lower
) -> None:
    graph = full_size(model, plan)
    folded = assert_is_inverse(graph)
    # layer 0 has a plain rms_norm for its input and stays; 1 and 2 are dense, the rest is MoE
    assert runs(folded) == [(1, 2), (3, layers - 3)]
    assert len(graph.graph.nodes) > nodes
    assert len(folded.graph.nodes) < len(graph.graph.nodes) / 15
    # what is left of 78 layers: the weights of 3, each layer once
    weights = [n.target for n in folded.graph.nodes if n.op == "get_attr"]
    assert {layer_of(w) for w in weights} == {None, 0, 1, 3}


@pytest.mark.parametrize("plan", PLANS)
def test_copies_name_their_layers(plan: str, full_size: Lower) -> None:
    graph = full_size("glm-5.1", plan)
    folded = fold(graph)
    assert [n.args[1] for n in markers(folded, "copy_region")] == [2, *range(4, 78)]
    # and so the weights of layer 77 can be told from those of layer 3
    here = [n.target for n in folded.graph.nodes if n.op == "get_attr" and layer_of(n.target) == 3]
    assert {shifted(w, 77 - 3) for w in here} == {
        n.target for n in graph.graph.nodes if n.op == "get_attr" and layer_of(n.target) == 77
    }


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        # full and shared indexers of GLM-5.1's schedule, dense below 2: Fd Fd Sm Sm Sm Fm Sm Sm Sm Fm Sm Sm
        ({"num_hidden_layers": 12, "index_topk_freq": 4, "index_skip_topk_offset": 2}, [(2, 3), (6, 3), (10, 2)]),
        # the layer whose ids others use hands on more than the one before it: Fm | Fm | Fm | Sm x 5
        ({"num_hidden_layers": 8, "index_topk_pattern": "FFFSSSSS", "first_k_dense_replace": 0}, [(3, 5)]),
        ({"num_hidden_layers": 9, "index_topk_pattern": "FSSFFFFFF"}, [(3, 6)]),
        ({"num_hidden_layers": 6, "first_k_dense_replace": 6}, [(1, 5)]),
        ({"num_hidden_layers": 6, "first_k_dense_replace": 1}, [(1, 5)]),
        ({"num_hidden_layers": 6, "first_k_dense_replace": 0}, [(1, 5)]),
        ({"num_hidden_layers": 2}, []),
        ({"num_hidden_layers": 1}, []),
    ],
    ids=lambda x: "" if isinstance(x, list) else "-".join(map(str, x.values())),
)
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("tokens", [97, 3])
def test_ragged_models(plan: str, changes: dict, expected: list, tokens: int, fresh: Lower) -> None:
    assert runs(assert_is_inverse(fresh(plan, tokens=tokens, **changes))) == expected


@pytest.mark.parametrize("embedding", ["row", "replicated"])
@pytest.mark.parametrize("shared_experts", ["replicated", "gather_scatter"])
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("model", ["glm-5.1-mini", "deepseek-v3.2-mini"])
def test_variants(model: str, plan: str, embedding: str, shared_experts: str, fresh: Lower) -> None:
    variants = {"embedding": embedding, "shared_experts": shared_experts}
    for tp, tokens in ((4, 97), (4, 96), (1, 5), (3, 2)):
        graph = fresh(plan, model, tp=tp, tokens=tokens, variants=variants)
        assert runs(assert_is_inverse(graph)) == [(2, 3)]


def test_folding_twice_changes_nothing(fresh: Lower) -> None:
    once = fold(fresh())
    assert described(fold(once)) == described(once)
    plain = fresh()
    assert expand(plain) is plain


# --- what ends a run -------------------------------------------------------------------------------------------------


def find(graph: RankGraph, op: str, module: str) -> fx.Node:
    return next(n for n in graph.graph.nodes if op_name(n.target) == op and n.meta["module"] == module)


def planted(graph: RankGraph, what: str) -> None:
    """Makes layer 5 of 9 unlike the others."""
    at = "model.layers.5."
    if what == "constant":
        find(graph, "rms_norm", at + "self_attn.q_a_layernorm").update_arg(2, 1e-7)
    elif what == "layout":
        node = find(graph, "linear", at + "self_attn.q_a_proj").args[1]
        node.meta["layout"] = node.meta["layout"].placed(tp=Shard(0))
    elif what == "module":
        find(graph, "linear", at + "self_attn.q_a_proj").meta["module"] = at + "self_attn"
    elif what == "origin":
        find(graph, "linear", at + "self_attn.q_a_proj").meta["origin"] = None
    elif what == "traffic":
        find(graph, "all_gather", at + "self_attn").meta["traffic"] = "metadata"
    elif what == "weight":  # the next layer's
        node, other = (find(graph, "linear", f"model.layers.{i}.self_attn.o_proj") for i in (5, 4))
        node.update_arg(1, other.args[1])
    elif what == "cache":  # writes into layer 4's
        find(graph, "cache_write", at + "self_attn.cache").args[0].update_arg(1, 4)
    elif what == "boundary":
        graph.boundaries = [b for b in graph.boundaries if (b.module, b.port) != (at + "mlp.gate", "input")]
    elif what == "inputs":  # other values of the same layouts from outside the layers
        positions, slots = (next(n for n in graph.graph.nodes if n.name == name) for name in ("positions", "slots"))
        swapped = {positions: slots, slots: positions}
        for node in graph.graph.nodes:
            if node.meta["module"].startswith(at):
                node.args = fx.map_arg(node.args, lambda n: swapped.get(n, n))
    else:
        assert what == "wiring"
        node = find(graph, "moe_gate", at + "mlp.gate")
        node.update_arg(0, find(graph, "add_rms_norm2", at + "input_layernorm").next)


@pytest.mark.parametrize(
    "what", ["constant", "layout", "module", "origin", "traffic", "weight", "cache", "boundary", "wiring", "inputs"]
)
def test_a_layer_that_differs_stays_apart(what: str, fresh: Lower) -> None:
    graph = fresh(num_hidden_layers=9)
    assert runs(fold(graph)) == [(2, 7)]
    planted(graph, what)
    assert runs(assert_is_inverse(graph)) == [(2, 3), (6, 3)]


def test_a_layer_that_takes_another_value_of_the_layer_before_begins_a_run(fresh: Lower) -> None:
    # layer 5 adds to the residual from before layer 4's attention: it does what layer 4 does, with another value
    graph = fresh(num_hidden_layers=9)
    norm = find(graph, "add_rms_norm2", "model.layers.5.input_layernorm")
    right = norm.args[1]
    wrong = find(graph, "add_rms_norm2", "model.layers.4.input_layernorm").next.next
    assert (wrong.args[1], wrong.meta["layout"]) == (1, right.meta["layout"])
    norm.update_arg(1, wrong)
    graph.boundaries = [
        replace(b, node=wrong.name) if b.module.startswith("model.layers.5") and b.node == right.name else b
        for b in graph.boundaries
    ]
    places = {n.name: i for i, n in enumerate(graph.graph.nodes)}
    graph.boundaries.sort(key=lambda b: places[b.node])
    assert runs(assert_is_inverse(graph)) == [(2, 3), (5, 4)]


def test_a_value_used_further_on_ends_the_run(fresh: Lower) -> None:
    # hidden states of layer 4 go to the end of the model as well, as a draft head takes them
    graph = fresh(num_hidden_layers=9)
    tapped = find(graph, "add", "model.layers.4.mlp")
    norm = find(graph, "add_rms_norm", "model.norm")
    with graph.graph.inserting_before(norm):
        node = graph.graph.call_function(ops.add, (norm.args[0], tapped))
    node.meta.update(tapped.meta, module="model", origin=None)
    norm.update_arg(0, node)
    folded = assert_is_inverse(graph)
    assert runs(folded) == [(2, 3), (5, 4)]
    left = [n for n in folded.graph.nodes if n.name.startswith("left")]
    assert any(n.args[0] is markers(folded, "copy_region")[1] and node.name in [u.name for u in n.users] for n in left)


def test_a_value_compared_further_on_ends_the_run(fresh: Lower) -> None:
    graph = fresh(num_hidden_layers=9)
    graph.boundaries.append(Boundary("model.norm", "input", find(graph, "add", "model.layers.4.mlp").name))
    folded = assert_is_inverse(graph)
    assert runs(folded) == [(2, 3), (5, 4)]


def test_names_of_copies_are_kept(fresh: Lower) -> None:
    graph = fresh(num_hidden_layers=9)
    new = {n.name: f"n{len(graph.graph.nodes) - i}" for i, n in enumerate(graph.graph.nodes) if n.op == "call_function"}
    for node in graph.graph.nodes:
        node._rename(new.get(node.name, node.name))
        if "moves" in node.meta:
            node.meta["moves"] = new.get(node.meta["moves"], node.meta["moves"])
    graph.boundaries = [replace(b, node=new[b.node]) for b in graph.boundaries]
    assert runs(assert_is_inverse(graph)) == [(2, 7)]


def test_order_of_communication_survives(fresh: Lower) -> None:
    # a collective of layer 3 that is called in the middle of layer 5 cannot be moved to where layer 3 stands
    graph = fresh("sp", num_hidden_layers=9)
    early = find(graph, "all_gather", "model.layers.5.self_attn")
    with graph.graph.inserting_after(early):
        late = graph.graph.call_function(ops.all_gather, (find(graph, "add", "model.layers.3.mlp"), "tp", 4, 0))
    late.meta.update(early.meta, module="model.layers.3.mlp", origin=None)
    assert runs(assert_is_inverse(graph)) == [(2, 2), (6, 3)]


# --- markers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("plan", PLANS)
def test_markers_are_layout_transparent(plan: str, full_size: Lower) -> None:
    graph = fold(full_size("glm-5.1", plan))
    begins, copies, ends = (markers(graph, name) for name in ("region_begin", "copy_region", "region_end"))
    assert [len(x) for x in (begins, copies, ends)] == [2, 75, 2]
    for marker in begins + ends:
        assert marker.meta["layout"] == tuple(value.meta["layout"] for value in marker.args[0])
    for copy in copies:
        assert copy.meta["layout"] == copy.args[0].meta["layout"]
    for begin, end in zip(begins, ends):
        # what a layer hands on is laid out as what it takes: hidden state and residual
        assert len(begin.meta["layout"]) == 2
        assert end.meta["layout"][:2] == begin.meta["layout"]
        word = "full-token" if plan == "tp" else "local-token"
        assert [str(x) for x in begin.meta["layout"]] == [word, word]
    for marker in begins + copies + ends:
        for user in marker.users:
            if op_name(user.target) is None:
                assert user.meta["layout"] == marker.meta["layout"][user.args[1]]


# --- graphs with regions written by hand -----------------------------------------------------------------------------


def by_hand(like: RankGraph, *, repeat: int = 3, copies: tuple[int, ...] = (1, 2), leave: bool = True) -> RankGraph:
    """x -> x + W_k x for layers 0, 1, 2, written with markers and without what `fold` notes on copies."""
    graph = fx.Graph()
    full = Layout("token", (), like.tokens)

    def add(node: fx.Node, module: str = "", layout: Any = full, origin: str | None = None) -> fx.Node:
        node.meta.update(module=module, layout=layout, origin=origin, traffic="payload")
        return node

    def call(target: Callable, *args: Any, **meta: Any) -> fx.Node:
        return add(graph.call_function(target, args), **meta)

    x = add(graph.placeholder("x"))
    begin = call(ops.region_begin, [x], 0, repeat, layout=(full,))
    value = call(operator.getitem, begin, 0)
    weight = add(graph.get_attr("model.layers.0.w"), "model.layers.0", Layout("weight"), "w")
    product = call(ops.linear, value, weight, module="model.layers.0", origin="linear")
    total = call(ops.add, value, product, module="model.layers.0.add")
    state = call(ops.region_end, [total], layout=(full,))
    for layer in copies:
        state = call(ops.copy_region, state, layer, layout=(full,))
    result = call(operator.getitem, state, 0) if leave else total
    add(graph.output(result))
    return RankGraph(graph, like.sizes, like.tokens, like.plan, [Boundary("model.layers.0", "input", value.name)])


def test_a_region_written_by_hand_expands(fresh: Lower) -> None:
    graph = expand(by_hand(fresh()))
    work = [n for n in graph.graph.nodes if n.op == "call_function"]
    assert [op_name(n.target) for n in work] == ["linear", "add"] * 3
    x = next(iter(graph.graph.nodes))
    for layer, (product, total) in enumerate(zip(work[::2], work[1::2])):
        assert product.args[0] is x
        assert product.args[1].target == f"model.layers.{layer}.w"
        assert total.args == (x, product)
        assert total.meta["module"] == f"model.layers.{layer}.add"
        x = total
    assert [n.args[0] for n in graph.graph.nodes if n.op == "output"] == [x]
    # no Program node is known to stand behind a copy
    assert [n.meta["origin"] for n in work[::2]] == ["linear", None, None]
    taken = ["x", work[1].name, work[3].name]
    assert graph.boundaries == [Boundary(f"model.layers.{k}", "input", taken[k]) for k in range(3)]
    graph.graph.lint()


def nested(graph: RankGraph) -> None:
    inner = next(n for n in graph.graph.nodes if op_name(n.target) == "linear")
    with graph.graph.inserting_before(inner):
        graph.graph.call_function(ops.region_begin, ([inner.args[0]], 1, 1))


def no_begin(graph: RankGraph) -> None:
    begin = markers(graph, "region_begin")[0]
    (value,) = begin.users
    value.replace_all_uses_with(begin.args[0][0])
    graph.graph.erase_node(value)
    graph.graph.erase_node(begin)
    graph.boundaries = []


def no_end(graph: RankGraph) -> None:
    result = next(n for n in graph.graph.nodes if n.op == "output").args[0]
    result.replace_all_uses_with(next(n for n in graph.graph.nodes if n.op == "placeholder"))
    for node in [result, *reversed(markers(graph, "copy_region")), *markers(graph, "region_end")]:
        graph.graph.erase_node(node)


def copy_of_values(graph: RankGraph) -> None:
    copy = markers(graph, "copy_region")[0]
    copy.update_arg(0, list(markers(graph, "region_end")[0].args[0]))


def nothing_handed_on(graph: RankGraph) -> None:
    markers(graph, "region_end")[0].update_arg(0, [])


@pytest.mark.parametrize(
    ("given", "edit", "said"),
    [
        ({}, nested, "region_begin_1 stands inside the region of region_begin: no nesting"),
        ({}, no_begin, "region_end ends no region: region_begin is missing"),
        ({}, no_end, "region_begin opens a region that no region_end ends"),
        ({}, copy_of_values, r"copy_region copies \[add\]: it takes what region_end or another copy_region gives"),
        ({}, nothing_handed_on, "region_begin takes 1 values, but region_end hands on 0"),
        ({"repeat": 4}, None, "region_begin says repeat 4, but its layer and copies are 3"),
        ({"copies": (1,)}, None, "region_begin says repeat 3, but its layer and copies are 2"),
        ({"leave": False}, None, "output uses add from inside a region: values leave it through region_end"),
    ],
)
def test_markers_that_do_not_fit_are_refused(given: dict, edit: Callable | None, said: str, fresh: Lower) -> None:
    graph = by_hand(fresh(), **given)
    if edit is not None:
        edit(graph)
    with pytest.raises(UsageError, match=said):
        expand(graph)
