"""What a fault can change on a rank, and on the graph, without touching anyone else's."""

import operator

import pytest
import torch
from torch import Tensor, fx

from emulator.errors import UsageError
from emulator.faults.on_graph import GraphEdit
from emulator.faults.on_rank import FaultyCollectives, RankSite
from emulator.jobs.matrix import Cell, scenario_of
from emulator.jobs.prepare import prepare
from emulator.layout.rank_graph import RankGraph, copy_graph
from emulator.ops.foreign import function_name
from emulator.runtime.collectives import Collectives
from emulator.runtime.mesh import Mesh

MESH = Mesh(tp=2, ep=2)


@pytest.fixture(scope="module")
def rank_graph() -> RankGraph:
    """dsa_cp, one dense layer, 13 tokens on 2 ranks: 7 rows and 6 rows with one of padding."""
    scenario = scenario_of(Cell("all-reduce-twice", "glm-5.1-mini", 2, 13)).model_copy(
        update={"fault": None, "plan": "dsa_cp", "variants": {}}
    )
    return prepare(scenario, graph_only=True).rank_graph


def _site(rank_graph: RankGraph, rank: int, weights: dict[str, Tensor] | None = None) -> RankSite:
    return RankSite(rank_graph, MESH, rank, weights or {}, {})


def test_a_copy_keeps_names_order_and_meta(rank_graph: RankGraph) -> None:
    copied = copy_graph(rank_graph.graph)
    assert [n.name for n in copied.nodes] == [n.name for n in rank_graph.graph.nodes]
    pairs = list(zip(copied.nodes, rank_graph.graph.nodes))
    assert all(a.meta == b.meta and a.meta is not b.meta and a is not b for a, b in pairs)


def test_a_copy_keeps_the_names_of_nodes_that_were_put_in_later() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    second = graph.call_function(torch.neg, (x,))
    graph.output(second)
    with graph.inserting_before(second):
        second.args = (graph.call_function(torch.neg, (x,)),)
    names = ["x", "neg_1", "neg", "output"]
    assert [n.name for n in graph.nodes] == names
    assert [n.name for n in copy_graph(graph).nodes] == names


def test_where_a_rank_stands(rank_graph: RankGraph) -> None:
    site = _site(rank_graph, 1)
    assert (site.index, site.size, site.window, site.num_pads) == (1, 2, (7, 13), 1)


def test_a_rank_holds_its_part_unless_told_otherwise(rank_graph: RankGraph) -> None:
    name = "model.layers.0.mlp.gate_proj.weight"  # [264, 144], split by rows
    whole = torch.arange(264 * 144, dtype=torch.float64).reshape(264, 144)
    site = _site(rank_graph, 1, {name: whole})
    layout = next(n.meta["layout"] for n in site.graph.nodes if n.target == name)
    assert torch.equal(site.weight(name, layout), whole[132:])
    assert torch.equal(site.part(name, 0), whole[:132])
    site.parts[name] = site.part(name, 0)
    assert torch.equal(site.weight(name, layout), whole[:132])
    assert torch.equal(whole[132:][0, :2], torch.tensor([132.0 * 144, 132.0 * 144 + 1]).double())  # untouched


def test_a_wrapped_node_is_computed_otherwise_on_this_rank_only(rank_graph: RankGraph) -> None:
    site = _site(rank_graph, 0)
    node = site.find("0.self_attn.o_proj", "linear")
    site.wrap(node, lambda op, x, *rest: op(x, *rest) + 1)
    x = torch.ones(2, 3, dtype=torch.float64)
    assert torch.equal(node.target(x, torch.eye(3).double(), None), x + 1)
    other = next(n for n in rank_graph.graph.nodes if n.name == node.name)
    assert torch.equal(other.target(x, torch.eye(3).double(), None), x)


