"""Fake (shape) kernels tell the same shapes and dtypes as the real ones, and refuse what the real ones refuse."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map_only

import emulator.ops  # noqa: F401  (registers the vocabulary)
from emulator.ops.registry import OPS
from emulator.ops.transition import TRANSITIONS

ops = torch.ops.emulator
DTYPES = [torch.float64, torch.float32, torch.bfloat16]
Call = tuple[tuple[Any, ...], dict[str, Any]]


def floats(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64).to(dtype)


def batch() -> tuple[Tensor, Tensor, Tensor]:
    """Two ragged requests, of 4 (context 1) and 3 tokens, in blocks of 2 slots: query_lens, kv_lens, block_table."""
    return torch.tensor([4, 3]), torch.tensor([5, 3]), torch.tensor([[3, 0, 2], [1, 4, -1]])


def calls(dtype: torch.dtype) -> dict[str, list[Call]]:
    """Arguments for every op: T = 7 tokens, sizes pairwise distinct, so that a swapped dim shows."""

    def f(*shape: int) -> Tensor:
        return floats(*shape, dtype=dtype)

    ids, positions = torch.tensor([0, 3, 10, 9, 4, 4, 1]), torch.tensor([1, 2, 3, 4, 0, 1, 2])
    inv_freq = torch.tensor([1.0, 0.3])  # float32 in every run
    experts = torch.tensor([[0, 4], [2, 1], [3, 4], [0, 1], [2, 3], [4, 0], [1, 0]])
    counts, order = torch.bincount(experts.flatten(), minlength=5).unsqueeze(0), experts.flatten().argsort(stable=True)
    topk = torch.full((7, 3), -1, dtype=torch.int32)
    topk[:, 0] = 0
    return {
        "linear": [((f(7, 11), f(13, 11)), {}), ((f(7, 11), f(13, 11), f(13)), {}), ((f(1, 11), f(13, 11)), {})],
        "lm_head": [((f(7, 11), f(13, 11)), {})],
        "embedding": [((ids, f(11, 5)), {}), ((ids, f(6, 5)), {"vocab_start": 6})],
        "rms_norm": [((f(7, 11), f(11), 1e-6), {})],
        "add_rms_norm": [((f(7, 11), f(7, 11), f(11), 1e-6), {})],
        "add_rms_norm2": [((f(7, 11), f(7, 11), f(11), 1e-6), {})],
        "rope": [
            ((f(7, 9), positions, inv_freq, 2, True, 1.0), {}),
            ((f(7, 3, 9), positions, inv_freq, 5, False, 1.0), {}),
        ],
        "add": [((f(7, 11), f(7, 11)), {})],
        "swiglu": [((f(7, 10),), {}), ((f(7, 11), f(7, 11)), {})],
        "cache_write": [((f(12, 5), f(7, 9), torch.tensor([0, 3, -1, 5, 6, 7, 2]), 4), {})],
        "moe_gate": [
            ((f(7, 11), f(5, 11)), {}),
            ((f(7, 11), f(5, 11).to(torch.promote_types(dtype, torch.float32))), {}),
        ],
        "moe_topk": [((f(7, 6).float(), f(6), torch.ones(7, dtype=torch.bool), 2, 3, 2, True, 2.5), {})],
        "moe_dispatch": [((f(7, 11), experts, 5), {})],
        "grouped_matmul": [
            ((f(14, 11), f(5, 13, 11), counts), {}),
            ((f(14, 11), f(5, 13, 11), torch.tensor([[1, 2, 0, 3, 1]] * 2)), {}),
        ],
        "moe_combine": [((f(14, 11), order, f(7, 2).float()), {})],
        "mla_absorb": [((f(3 * 9, 7), 4, 5), {})],
        "mla_sparse_attention": [((f(7, 3, 6), f(10, 8), f(3, 4, 6), f(3, 6, 5), topk, *batch(), 2, 0.4), {})],
        "multihead_latent_attention": [((f(7, 3, 6), f(10, 8), f(3, 4, 6), f(3, 6, 5), *batch(), 2, 0.4), {})],
        "dsa_indexer_key": [((f(7, 11), f(9, 11), f(9), f(9), positions, inv_freq, 1e-6, True, 1.0), {})],
        "dsa_indexer_topk": [
            ((f(7, 11), f(7, 13), f(4 * 9, 11), f(4, 13), f(10, 9), positions, inv_freq, *batch(), 2, 3, True, 1.0), {})
        ],
        "pad": [
            ((f(7, 5), 0, 8), {}),
            ((ids, 0, 12), {}),
            ((torch.ones(7, dtype=torch.bool), 0, 8), {}),
            ((f(3, 7, 5), 1, 9), {}),
        ],
        "unpad": [((f(8, 5), 0, 7), {}), ((f(3, 8), 1, 2), {})],
    }


def faked(mode: FakeTensorMode, value: Any) -> Any:
    return tree_map_only(Tensor, mode.from_tensor, value)


def described(value: Any) -> list[tuple[tuple[int, ...], torch.dtype]]:
    outputs = value if isinstance(value, (tuple, list)) else (value,)
    return [(tuple(v.shape), v.dtype) for v in outputs]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", list(calls(torch.float64)))
def test_fake_kernel_tells_what_the_real_one_makes(name: str, dtype: torch.dtype) -> None:
    for args, kwargs in calls(dtype)[name]:
        with FakeTensorMode() as mode:
            fake = described(getattr(ops, name)(*faked(mode, args), **kwargs))
        assert fake == described(getattr(ops, name)(*args, **kwargs))


def test_every_op_is_compared() -> None:
    # the other transitions have no real kernel outside a World: their shapes are worked out by hand below
    assert set(calls(torch.float64)) == set(OPS) | {"pad", "unpad"}


MOVES = [
    ("broadcast", (0, 5), ("tp", 4, 1, 12), (12, 5)),  # the owner alone holds its rows
    ("all_reduce", (12, 5), ("tp", 4), (12, 5)),
    ("reduce_scatter", (12, 5), ("tp", 4, 0), (3, 5)),
    ("all_gather", (3, 5), ("tp", 4, 0), (12, 5)),
    ("all_gather", (9, 5), ("tp", 4, 1), (9, 20)),
    ("slice", (12, 6, 5), ("tp", 4, 0), (3, 6, 5)),
    ("slice", (9, 6, 5), ("tp", 2, 1), (9, 3, 5)),
    ("all_to_all", (12, 2, 5), ("tp", 4, 0, 1), (3, 8, 5)),  # head shard -> local-token
    ("all_to_all", (3, 8, 5), ("tp", 4, 1, 0), (12, 2, 5)),  # local-token -> head shard
]


@pytest.mark.parametrize(("name", "shape", "args", "expected"), MOVES, ids=[f"{m[0]}-{m[1]}" for m in MOVES])
def test_shapes_of_transitions(name: str, shape: tuple[int, ...], args: tuple, expected: tuple[int, ...]) -> None:
    with FakeTensorMode():
        moved = getattr(ops, name)(torch.empty(shape, dtype=torch.bfloat16), *args)
        assert (tuple(moved.shape), moved.dtype) == (expected, torch.bfloat16)


LENGTHS = ("local_query_lens", "local_kv_lens", "local_block_table")  # as before, for each window
SAME = ("wait", "regroup")


def test_every_transition_has_a_shape_test() -> None:
    # all_to_all_rows and slice_rows depend on counts: the runtime knows their sizes, the fakes cannot
    assert {m[0] for m in MOVES} | {"pad", "unpad", "all_to_all_rows", "slice_rows", *LENGTHS, *SAME} == set(
        TRANSITIONS
    )


@pytest.mark.parametrize("name", ["reduce_scatter", "slice"])
def test_a_cut_that_does_not_divide_is_caught(name: str) -> None:
    # 9 tokens over 4 ranks: 12 after padding, never 9
    with FakeTensorMode(), pytest.raises(AssertionError, match=r"9.*does not divide by 4"):
        getattr(ops, name)(torch.empty(9, 5), "tp", 4, 0)


@pytest.mark.parametrize(("order", "rows"), [("contiguous", 2), ("zigzag", 4), ("round_robin", 8)])
def test_lengths_have_an_entry_per_window_and_request(order: str, rows: int) -> None:
    # 2 requests on 4 rows of a rank: 1, 2 or 4 runs of consecutive tokens
    lens = torch.ones(2, dtype=torch.int64)
    with FakeTensorMode():
        fake = torch.empty(2, dtype=torch.int64)
        assert ops.local_query_lens(fake, "tp", 4, 4, order).shape == (rows,)
        assert ops.local_kv_lens(fake, fake, "tp", 4, 4, order).shape == (rows,)
    assert ops.local_block_table(lens.unsqueeze(1).expand(2, 3), order, 4).shape == (rows, 3)


@pytest.mark.parametrize("name", sorted(set(TRANSITIONS) - {"pad", "unpad", "local_block_table", *SAME}))
def test_transitions_refuse_to_run_outside_a_world(name: str) -> None:
    counts = torch.ones(1, 4, dtype=torch.int64)
    args: dict[str, tuple] = {
        "all_reduce": ("tp", 4),
        "all_to_all": ("tp", 4, 0, 1),
        "all_to_all_rows": (counts, counts, "ep", 4),
        "slice_rows": (counts, "ep", 4),
        "local_query_lens": ("tp", 4, 3, "contiguous"),
        "broadcast": ("tp", 4, 0, 4),
        "local_kv_lens": (counts, "tp", 4, 3, "contiguous"),
    }
    with pytest.raises(RuntimeError, match="World"):
        getattr(ops, name)(torch.ones(4, 4), *args.get(name, ("tp", 4, 0)))


# Full rows against local rows (4096 and 256 in the RFC): what a shape-only run has to notice as a real one does.
MISMATCHES: list[tuple[str, str, Callable[[], Any]]] = [
    ("residual of the norm", "add_rms_norm2", lambda: (torch.empty(16, 5), torch.empty(4, 5), torch.empty(5), 1e-6)),
    (
        "residual of the final norm",
        "add_rms_norm",
        lambda: (torch.empty(4, 5), torch.empty(16, 5), torch.empty(5), 1e-6),
    ),
    (
        "single local residual row",
        "add_rms_norm2",
        lambda: (torch.empty(4, 5), torch.empty(1, 5), torch.empty(5), 1e-6),
    ),
    ("features of a linear", "linear", lambda: (torch.empty(4, 5), torch.empty(7, 6))),
    ("features of lm_head", "lm_head", lambda: (torch.empty(4, 5), torch.empty(7, 6))),
    ("rows of add", "add", lambda: (torch.empty(16, 5), torch.empty(4, 5))),
    ("single row of add", "add", lambda: (torch.empty(4, 5), torch.empty(1, 5))),
    ("rows of swiglu", "swiglu", lambda: (torch.empty(16, 5), torch.empty(4, 5))),
    (
        "features of grouped_matmul",
        "grouped_matmul",
        lambda: (torch.empty(4, 5), torch.empty(2, 7, 6), torch.ones(1, 2, dtype=torch.int64)),
    ),
    ("rows of dispatch", "moe_dispatch", lambda: (torch.empty(16, 5), torch.zeros(4, 2, dtype=torch.int64), 3)),
    (
        "rows of rope",
        "rope",
        lambda: (torch.empty(16, 4), torch.zeros(4, dtype=torch.int64), torch.empty(2), 0, True, 1.0),
    ),
    (
        "heads of attention",
        "mla_sparse_attention",
        lambda: (
            torch.empty(7, 6, 6),
            torch.empty(10, 8),
            torch.empty(3, 4, 6),
            torch.empty(3, 6, 5),
            torch.zeros(7, 2, dtype=torch.int32),
            *batch(),
            2,
            0.4,
        ),
    ),
    (
        "heads of dense attention",
        "multihead_latent_attention",
        lambda: (
            torch.empty(7, 6, 6),
            torch.empty(10, 8),
            torch.empty(3, 4, 6),
            torch.empty(3, 6, 5),
            *batch(),
            2,
            0.4,
        ),
    ),
    (
        "rows of top-k ids",
        "mla_sparse_attention",
        lambda: (
            torch.empty(7, 3, 6),
            torch.empty(10, 8),
            torch.empty(3, 4, 6),
            torch.empty(3, 6, 5),
            torch.zeros(2, 2, dtype=torch.int32),
            *batch(),
            2,
            0.4,
        ),
    ),
]


@pytest.mark.parametrize(("name", "args"), [m[1:] for m in MISMATCHES], ids=[m[0] for m in MISMATCHES])
def test_a_shape_run_catches_what_does_not_fit(name: str, args: Callable[[], Any]) -> None:
    with FakeTensorMode(), pytest.raises((AssertionError, RuntimeError)):
        getattr(ops, name)(*args())
