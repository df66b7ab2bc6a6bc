"""Every transition op on real gloo ranks, against the arithmetic of what each rank holds."""

import pytest
import torch

from emulator.errors import RankError
from emulator.runtime.board import CallMismatch, PeerFailed
from emulator.runtime.collectives import Collectives, bytes_sent
from emulator.runtime.mesh import Mesh
from emulator.runtime.world import World

SIZE = 3
NAMES = {"node": "n", "module": "m", "layout": "x"}

ranks = pytest.mark.ranks(SIZE, mesh={"tp": SIZE, "ep": SIZE}, timeout=20)


@pytest.fixture
def collectives(rank_context):
    return Collectives(rank_context.mesh, rank_context.rank, rank_context.board, rank_context.transport, 10.0)


@pytest.fixture
def call(collectives):
    return lambda op, x, *args, **kw: collectives.call(op, x, *args, **NAMES, **kw)


def _value(rank: int, *shape: int) -> torch.Tensor:
    """Different on every rank and at every position."""
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float64).reshape(shape) + 1000 * rank


@ranks
@pytest.mark.parametrize("dim", [0, 1])
def test_reductions_gathers_and_slices(dim, rank, call):
    parts = [_value(r, 6, 9) for r in range(SIZE)]
    total, x = sum(parts), parts[rank]
    assert torch.equal(call("all_reduce", x, "tp", SIZE), total)
    assert torch.equal(call("reduce_scatter", x, "tp", SIZE, dim), total.chunk(SIZE, dim)[rank])
    assert torch.equal(call("all_gather", x, "tp", SIZE, dim), torch.cat(parts, dim))
    assert torch.equal(call("slice", x, "tp", SIZE, dim), x.chunk(SIZE, dim)[rank])


@ranks
def test_all_to_all_moves_tokens_to_heads_and_back(rank, call):
    whole = _value(0, 6, 9, 2)  # tokens, heads, width
    heads = call("all_to_all", whole.chunk(SIZE, 0)[rank], "tp", SIZE, 1, 0)
    assert torch.equal(heads, whole.chunk(SIZE, 1)[rank])
    assert torch.equal(call("all_to_all", heads, "tp", SIZE, 0, 1), whole.chunk(SIZE, 0)[rank])


@ranks
def test_uneven_all_to_all_with_an_empty_rank(rank, call):
    # rows from rank s to rank d; rank 2 sends nothing, rank 1 receives nothing from itself
    table = [[1, 2, 3], [4, 0, 1], [0, 0, 0]]
    rows = torch.tensor([[100.0 * rank + 10 * d + i] for d in range(SIZE) for i in range(table[rank][d])])
    receive = [table[s][rank] for s in range(SIZE)]
    found = call("all_to_all_rows", rows.reshape(-1, 1), table[rank], receive, "ep", SIZE)
    assert found.tolist() == [[100.0 * s + 10 * rank + i] for s in range(SIZE) for i in range(table[s][rank])]


@ranks
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64], ids=str)
def test_dtypes_travel(dtype, rank, call):
    x = torch.full((3, 2), rank + 1, dtype=dtype)
    gathered, reduced = call("all_gather", x, "tp", SIZE, 0), call("all_reduce", x, "tp", SIZE)
    assert gathered.dtype == reduced.dtype == dtype
    assert gathered[:, 0].tolist() == [1, 1, 1, 2, 2, 2, 3, 3, 3]
    assert reduced[0, 0].item() == 6


@ranks
@pytest.mark.parametrize(
    ("what", "wrong"),
    [
        # equal sizes with other shapes would be summed by position, silently
        ("shape", lambda call, x: call("all_reduce", x.reshape(2, 6), "tp", SIZE)),
        # another size is SIGABRT on one rank and silence on another
        ("shape", lambda call, x: call("all_reduce", x[:1], "tp", SIZE)),
        ("dtype", lambda call, x: call("all_reduce", x.float(), "tp", SIZE)),
        ("op", lambda call, x: call("all_gather", x, "tp", SIZE, 0)),
    ],
    ids=["positions", "size", "dtype", "op"],
)
def test_mismatches_are_named_on_every_rank_before_gloo_is_entered(what, wrong, rank, call):
    x = _value(rank, 4, 3)
    with pytest.raises(CallMismatch, match=f"ranks of tp disagree on {what}: .*rank 1") as caught:
        wrong(call, x) if rank == 1 else call("all_reduce", x, "tp", SIZE)
    assert caught.value.culprits == [1]


@ranks
def test_split_lists_that_disagree_are_named_on_every_rank(rank, call):
    receive = [1, 1, 2] if rank == 0 else [1, 1, 1]
    with pytest.raises(CallMismatch, match="rank 2 sends 1 to rank 0, which expects 2"):
        call("all_to_all_rows", torch.zeros(3, 2), [1, 1, 1], receive, "ep", SIZE)


@ranks
def test_reducing_different_tokens_is_noticed(rank, collectives):
    found: list[str] = []
    collectives.on_mixed = found.append
    x = torch.ones(2, 2)
    collectives.call("all_reduce", x, "tp", SIZE, **NAMES, ids=torch.tensor([4, 5]))
    assert not found
    collectives.call("all_reduce", x, "tp", SIZE, **NAMES, ids=torch.tensor([0, 1]) + 2 * rank)
    assert found == ["all_reduce on tp sums rows of different tokens"]


@pytest.mark.ranks(4, mesh={"tp": 4, "ep": 2})
def test_ep_groups_are_blocks_of_the_world(rank, call):
    mine = [0.0, 1.0] if rank < 2 else [2.0, 3.0]
    assert call("all_gather", torch.tensor([float(rank)]), "ep", 2, 0).tolist() == mine


def test_a_mismatch_ends_a_world_with_the_culprit():
    def body(context, rank):
        collectives = Collectives(context.mesh, rank, context.board, context.transport, 10.0)
        return collectives.call("all_reduce", torch.ones(2 + (rank == 1)), "tp", SIZE, **NAMES)

    with pytest.raises(RankError, match="CallMismatch: ranks of tp disagree on shape") as caught:
        World(Mesh(tp=SIZE)).run(body)
    assert caught.value.report["culprits"] == [1]
    assert PeerFailed.__name__ not in str(caught.value)


def test_bytes_sent():
    x = torch.zeros(8, 4, dtype=torch.float32)  # 128 bytes
    assert bytes_sent("all_gather", x, 4) == 384
    assert bytes_sent("reduce_scatter", x, 4) == 96
    assert bytes_sent("all_to_all", x, 4) == 96
    assert bytes_sent("all_reduce", x, 4) == 192
    assert bytes_sent("all_to_all_rows", x, 4, kept_rows=3) == 80
    assert bytes_sent("slice", x, 4) == 0