def test_a_value_is_changed_for_all_who_take_it(rank_graph: RankGraph) -> None:
    site = _site(rank_graph, 0)
    node = site.find("0.self_attn", "unpad")
    assert node.meta["origin"] is not None
    takers = set(node.users)
    site.after(node, torch.neg)
    (new,) = node.users
    assert new.target is torch.neg
    assert set(new.users) == takers
    assert new.meta["origin"] is None  # it claims to be no known value
    assert new.meta["module"] == node.meta["module"]


class _Plain(Collectives):
    """Collectives that record calls in place of moving anything."""

    def __init__(self) -> None:
        super().__init__(MESH, 0, None, None, 1.0)  # type: ignore[arg-type]


def test_a_stand_in_carries_its_own_transition_out_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    def call(self, op, x, *args, node, module, layout, ids=None):
        made.append((op, args, node, module))
        return x * 2

    monkeypatch.setattr(Collectives, "call", call)

    def stand_in(move, x, axis, size, dim):
        return move(x + 1, axis, size, dim) + move(x, axis, size, op="all_reduce")

    collectives = FaultyCollectives(_Plain(), {"bad": stand_in})
    x = torch.ones(2)
    names = {"module": "m", "layout": "local-token"}
    assert collectives.call("all_gather", x, "tp", 2, 0, node="good", **names).tolist() == [2, 2]
    assert collectives.call("all_gather", x, "tp", 2, 0, node="bad", **names).tolist() == [4 + 2, 4 + 2]
    assert made == [
        ("all_gather", ("tp", 2, 0), "good", "m"),
        ("all_gather", ("tp", 2, 0), "bad", "m"),
        ("all_reduce", ("tp", 2), "bad", "m"),
    ]


# --- the graph -------------------------------------------------------------------------------------------------------


def test_gather_and_cut_handle_padding(rank_graph: RankGraph) -> None:
    edit = GraphEdit(rank_graph)
    rows = edit.find("0.mlp.down_proj", "reduce_scatter")
    full = edit.gather(rows)
    again = edit.cut(full)
    assert [function_name(n) for n in (full, full.args[0])] == ["unpad", "all_gather"]
    assert [function_name(n) for n in (again, again.args[0])] == ["slice", "pad"]
    edit.reroute(rows, again)
    done = edit.done()
    assert done.violations == []
    layouts = {n.name: str(n.meta["layout"]) for n in done.graph.nodes}
    assert (layouts[full.name], layouts[again.name]) == ("full-token", "local-token")
    assert next(n for n in done.graph.nodes if n.name == again.name).meta["origin"] == rows.meta["origin"]


def test_a_reduction_belongs_to_the_module_whose_sum_it_makes(rank_graph: RankGraph) -> None:
    edit = GraphEdit(rank_graph)
    product = edit.find("0.self_attn.o_proj", "linear")
    total = edit.add("reduce_scatter", edit.padded(product), "tp", 2, 0)
    assert total.meta["module"] == "model.layers.0.self_attn.o_proj"


def test_taking_a_node_out(rank_graph: RankGraph) -> None:
    edit = GraphEdit(rank_graph)
    cut = edit.find("0.self_attn.o_proj", "slice")
    takers = set(cut.users)
    source = edit.without(cut)
    assert function_name(source) == "pad"
    assert takers <= set(source.users)
    with pytest.raises(UsageError, match="the graph has 0"):
        edit.find("0.self_attn.o_proj", "slice")


def test_nodes_are_found_by_module_op_and_number(rank_graph: RankGraph) -> None:
    edit = GraphEdit(rank_graph)
    first, second = (edit.find("lm_head", "all_gather", nth) for nth in (0, 1))
    assert [n.args[3] for n in (first, second)] == [0, 1]  # tokens, then vocabulary
    assert edit.find("0.post_attention_layernorm", "getitem", 1).target is operator.getitem
    with pytest.raises(UsageError, match="all_gather number 3 of lm_head: the graph has 2"):
        edit.find("lm_head", "all_gather", 2)
