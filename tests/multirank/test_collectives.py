"""Every transition op on real gloo ranks, against the arithmetic of what each rank holds."""

import pytest
import torch

from emulator.errors import RankError
from emulator.runtime.collectives import Collectives, bytes_sent
from emulator.runtime.mesh import Mesh
from emulator.runtime.rank_process import RankContext
from emulator.runtime.world import World

SIZE = 3
NAMES = {"node": "n", "module": "m", "layout": "x"}


def _ranks(fn, size: int = SIZE, ep: int = SIZE, timeout: float = 20.0):
    def body(context: RankContext):
        transport = Collectives(context.mesh, context.rank, context.board, context.transport, timeout)
        return fn(context.rank, lambda op, x, *args, **kw: transport.call(op, x, *args, **NAMES, **kw))

    return World(Mesh(tp=size, ep=ep), timeout=timeout).run(body)


def _value(rank: int, *shape: int) -> torch.Tensor:
    """Different on every rank and at every position."""
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float64).reshape(shape) + 1000 * rank


@pytest.mark.parametrize("dim", [0, 1])
def test_reductions_gathers_and_slices(dim):
    def body(rank, call):
        x = _value(rank, 6, 9)
        return {
            "all_reduce": call("all_reduce", x, "tp", SIZE),
            "reduce_scatter": call("reduce_scatter", x, "tp", SIZE, dim),
            "all_gather": call("all_gather", x, "tp", SIZE, dim),
            "slice": call("slice", x, "tp", SIZE, dim),
        }

    results = _ranks(body)
    parts = [_value(r, 6, 9) for r in range(SIZE)]
    total, joined = sum(parts), torch.cat(parts, dim)
    for rank, found in enumerate(results):
        assert torch.equal(found["all_reduce"], total)
        assert torch.equal(found["reduce_scatter"], total.chunk(SIZE, dim)[rank])
        assert torch.equal(found["all_gather"], joined)
        assert torch.equal(found["slice"], parts[rank].chunk(SIZE, dim)[rank])


def test_all_to_all_moves_tokens_to_heads_and_back():
    whole = _value(0, 6, 9, 2)  # tokens, heads, width

    def body(rank, call):
        local_tokens = whole.chunk(SIZE, 0)[rank]
        heads = call("all_to_all", local_tokens, "tp", SIZE, 1, 0)
        return heads, call("all_to_all", heads, "tp", SIZE, 0, 1)

    for rank, (heads, back) in enumerate(_ranks(body)):
        assert torch.equal(heads, whole.chunk(SIZE, 1)[rank])
        assert torch.equal(back, whole.chunk(SIZE, 0)[rank])


def test_uneven_all_to_all_with_an_empty_rank():
    # rows from rank s to rank d; rank 2 sends nothing, rank 1 receives nothing from itself
    table = [[1, 2, 3], [4, 0, 1], [0, 0, 0]]

    def body(rank, call):
        rows = torch.tensor([[100.0 * rank + 10 * d + i] for d in range(SIZE) for i in range(table[rank][d])])
        rows = rows.reshape(-1, 1)
        return call("all_to_all_rows", rows, table[rank], [table[s][rank] for s in range(SIZE)], "ep", SIZE)

    for rank, found in enumerate(_ranks(body)):
        expected = [[100.0 * s + 10 * rank + i] for s in range(SIZE) for i in range(table[s][rank])]
        assert found.tolist() == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_dtypes_travel(dtype):
    def body(rank, call):
        x = torch.full((3, 2), rank + 1, dtype=dtype)
        return call("all_gather", x, "tp", SIZE, 0), call("all_reduce", x, "tp", SIZE)

    for gathered, reduced in _ranks(body):
        assert gathered.dtype == reduced.dtype == dtype
        assert gathered[:, 0].tolist() == [1, 1, 1, 2, 2, 2, 3, 3, 3]
        assert reduced[0, 0].item() == 6


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
)
def test_mismatches_are_named_before_gloo_is_entered(what, wrong):
    def body(rank, call):
        x = _value(rank, 4, 3)
        return wrong(call, x) if rank == 1 else call("all_reduce", x, "tp", SIZE)

    with pytest.raises(RankError, match=f"CallMismatch: ranks of tp disagree on {what}: .*rank 1"):
        _ranks(body)


def test_split_lists_that_disagree_are_named():
    def body(rank, call):
        receive = [1, 1, 2] if rank == 0 else [1, 1, 1]
        return call("all_to_all_rows", torch.zeros(3, 2), [1, 1, 1], receive, "ep", SIZE)

    with pytest.raises(RankError, match="rank 2 sends 1 to rank 0, which expects 2"):
        _ranks(body)


def test_reducing_different_tokens_is_noticed():
    def body(context: RankContext):
        found = []
        collectives = Collectives(context.mesh, context.rank, context.board, context.transport, 20.0)
        collectives.on_mixed = found.append
        x = torch.ones(2, 2)
        collectives.call("all_reduce", x, "tp", SIZE, **NAMES, ids=torch.tensor([4, 5]))
        collectives.call("all_reduce", x, "tp", SIZE, **NAMES, ids=torch.tensor([0, 1]) + 2 * context.rank)
        return found

    assert World(Mesh(tp=SIZE, ep=SIZE)).run(body) == [["all_reduce on tp sums rows of different tokens"]] * SIZE


def test_ep_groups_are_blocks_of_the_world():
    def body(rank, call):
        return call("all_gather", torch.tensor([float(rank)]), "ep", 2, 0).tolist()

    assert _ranks(body, size=4, ep=2) == [[0.0, 1.0], [0.0, 1.0], [2.0, 3.0], [2.0, 3.0]]


def test_bytes_sent():
    x = torch.zeros(8, 4, dtype=torch.float32)  # 128 bytes
    assert bytes_sent("all_gather", x, 4) == 384
    assert bytes_sent("reduce_scatter", x, 4) == 96
    assert bytes_sent("all_to_all", x, 4) == 96
    assert bytes_sent("all_reduce", x, 4) == 192
    assert bytes_sent("all_to_all_rows", x, 4, kept_rows=3) == 80
    assert bytes_sent("slice", x, 4) == 0
