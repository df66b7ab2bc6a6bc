"""The assertion helpers pass on right values, and say what a planted wrong value is."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from emulator.errors import RankError, UsageError
from emulator.runtime.world import World
from emulator.testing.asserts import (
    assert_collectives,
    assert_layout,
    assert_same_on_all_ranks,
    assert_sums_to,
)
from emulator.testing.diagnose import spans
from emulator.testing.record import record

SIZE, TOKENS, WIDTH = 4, 97, 8
PER = 25  # ceil(97 / 4); windows 0..25, 25..50, 50..75, 75..97


@pytest.fixture(scope="module")
def world():
    with World(SIZE, timeout=20.0) as world:
        yield world


def full() -> torch.Tensor:
    """No two rows alike."""
    return torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(7))


def local(rank: int) -> torch.Tensor:
    """This rank's rows; padding is NaN, as in verification runs."""
    padded = torch.cat([full(), torch.full((SIZE * PER - TOKENS, WIDTH), torch.nan)])
    return padded[rank * PER : (rank + 1) * PER].clone()


def part(rank: int) -> torch.Tensor:
    """Parts 1, 2, 3 and 4 tenths of the whole."""
    return full() * (rank + 1) / 10


def message(world: World, check) -> str:
    """check(rank) fails on every rank, with the same words."""

    def on_rank(rank: int) -> str:
        with pytest.raises(AssertionError) as caught:
            check(rank)
        return str(caught.value)

    first, *others = world.run(on_rank)
    assert others == [first] * (SIZE - 1)
    return first


# -- layouts: right values ---------------------------------------------------------------------------------------------


def test_right_values_pass(world):
    def on_rank(rank: int, tp_group) -> None:
        with record() as trace:
            assert_layout(full(), "full-token", reference=full())
            assert_layout(local(rank), "local-token", reference=full(), tokens=TOKENS, group=tp_group)
            assert_layout(full()[:, 2 * rank : 2 * rank + 2], "shard(1)", reference=full())
            assert_layout(part(rank), "partial", reference=full())
            assert_sums_to(part(rank), full(), tp_group)
            assert_same_on_all_ranks(full())
            assert_same_on_all_ranks(torch.tensor([torch.nan, 1.0]))
        assert trace.calls == [], "the checks' own traffic is not recorded"

    world.run(on_rank)


def test_fewer_tokens_than_ranks(world):
    # 2 tokens on 4 ranks: one row each, the last two are padding
    def on_rank(rank: int) -> None:
        x = full()[rank : rank + 1] if rank < 2 else torch.full((1, WIDTH), torch.nan)
        assert_layout(x, "local-token", reference=full(), tokens=2)

    world.run(on_rank)


def test_a_tolerance_can_be_given_and_follows_the_dtype(world):
    def on_rank(rank: int) -> None:
        assert_layout(full().bfloat16(), "full-token", reference=full())
        assert_layout(full() + 0.5, "full-token", reference=full(), atol=0.6)
        assert_sums_to(part(rank) + 0.1, full(), atol=0.5)

    world.run(on_rank)


