"""Token windows of the ranks, layouts, and the words people write and read for them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor.placement_types import Partial, Placement, Replicate, Shard

from emulator.errors import UsageError
from emulator.layout.placement import Layout, Tokens, parse_want, parse_weight, placement_word
from emulator.ops.registry import Mixed

# engine_layouts.md sections 3 and 4, row "DSA-CP": (tokens, ranks) -> padded, real rows per rank
WORKED = [
    (9, 4, 12, [3, 3, 3, 0]),  # rank 3 is all padding
    (3, 4, 4, [1, 1, 1, 0]),  # fewer tokens than ranks
    (5, 2, 6, [3, 2]),
    (13, 4, 16, [4, 4, 4, 1]),
    (4096, 16, 4096, [256] * 16),  # the RFC's prefill
    (1, 4, 4, [1, 0, 0, 0]),  # single-token decode
    (7, 1, 7, [7]),
]


@pytest.mark.parametrize(("real", "parts", "padded", "rows"), WORKED)
def test_windows_of_the_published_cases(real: int, parts: int, padded: int, rows: list[int]) -> None:
    tokens = Tokens(real, parts)
    assert tokens.padded == padded
    assert tokens.per == padded // parts
    windows = [tokens.window(r) for r in range(parts)]
    assert [end - start for start, end in windows] == rows


def test_a_rank_with_padding_only_has_an_empty_window_not_a_negative_one() -> None:
    # 5 tokens on 4 ranks: 2 each, so rank 3 would run from 6 to 5
    assert [Tokens(5, 4).window(r) for r in range(4)] == [(0, 2), (2, 4), (4, 5), (6, 6)]


@given(st.integers(1, 5000), st.integers(1, 64))
def test_windows_are_disjoint_and_cover_the_tokens(real: int, parts: int) -> None:
    tokens = Tokens(real, parts)
    assert 0 <= tokens.padded - real < parts  # never more padding than needed
    seen: list[int] = []
    for rank in range(parts):
        start, end = tokens.window(rank)
        assert start == rank * tokens.per
        assert start <= end <= start + tokens.per
        seen += range(start, end)
    assert seen == list(range(real))


R, LOCAL = Replicate(), Shard(0)


@pytest.mark.parametrize(
    ("placement", "word"),
    [
        (R, "full-token"),
        (LOCAL, "local-token"),
        (Shard(1), "shard(1)"),
        (Partial("sum"), "partial"),
        (Mixed(Shard(1)), "local-token+shard(1)"),
        (Mixed(Partial("sum")), "local-token+partial"),
    ],
    ids=str,
)
def test_words_for_token_values(placement: Placement, word: str) -> None:
    assert placement_word(placement) == word
    assert str(Layout("token").placed(tp=placement)) == word


def test_words_for_weights_and_rows() -> None:
    assert str(Layout("weight")) == "replicated"
    assert str(Layout("weight").placed(tp=Shard(0))) == "tp:shard(0)"
    assert str(Layout("weight").placed(ep=Shard(0))) == "ep:shard(0)"
    assert str(Layout("rows").placed(tp=LOCAL)) == "token-rows"
    assert str(Layout("rows").placed(ep=LOCAL)) == "expert-rows"


def test_a_layout_has_one_placement_per_axis() -> None:
    layout = Layout("token").placed(tp=LOCAL, ep=Shard(1))
    assert (layout.on("tp"), layout.on("ep"), layout.on("dp")) == (LOCAL, Shard(1), R)
    back = layout.placed(tp=R)
    assert back.on("tp") == R
    assert back == Layout("token").placed(ep=Shard(1))  # replicated axes leave no trace, so equal layouts are equal
    assert layout.placed(ep=R, tp=R) == Layout("token")


WANTS = [
    ("full-token", ("token", {"tp": R})),
    ("local-token", ("token", {"tp": LOCAL})),
    ("partial", ("token", {"tp": Partial("sum")})),
    ("shard(1)", ("token", {"tp": Shard(1)})),
    ("shard(2)", ("token", {"tp": Shard(2)})),
    ("token-rows", ("rows", {"tp": LOCAL, "ep": R})),
    ("expert-rows", ("rows", {"tp": R, "ep": LOCAL})),
]


@pytest.mark.parametrize(("word", "meaning"), WANTS, ids=[w for w, _ in WANTS])
def test_words_of_plans_for_activations(word: str, meaning: tuple) -> None:
    assert parse_want(word, "here") == meaning


@pytest.mark.parametrize("word", ["fulltoken", "shard(0)", "shard", "Shard(1)", "", "local-token "])
def test_unknown_words_for_activations(word: str) -> None:
    # shard(0) of an activation is called local-token: two words for one layout would hide a mistake
    with pytest.raises(UsageError, match="here: layout") as error:
        parse_want(word, "here")
    assert repr(word) in str(error.value)
    assert "local-token" in str(error.value)  # what is allowed


@pytest.mark.parametrize(
    ("word", "meaning"),
    [
        ("replicated", {}),
        ("shard(0)", {"tp": Shard(0)}),
        ("tp:shard(1)", {"tp": Shard(1)}),
        ("ep:shard(0)", {"ep": Shard(0)}),
    ],
)
def test_words_of_plans_for_weights(word: str, meaning: dict[str, Placement]) -> None:
    assert parse_weight(word, "here") == meaning


@pytest.mark.parametrize("word", ["sharded", "shard(-1)", "xp:shard(0)", "local-token", ""])
def test_unknown_words_for_weights(word: str) -> None:
    with pytest.raises(UsageError, match="here: weight placement") as error:
        parse_weight(word, "here")
    assert repr(word) in str(error.value)


@pytest.mark.parametrize(
    ("tokens", "ids"),
    [
        (Tokens(5, 4), [[0, 1], [2, 3], [4, -1], [-1, -1]]),
        (Tokens(3, 2, rows=8), [[0, 1, 2, -1], [-1, -1, -1, -1]]),  # padded to another dp rank's 8 rows
        (Tokens(0, 2, rows=1), [[-1], [-1]]),
    ],
)
def test_ids_of_a_rank(tokens: Tokens, ids: list[list[int]]) -> None:
    assert [tokens.ids(i).tolist() for i in range(tokens.parts)] == ids
