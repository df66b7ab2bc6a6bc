"""The value check of one rank, fed by hand: what it finds, what it lets pass, and how it tells it."""

from typing import Any

import pytest
import torch
from torch import Tensor, fx

from emulator.layout.placement import Tokens
from emulator.runtime.mesh import Mesh
from emulator.verify.choices import differing_rows, num_flips
from emulator.verify.expected import Peer
from emulator.verify.reference import Tolerance, tolerances
from emulator.verify.values import ValueCheck

F64, NAN = torch.float64, float("nan")
NORM = "model.layers.1.post_attention_layernorm"
VALUE = torch.randn(5, 6, generator=torch.Generator().manual_seed(0), dtype=F64)
IDS = {0: torch.tensor([0, 1, 2]), 1: torch.tensor([3, 4, -1])}  # 5 tokens on tp 2


def rows(rank: int) -> Tensor:
    """What a rank rightly holds: its window, with NaN in the pad row."""
    return VALUE[:3].clone() if rank == 0 else torch.cat((VALUE[3:], torch.full((1, 6), NAN, dtype=F64)))


@pytest.fixture
def node(lowered) -> fx.Node:
    """A local-token boundary of a dense layer."""
    return lowered.at(NORM, "output")


@pytest.fixture
def checker(lowered, node: fx.Node):
    """checker(rank, tolerance=1e-9) -> a check that knows VALUE as the reference of `node`."""

    def make(rank: int, tolerance: float = 1e-9) -> ValueCheck:
        origin = node.meta["origin"]
        return ValueCheck(
            lowered.program, lowered.graph, Mesh(tp=2, ep=2), rank, [Peer(Tokens(5, 2), {origin: VALUE})],
            Tolerance({origin: tolerance}, {}), force_choices=False,
        )  # fmt: skip

    return make


def only_failure(check: ValueCheck) -> dict[str, Any]:
    (failure,) = check.report.failures
    return failure


@pytest.mark.parametrize("rank", [0, 1])
def test_the_right_rows_pass_whatever_the_padding_holds(checker, node: fx.Node, rank: int) -> None:
    check = checker(rank)
    assert check.on_value(node, rows(rank), IDS[rank]) is None
    assert check.report.failures == []
    assert (check.report.checked, check.report.max_abs_error, check.report.worst) == (1, 0.0, 0.0)


def test_another_ranks_window_is_told_by_its_ids(checker, node: fx.Node) -> None:
    # values and shape are right: only the shadow knows whose rows they are
    check = checker(1)
    check.on_value(node, rows(1), IDS[0])
    failure = only_failure(check)
    assert failure["found"]["tokens"] == "0..3"
    assert failure["expected"]["tokens"] == "3..5 + 1 padding"
    assert "holds tokens 0..3" in failure["detail"]


def test_another_ranks_values_are_told_too(checker, node: fx.Node) -> None:
    check = checker(1)
    check.on_value(node, rows(0), IDS[1])
    assert "2 of 2 rows differ" in only_failure(check)["detail"]


def test_rows_in_another_order_are_told(checker, node: fx.Node) -> None:
    check = checker(0)
    check.on_value(node, rows(0)[[1, 0, 2]], IDS[0][[1, 0, 2]])
    assert "holds tokens" in only_failure(check)["detail"]


def test_rows_without_ids_are_not_trusted(checker, node: fx.Node) -> None:
    check = checker(0)
    check.on_value(node, rows(0), None)
    assert only_failure(check)["found"]["tokens"] == "unknown"


def test_full_rows_where_local_ones_belong(checker, node: fx.Node) -> None:
    check = checker(0)
    check.on_value(node, VALUE.clone(), torch.arange(5))
    assert only_failure(check)["expected"]["shape"] == [3, 6]
    assert only_failure(check)["found"]["shape"] == [5, 6]


def test_a_wrong_width(checker, node: fx.Node) -> None:
    check = checker(0)
    check.on_value(node, rows(0)[:, :3].contiguous(), IDS[0])
    assert only_failure(check)["detail"] == "shape [3, 3], expected [3, 6]"