def test_groups_of_a_mesh_and_whole_numbers():
    def on_rank(rank: int, dp_group, tp_group) -> None:
        assert_same_on_all_ranks(torch.tensor(rank // 2), tp_group)
        assert_sums_to(torch.tensor([1 + rank // 2]), torch.tensor([3]), dp_group)
        with pytest.raises(AssertionError, match=r"on dp; ranks 0 agree|on dp; ranks 1 agree"):
            assert_same_on_all_ranks(torch.tensor(rank // 2), dp_group)

    World(4, mesh={"dp": 2, "tp": 2}, timeout=20.0).run(on_rank)


def test_a_dtensor_is_checked_by_its_local_part(world):
    def on_rank(rank: int) -> None:
        mesh = init_device_mesh("cpu", (SIZE,))
        x = DTensor.from_local(full()[:96].chunk(SIZE)[rank], mesh, [Shard(0)])
        assert_layout(x, "local-token", reference=full(), tokens=96)

    world.run(on_rank)


def test_earlier_async_calls_do_not_disturb_the_checks(world):
    # one rank has started its call on gloo, the others only posted it
    def on_rank(rank: int) -> float:
        x = torch.ones(2)
        work = dist.all_reduce(x, async_op=True)
        if rank == 1:
            work.is_completed()
        assert_same_on_all_ranks(full())
        work.wait()
        return float(x[0])

    assert world.run(on_rank) == [4.0] * SIZE


# -- layouts: wrong values ---------------------------------------------------------------------------------------------


def planted(rank: int, on: int, make):
    """The right local rows, but make(rows) on one rank."""
    rows = local(rank)
    return make(rows) if rank == on else rows


def with_rows(rows: torch.Tensor, at: slice, value) -> torch.Tensor:
    rows[at] = value
    return rows


LOCAL = {
    "rank 2 holds rows 25..50, expected 50..75": (2, lambda rows: local(1)),
    # one row late: the windows of somebody who forgot the padding
    "rank 1 holds rows 24..49, expected 25..50": (1, lambda rows: full()[24:49]),
    "rank 1 holds 2 x the expected values": (1, lambda rows: 2 * rows),
    "rank 1 holds 4 (the group's size) x the expected values": (1, lambda rows: 4 * rows),
    "rank 3 holds 1/4 (1 / group size) of the expected values": (3, lambda rows: rows / 4),
    "rank 1 holds -1 x the expected values in rows 27..29": (1, lambda rows: with_rows(rows, slice(2, 4), -rows[2:4])),
    "rank 1 has NaN in real rows 26, 30": (1, lambda rows: with_rows(rows, slice(1, 6, 4), torch.nan)),
    "rank 0 holds rows permuted: 24, 23, 22, 21 and 21 more in place of 0..25": (0, lambda rows: rows.flip(0)),
    "rank 0 holds all zeros in rows 0..25": (0, torch.zeros_like),
    "rank 3 holds all zeros in rows 96": (3, lambda rows: with_rows(rows, slice(21, 22), 0)),
    "rank 2 holds rows 0..2 in place of 53..55": (2, lambda rows: with_rows(rows, slice(3, 5), full()[:2])),
    # every fourth row: tokens dealt out in turn
    "rank 1 holds rows 2, 6, 10, 14 and 21 more, expected 25..50": (1, lambda rows: full()[2::4].repeat(2, 1)[:25]),
    "rank 1 holds a feature slice (2..4 of dim 1) of all tokens": (1, lambda rows: full()[:, 2:4]),
    "rank 1 holds all 97 rows (full-token), shape [97, 8]; expected rows 25..50": (1, lambda rows: full()),
    "rank 3 holds rows 75..97 (local-token of rank index 3), shape [22, 8]; expected rows 75..97 (97 tokens padded to "
    "100 over 4 ranks), shape [25, 8]": (3, lambda rows: rows[:22]),
    "rank 1 holds an unknown value, shape [25, 9]; expected rows 25..50": (1, lambda rows: torch.ones(25, 9)),
    "rank 1 differs in rows 28 (1 of 25), first at [28, 5]: found 99, expected": (
        1,
        lambda rows: with_rows(rows, (3, 5), 99.0),
    ),
}


@pytest.mark.parametrize("text", LOCAL)
def test_a_wrong_local_value_is_described(world, text):
    on, make = LOCAL[text]
    found = message(
        world, lambda rank: assert_layout(planted(rank, on, make), "local-token", reference=full(), tokens=TOKENS)
    )
    title, *lines = found.split("\n  ")
    assert title == "assert_layout: not local-token on tp"
    assert len(lines) == 1, "only the wrong rank"
    assert lines[0].startswith(text)


def test_several_wrong_ranks_are_all_named(world):
    # everyone holds the next rank's rows
    def check(rank: int) -> None:
        assert_layout(full()[:96].chunk(4)[(rank + 1) % 4], "local-token", reference=full(), tokens=96)

    assert message(world, check).split("\n  ")[1:] == [
        "rank 0 holds rows 24..48, expected 0..24",
        "rank 1 holds rows 48..72, expected 24..48",
        "rank 2 holds rows 72..96, expected 48..72",
        "rank 3 holds rows 0..24, expected 72..96",
    ]


def test_padding_that_leaked_and_rows_that_moved_are_both_told(world):
    # rank 2 holds rank 3's rows: 22 real ones, 75..97, and 3 of padding
    found = message(
        world,
        lambda rank: assert_layout(planted(rank, 2, lambda rows: local(3)), "local-token", reference=full(), tokens=97),
    )
    assert found.split("\n  ")[1] == "rank 2 has NaN in real rows 72..75; holds rows 75..97 in place of 50..72"


FULL = {
    "holds rows 50..75 (local-token of rank index 2), shape [25, 8]; expected all rows 0..97, shape [97, 8]": local,
    "holds 100 rows, 3 of them padding, expected 97": lambda rank: torch.cat([full(), torch.zeros(3, 8)]),
    "holds a feature slice (4..6 of dim 1) of all tokens": lambda rank: full()[:, 2 * rank : 2 * rank + 2],
    "has NaN in real rows 96": lambda rank: with_rows(full(), slice(96, 97), torch.nan),
}


@pytest.mark.parametrize("text", FULL)
def test_a_wrong_full_value_is_described(world, text):
    found = message(world, lambda rank: assert_layout(FULL[text](rank), "full-token", reference=full()))
    assert found.split("\n  ")[3].startswith(f"rank 2 {text}")


def test_a_partial_value_in_place_of_a_full_one(world):
    # rank r holds (r + 1) / 10 of the whole: 1/10, 1/5, 0.3, 0.4
    found = message(world, lambda rank: assert_layout(part(rank), "full-token", reference=full()))
    assert found.split("\n  ") == [
        "assert_layout: not full-token on tp",
        "rank 0 holds 1/10 of the expected values",
        "rank 1 holds 1/5 of the expected values",
        "rank 2 holds 0.3 x the expected values",
        "rank 3 holds 0.4 x the expected values",
        "the sum over the group is the reference: the value is partial",
    ]


def test_a_wrong_feature_slice_is_described_in_its_own_dim(world):
    found = message(
        world, lambda rank: assert_layout(full()[:, 6 - 2 * rank :][:, :2], "shard(1)", reference=full()[:, :])
    )
    assert found.split("\n  ")[1] == "rank 0 holds indices of dim 1 6..8, expected 0..2"


def test_an_error_on_one_rank_reaches_all_without_a_hang(world):
    def check(rank: int) -> None:
        assert_layout(full() if rank else full().to("meta"), "full-token", reference=full())

    assert "\n  rank 0 cannot be checked: " in message(world, check)


@pytest.mark.parametrize(
    ("layout", "options", "text"),
    [
        ("row-wise", {}, "layout 'row-wise' unknown"),
        ("shard(0)", {}, r"dim 0 of \[97, 8\] cannot be cut into 4"),
        ("full-token", {"tokens": 98}, "tokens = 98: the reference has 97 rows"),
    ],
)
def test_an_impossible_request_is_the_users_mistake(world, layout, options, text):
    with pytest.raises(UsageError, match=text):
        world.run(lambda rank: assert_layout(full(), layout, reference=full(), **options))


def test_a_rank_that_does_something_else_is_named(world):
    def on_rank(rank: int) -> None:
        if rank == 3:
            dist.all_reduce(torch.ones(2))
        else:
            assert_layout(full(), "full-token", reference=full())

    with pytest.raises(RankError, match="disagree on op") as caught:
        world.run(on_rank)
    assert caught.value.report["culprits"] == [3]
    assert "assert_layout" in str(caught.value)


def test_a_rank_that_leaves_the_check_out_is_named(world):
    with pytest.raises(RankError, match="rank 1 finished without making this call") as caught:
        world.run(lambda rank: assert_same_on_all_ranks(full()) if rank != 1 else None)
    assert caught.value.report["culprits"] == [1]


# -- sums and equality -------------------------------------------------------------------------------------------------

SUMS = {
    # 1 + 2 + 3 + 4 tenths, twice
    "the sum over 4 ranks holds 2 x the expected values": lambda rank: 2 * part(rank),
    "the sum over 4 ranks holds 4 (the group's size) x the expected values\n  every rank holds the whole reference: "
    "the value is full, not partial": lambda rank: full(),
    "the sum over 4 ranks has NaN in real rows 5\n  rank 2 has NaN in its part": lambda rank: (
        with_rows(part(rank), slice(5, 6), torch.nan) if rank == 2 else part(rank)
    ),
    # one part too many: 1 + 4/10 of the whole is no factor when it is added to some rows only
    "the sum over 4 ranks holds 0.6 x the expected values\n  rank 3 has a part of all zeros": lambda rank: (
        part(rank) * (rank != 3)
    ),
}


@pytest.mark.parametrize("text", SUMS)
def test_a_wrong_sum_is_described(world, text):
    assert text in message(world, lambda rank: assert_sums_to(SUMS[text](rank), full()))
    assert message(world, lambda rank: assert_layout(SUMS[text](rank), "partial", reference=full())).startswith(
        "assert_layout: not partial on tp: the sum"
    )


def test_the_part_that_is_too_much_is_named(world):
    # ranks 0 to 2 make up the whole; rank 3 adds noise
    def check(rank: int) -> None:
        assert_sums_to(full() / 3 if rank < 3 else torch.arange(TOKENS * WIDTH).reshape(TOKENS, WIDTH) / 7, full())

    assert "\n  rank 3 has a part without which the sum is right" in message(world, check)


def test_parts_of_different_shapes_are_no_sum(world):
    found = message(world, lambda rank: assert_sums_to(full()[: TOKENS - rank], full()))
    assert "rank 3 holds shape [94, 8], the reference has [97, 8]" in found


def test_the_rank_that_differs_is_named_with_place_and_amount(world):
    def check(rank: int) -> None:
        x = torch.zeros(3, 4)
        if rank == 2:
            x[1, 3], x[2, 0] = 0.25, -1.5
        assert_same_on_all_ranks(x)

    assert message(world, check) == (
        "assert_same_on_all_ranks: values differ on tp; ranks 0, 1, 3 agree\n  rank 2 differs from rank 0 in 2 of 12 "
        "values, first at [1, 3]: 0.25 against 0.0, by 0.25; largest difference 1.5"
    )


def test_different_shapes_and_dtypes_are_told_before_any_value_is_sent(world):
    def check(rank: int) -> None:
        assert_same_on_all_ranks(torch.zeros(3, 4) if rank else torch.zeros(4, 3, dtype=torch.float64))

    found = message(world, check).split("\n  ")
    assert found[1:3] == ["rank 0 holds float64 [4, 3]", "rank 1 holds float32 [3, 4]"]


# -- calls -------------------------------------------------------------------------------------------------------------


def test_exact_counts_pass_in_both_forms(world):
    def on_rank() -> int:
        with assert_collectives({"tp": {"all_reduce": 1, "barrier": 1, "all_gather": 0}}) as trace:
            dist.all_reduce(torch.ones(2))
            dist.barrier()
        assert_collectives({"tp": {"all_reduce": 1, "barrier": 1}}, trace=trace)
        return len(trace.calls)

    assert world.run(on_rank) == [2] * SIZE


@pytest.mark.parametrize(
    ("expected", "text"),
    [
        ({"tp": {"all_reduce": 2, "barrier": 1}}, "all_reduce on tp: expected 2, found 1"),
        ({"tp": {"all_reduce": 1}}, "barrier on tp: expected 0, found 1"),
        ({"tp": {"all_reduce": 1, "barrier": 1}, "dp": {"send": 1}}, "send on dp: expected 1, found 0"),
        ({}, "all_reduce on tp: expected 0, found 1"),
    ],
)
def test_other_calls_fail_with_their_sites(world, expected, text):
    def check(rank: int) -> None:
        with assert_collectives(expected):
            dist.all_reduce(torch.ones(2))
            dist.barrier()

    found = message(world, check)
    assert f"\n  {text}" in found
    assert f"at {__file__}:" in found or "send on dp" in text


def test_an_error_inside_the_block_is_not_hidden(world):
    def on_rank() -> None:
        with pytest.raises(ZeroDivisionError), assert_collectives({"tp": {"barrier": 1}}):
            _ = 1 / 0

    world.run(on_rank)


def test_without_torch_distributed_a_group_is_this_process():
    assert_layout(full(), "local-token", reference=full())
    assert_sums_to(full(), full())
    assert_same_on_all_ranks(full())
    with pytest.raises(AssertionError, match="rank 0 holds 3 x the expected values"):
        assert_layout(3 * full(), "full-token", reference=full())


def test_spans_of_rows():
    assert spans([3, 4, 5, 9, 11, 12]) == "3..6, 9, 11..13"
