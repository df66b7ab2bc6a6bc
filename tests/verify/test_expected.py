"""What a rank should hold of a reference value: cuts by layout, and dispatched rows against a loop over tokens."""

import operator
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx
from torch.distributed.tensor.placement_types import Partial, Shard

from emulator.layout.placement import Layout, Tokens
from emulator.ops.registry import LOCAL, Mixed
from emulator.runtime.mesh import Mesh
from emulator.verify.choices import is_choice
from emulator.verify.expected import Expectation, Expected, Peer, choices_needed

T, TP, EP, E, K = 5, 2, 2, 8, 3  # 5 tokens on 2 ranks: 3 rows each, the last one of rank 1 is padding


@pytest.fixture
def expect(lowered) -> Callable[[int, dict[str, Tensor]], Expectation]:
    """expect(rank, reference)"""
    return lambda rank, reference: Expectation(
        lowered.program, Mesh(tp=TP, ep=EP), rank, [Peer(Tokens(T, TP), reference)]
    )


def held(found: Expected | None) -> tuple[list, list[int] | None]:
    assert found is not None
    return found.value.tolist(), None if found.ids is None else found.ids.tolist()


VALUE = torch.arange(T * 4).reshape(T, 4) + 100  # row t is 100 + 4t ..


def test_full_tokens_are_the_whole_value(expect, lowered) -> None:
    name = next(iter(lowered.program.graph.nodes)).name
    for rank in (0, 1):
        assert held(expect(rank, {name: VALUE}).of(name, Layout("token"))) == (VALUE.tolist(), [0, 1, 2, 3, 4])


def test_local_tokens_are_the_ranks_window_with_padding_named(expect, lowered) -> None:
    name, layout = next(iter(lowered.program.graph.nodes)).name, Layout("token").placed(tp=LOCAL)
    first, second = (expect(rank, {name: VALUE}).of(name, layout) for rank in (0, 1))
    assert held(first) == ([list(range(100 + 4 * t, 104 + 4 * t)) for t in (0, 1, 2)], [0, 1, 2])
    assert held(second) == ([list(range(100 + 4 * t, 104 + 4 * t)) for t in (3, 4)], [3, 4, -1])


def test_head_shards_hold_every_token(expect, lowered) -> None:
    name, layout = next(iter(lowered.program.graph.nodes)).name, Layout("token").placed(tp=Shard(1))
    first, second = (expect(rank, {name: VALUE}).of(name, layout) for rank in (0, 1))
    assert held(first) == ([[100 + 4 * t, 101 + 4 * t] for t in range(T)], [0, 1, 2, 3, 4])
    assert held(second) == ([[102 + 4 * t, 103 + 4 * t] for t in range(T)], [0, 1, 2, 3, 4])


def test_one_ranks_share_of_a_sum_says_nothing(expect, lowered) -> None:
    name, check = next(iter(lowered.program.graph.nodes)).name, expect(0, {})
    check.reference = {name: VALUE}
    assert check.of(name, Layout("token").placed(tp=Partial("sum"))) is None
    assert check.of(name, Layout("token").placed(tp=Mixed(Partial("sum")))) is None


def test_mixed_rows_are_the_local_rows_of_the_feature_shard(expect, lowered) -> None:
    name, layout = next(iter(lowered.program.graph.nodes)).name, Layout("token").placed(tp=Mixed(Shard(1)))
    assert held(expect(1, {name: VALUE}).of(name, layout)) == ([[114, 115], [118, 119]], [3, 4, -1])


def test_caches_are_whole_and_have_no_token_ids(expect, lowered) -> None:
    name = next(iter(lowered.program.graph.nodes)).name
    assert held(expect(1, {name: VALUE}).of(name, Layout("cache"))) == (VALUE.tolist(), None)


# --- dispatched rows --------------------------------------------------------------------------------------------------

IDS = torch.tensor([[7, 0, 3], [2, 5, 4], [0, 1, 7], [6, 3, 0], [4, 7, 2]])


class Dispatch:
    """Names of the first MoE layer's dispatch in the Program, and a reference for them worked out by hand."""

    def __init__(self, nodes_of: Callable[[str], list[fx.Node]]):
        node = nodes_of("moe_dispatch")[0]
        outputs = {u.args[1]: u.name for u in node.users if u.target is operator.getitem}
        self.rows, self.counts, self.order = outputs[0], outputs[1], outputs[2]
        self.matmuls = [n.name for n in nodes_of("grouped_matmul")]
        ids = node.args[1]
        assert isinstance(ids, fx.Node)
        # all (expert, token, choice), by expert and then in token order
        self.sorted = sorted((int(IDS[t, j]), t, j) for t in range(T) for j in range(K))
        self.reference = {
            ids.name: IDS,
            self.counts: torch.tensor([[sum(e == x for e, *_ in self.sorted) for x in range(E)]]),
            self.order: torch.tensor([t * K + j for _, t, j in self.sorted]),
            self.rows: torch.tensor([[label(*row), 0] for row in self.sorted]),
            self.matmuls[0]: torch.tensor([[label(*row), 1] for row in self.sorted]),
        }