def test_nan_in_a_real_row(checker, node: fx.Node) -> None:
    check, value = checker(1), rows(1)
    value[1, 2] = NAN
    check.on_value(node, value, IDS[1])
    failure = only_failure(check)
    assert "1 of 2 rows differ" in failure["detail"]
    assert "NaN" in failure["detail"]
    assert failure["found"]["values"].startswith("row 1: nan")
    assert check.report.max_abs_error == 0.0  # a NaN is no error size


@pytest.mark.parametrize("factor", [2.0, 0.5, 1 + 1e-6], ids=["times tp", "1/tp", "slightly"])
def test_scaled_values(checker, node: fx.Node, factor: float) -> None:
    check = checker(0)
    check.on_value(node, rows(0) * factor, IDS[0])
    failure = only_failure(check)
    assert "3 of 3 rows differ" in failure["detail"]
    largest = float(VALUE[:3].abs().max()) * abs(factor - 1)
    assert check.report.max_abs_error == pytest.approx(largest)
    assert check.report.max_rel_error == pytest.approx(largest / float(VALUE.abs().max()))


def test_rounding_passes_and_is_measured(checker, node: fx.Node) -> None:
    check, value = checker(0, tolerance=1e-9), rows(0)
    value[2, 5] += 2.5e-10
    check.on_value(node, value, IDS[0])
    assert check.report.failures == []
    assert check.report.worst == pytest.approx(0.25, rel=1e-3)  # in tolerances


def test_a_failure_names_the_place(checker, node: fx.Node, lowered) -> None:
    check = checker(1)
    check.on_value(node, rows(1) * 2, IDS[1])
    failure = only_failure(check)
    order = [n.name for n in lowered.graph.graph.nodes].index(node.name)
    place = {"layer": 1, "module": NORM, "port": "output", "rank": 1, "node": node.name, "order": order}
    assert {k: failure[k] for k in place} == place
    assert failure["expected"]["layout"] == failure["found"]["layout"] == "local-token"


def test_two_problems_of_one_value_are_one_failure(checker, node: fx.Node) -> None:
    check = checker(0)
    check.on_problem(node, "rows of different tokens meet")
    check.on_value(node, rows(0) * 2, IDS[0])
    detail = only_failure(check)["detail"]
    assert "rows of different tokens meet" in detail
    assert "rows differ" in detail


def test_values_inside_modules_are_not_checked(checker, lowered) -> None:
    check = checker(0)
    boundaries = {b.node for b in lowered.graph.boundaries}
    inside = next(n for n in lowered.graph.graph.nodes if n.op == "call_function" and n.name not in boundaries)
    assert check.on_value(inside, torch.zeros(1), None) is None
    assert check.report.checked == 0


def test_slots_that_nobody_wrote_are_nan_on_both_sides(lowered) -> None:
    node = lowered.at("model.layers.0.self_attn.cache", "output")
    origin, cache = node.meta["origin"], torch.full((8, 3), NAN, dtype=F64)
    cache[2] = 1.0

    def run(value: Tensor) -> ValueCheck:
        check = ValueCheck(
            lowered.program, lowered.graph, Mesh(tp=2, ep=2), 0, [Peer(Tokens(5, 2), {origin: cache})],
            Tolerance({origin: 1e-9}, {}),
            force_choices=False,
        )  # fmt: skip
        check.on_value(node, value, None)
        return check

    assert run(cache.clone()).report.failures == []
    unwritten, extra = cache.clone(), cache.clone()
    unwritten[2] = NAN
    extra[7] = 5.0  # a -1 slot that wrote the last row
    assert "NaN" in only_failure(run(unwritten))["detail"]
    assert "1 of 8 rows differ" in only_failure(run(extra))["detail"]


# --- discrete choices -------------------------------------------------------------------------------------------------

INDEXER = "model.layers.0.self_attn.indexer"


