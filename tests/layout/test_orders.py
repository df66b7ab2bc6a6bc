"""Token orders: which rows a rank holds, and what its rows see, in zigzag and round-robin order."""

import pytest
import torch

from emulator.layout.placement import Tokens
from emulator.ops.transition import rank_order, window_lengths


def test_zigzag_gives_a_rank_the_block_from_either_end():
    """13 tokens, 4 ranks: 8 blocks of 2 rows; rank r has blocks r and 7 - r."""
    tokens = Tokens(13, 4, order="zigzag")
    assert (tokens.per, tokens.padded) == (4, 16)
    expected = [[0, 1, -1, -1], [2, 3, 12, -1], [4, 5, 10, 11], [6, 7, 8, 9]]
    assert [tokens.ids(r).tolist() for r in range(4)] == expected


def test_round_robin_deals_tokens_out_in_turn():
    tokens = Tokens(13, 4, order="round_robin")
    assert (tokens.per, tokens.padded) == (4, 16)
    expected = [[0, 4, 8, 12], [1, 5, 9, -1], [2, 6, 10, -1], [3, 7, 11, -1]]
    assert [tokens.ids(r).tolist() for r in range(4)] == expected


def test_fewer_tokens_than_blocks():
    assert [Tokens(3, 4, order="zigzag").ids(r).tolist() for r in range(4)] == [[0, -1], [1, -1], [2, -1], [-1, -1]]


@pytest.mark.parametrize("order", ["contiguous", "zigzag", "round_robin"])
@pytest.mark.parametrize("count", [1, 3, 13, 16])
def test_pad_and_unpad_are_inverse_and_give_each_rank_its_rows(order, count):
    tokens = Tokens(count, 4, order=order)
    x = torch.arange(count, dtype=torch.float64).unsqueeze(1)
    padded = torch.ops.emulator.pad(x, 0, tokens.padded, *tokens.arrangement)
    for rank, rows in enumerate(padded.chunk(4)):
        ids = tokens.ids(rank)
        assert torch.equal(rows[ids >= 0, 0].long(), ids[ids >= 0])
        assert rows[ids < 0].isnan().all()
    assert torch.equal(torch.ops.emulator.unpad(padded, 0, count, *tokens.arrangement), x)


@pytest.mark.parametrize("order", ["zigzag", "round_robin"])
def test_every_row_sees_its_own_keys(order):
    """q 5, 3, 1 with context 0, 10, 100 over 2 ranks: row g of a request sees context + g + 1 keys."""
    queries, contexts = [5, 3, 1], [0, 10, 100]
    seen = [context + g + 1 for q, context in zip(queries, contexts) for g in range(q)]
    tokens = Tokens(9, 2, order=order)
    lens = torch.tensor(queries), torch.tensor([q + c for q, c in zip(queries, contexts)])
    for rank in range(2):
        rows, keys = window_lengths(*lens, tokens.windows(rank))
        ids = tokens.ids(rank)
        found = [int(k) - (int(n) - 1 - j) for n, k in zip(rows, keys) for j in range(int(n))]
        assert found == [seen[i] for i in ids[ids >= 0]]


def test_zigzag_evens_out_causal_work():
    """64 tokens of one request over 4 ranks: a contiguous last rank sees 7 times the keys of the first."""

    def keys(order: str) -> list[int]:
        tokens = Tokens(64, 4, order=order)
        return [int((tokens.ids(r) + 1).sum()) for r in range(4)]

    assert keys("contiguous") == [136, 392, 648, 904]
    assert keys("zigzag") == [520, 520, 520, 520]
    assert keys("round_robin") == [496, 512, 528, 544]


def test_rank_order_of_four_ranks():
    assert rank_order("zigzag", 2, 8).tolist() == [0, 1, 6, 7, 2, 3, 4, 5]
    assert rank_order("round_robin", 2, 6).tolist() == [0, 2, 4, 1, 3, 5]