def label(expert: int, token: int, choice: int) -> int:
    return 100 * expert + 10 * token + choice


@pytest.fixture
def dispatch(nodes_of) -> Dispatch:
    return Dispatch(nodes_of)


WINDOWS = [range(0, 3), range(3, 5)]
TOKEN_ROWS, EXPERT_ROWS = Layout("rows").placed(tp=LOCAL), Layout("rows").placed(ep=LOCAL)


@pytest.mark.parametrize("rank", [0, 1])
def test_token_rows_are_those_of_the_ranks_own_tokens(expect, dispatch: Dispatch, rank: int) -> None:
    mine = [row for row in dispatch.sorted if row[1] in WINDOWS[rank]]
    check = expect(rank, dispatch.reference)
    assert held(check.of(dispatch.rows, TOKEN_ROWS))[0] == [[label(*row), 0] for row in mine]
    assert held(check.of(dispatch.matmuls[0], TOKEN_ROWS))[0] == [[label(*row), 1] for row in mine]
    counts = [sum(e == x for e, *_ in mine) for x in range(E)]
    assert held(check.of(dispatch.counts, TOKEN_ROWS))[0] == [counts]
    # the order counts from the rank's own first token
    local = [(t - WINDOWS[rank].start) * K + j for _, t, j in mine]
    assert held(check.of(dispatch.order, TOKEN_ROWS))[0] == local


@pytest.mark.parametrize("rank", [0, 1])
def test_expert_rows_are_those_of_the_ranks_experts_by_source(expect, dispatch: Dispatch, rank: int) -> None:
    block = range(rank * E // EP, (rank + 1) * E // EP)
    received = [[row for row in dispatch.sorted if row[1] in window and row[0] in block] for window in WINDOWS]
    check = expect(rank, dispatch.reference)
    assert held(check.of(dispatch.rows, EXPERT_ROWS))[0] == [[label(*row), 0] for rows in received for row in rows]
    assert held(check.of(dispatch.matmuls[0], EXPERT_ROWS))[0] == [[label(*r), 1] for rows in received for r in rows]
    counts = [[sum(e == x for e, *_ in rows) for x in block] for rows in received]
    assert held(check.of(dispatch.counts, EXPERT_ROWS))[0] == counts


def test_nothing_is_lost_between_the_ranks(expect, dispatch: Dispatch) -> None:
    for layout in (TOKEN_ROWS, EXPERT_ROWS):
        labels = [x for rank in (0, 1) for x, _ in held(expect(rank, dispatch.reference).of(dispatch.rows, layout))[0]]
        assert sorted(labels) == sorted(label(*row) for row in dispatch.sorted)


def test_one_rank_holds_all_rows(lowered, dispatch: Dispatch) -> None:
    check = Expectation(lowered.program, Mesh(tp=1, ep=1), 0, [Peer(Tokens(T, 1), dispatch.reference)])
    assert held(check.of(dispatch.rows, Layout("rows")))[0] == [[label(*row), 0] for row in dispatch.sorted]
    assert held(check.of(dispatch.order, Layout("rows")))[0] == dispatch.reference[dispatch.order].tolist()


def test_rows_are_recognised_behind_their_dispatch(lowered, dispatch: Dispatch, nodes_of) -> None:
    check = Expectation(lowered.program, Mesh(tp=TP, ep=EP), 0, [Peer(Tokens(T, TP), {})])
    for name in (dispatch.rows, *dispatch.matmuls):
        found = check.dispatch_of[name]
        assert found is not None
        assert (found.counts, found.order) == (dispatch.counts, dispatch.order)
    assert check.dispatch_of[nodes_of("moe_combine")[0].name] is None
    assert check.dispatch_of[nodes_of("swiglu")[0].name] is None  # the dense MLP's
    assert choices_needed(lowered.program) == set(dispatch.reference) - {dispatch.rows, dispatch.matmuls[0]}


def test_choices_are_the_top_k_and_the_routing(lowered, nodes_of) -> None:
    # 3 layers with an indexer each, one MoE layer with experts and their weights
    choices = [n for n in lowered.program.graph.nodes if is_choice(n)]
    assert sum(n in nodes_of("dsa_indexer_topk") for n in choices) == 3
    assert [n.args[1] for n in choices if n.target is operator.getitem] == [0, 1]
    assert len(choices) == 5