class Choices:
    """20 rows of top-k ids at the indexer's output; under tp 1, so that every row is there."""

    def __init__(self, share: float | None):
        from emulator.layout.lowering import lower
        from emulator.layout.plan import load_plan
        from emulator.model.config import load_config
        from emulator.model.program import build_program

        program = build_program(load_config("glm-5.1-mini").with_layers(1))
        graph = lower(program, load_plan("dsa_cp"), {"tp": 1, "ep": 1}, 20)
        outputs = [b.node for b in graph.boundaries if (b.module, b.port) == (INDEXER, "output")]
        self.node = next(n for n in graph.graph.nodes if n.name in outputs and "dsa_indexer_topk" in str(n.target))
        origin = self.node.meta["origin"]
        self.ids = torch.arange(20 * 4, dtype=torch.int32).reshape(20, 4) % 37
        tolerance = Tolerance({origin: 0.0}, {} if share is None else {origin: share})
        self.check = ValueCheck(
            program,
            graph,
            Mesh(tp=1),
            0,
            [Peer(Tokens(len(self.ids), 1), {origin: self.ids})],
            tolerance,
            force_choices=share is not None,
        )

    def run(self, value: Tensor) -> Tensor | None:
        return self.check.on_value(self.node, value, torch.arange(20))

    def flipped(self, num_rows: int) -> Tensor:
        value = self.ids.clone()
        value[:num_rows, 1] = 99
        return value


def test_the_order_of_chosen_ids_carries_no_meaning() -> None:
    choices = Choices(None)
    assert choices.run(choices.ids.flip(1)) is None
    assert choices.check.report.failures == []


def test_in_float64_no_choice_may_flip() -> None:
    choices = Choices(None)
    assert choices.run(choices.flipped(1)) is None
    assert "1 of 20 rows hold other ids" in choices.check.report.failures[0]["detail"]


@pytest.mark.parametrize(("flipped", "holds"), [(0, True), (4, True), (5, False)])
def test_below_float64_a_share_of_rows_may_flip(flipped: int, holds: bool) -> None:
    choices = Choices(share=0.2)  # 4 of 20 rows
    replacement = choices.run(choices.flipped(flipped))
    assert (choices.check.report.failures == []) is holds
    assert choices.check.report.flips == flipped
    # later layers go on with the reference's choice, so that one near-tie is not followed through all of them
    assert replacement is not None
    assert torch.equal(replacement, choices.ids)


def test_a_forced_choice_leaves_the_rank_its_own_tensor() -> None:
    choices = Choices(share=0.2)
    value = choices.flipped(3)
    before = value.clone()
    choices.run(value)
    assert torch.equal(value, before)


def test_differing_rows() -> None:
    expected = torch.tensor([[1, 2, 3], [4, 5, 6], [7, 8, -1]])
    value = torch.tensor([[3, 1, 2], [4, 5, 7], [-1, 7, 8]])
    assert differing_rows(value, expected, 0.0).tolist() == [False, True, False]
    weights = torch.tensor([[0.5, 0.3], [0.2, 0.1]])
    assert differing_rows(weights.flip(1) + 0.01, weights, 0.02).tolist() == [False, False]
    assert differing_rows(weights.flip(1) + 0.01, weights, 0.001).tolist() == [True, True]
    assert differing_rows(torch.tensor([[NAN, 0.3]]), torch.tensor([[0.5, 0.3]]), 1.0).tolist() == [True]


def test_flips_count_ids_that_the_reference_did_not_choose() -> None:
    expected = torch.tensor([[9, 2, 5], [1, 4, 6]])
    value = torch.tensor([[5, 9, 2], [1, 7, 0]])
    assert num_flips(value, expected) == 2
    assert num_flips(expected, expected) == 0
    assert num_flips(torch.tensor([[100, 101, 102]]), torch.tensor([[1, 2, 3]])) == 3


# --- tolerances -------------------------------------------------------------------------------------------------------


def test_float64_tolerance_is_a_billionth_of_the_largest_value(lowered) -> None:
    # DESIGN section 9; NaN (unwritten slots) has no size
    reference = {"a": torch.tensor([[3.0, -40.0], [NAN, 1.0]], dtype=F64), "b": torch.tensor([2, -7])}
    found = tolerances(lowered.program, {}, {}, reference, F64, 0)
    assert found.absolute == pytest.approx({"a": 4e-8, "b": 7e-9})
    assert found.flips == {}
