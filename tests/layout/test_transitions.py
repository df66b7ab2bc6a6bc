"""The transition table of DESIGN section 2, as written and by simulating its steps on ranks."""

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor.placement_types import Partial, Placement, Replicate, Shard

from emulator.layout.placement import Tokens
from emulator.layout.transitions import Step, transition_steps
from emulator.ops.registry import Mixed

ops = torch.ops.emulator
R, LOCAL, PARTIAL, HEADS = Replicate(), Shard(0), Partial("sum"), Shard(1)
PAD, UNPAD = Step("pad", (0, 12)), Step("unpad", (0, 9))

# 9 tokens on 4 ranks are padded to 12; 8 tokens need no padding
TABLE: list[tuple[str, Placement, Placement, list[Step], list[Step]]] = [
    ("Partial -> Replicate", PARTIAL, R, [Step("all_reduce", ("tp", 4))], [Step("all_reduce", ("tp", 4))]),
    (
        "Partial -> Shard(0)", PARTIAL, LOCAL,
        [PAD, Step("reduce_scatter", ("tp", 4, 0))], [Step("reduce_scatter", ("tp", 4, 0))],
    ),
    (
        "Shard(0) -> Replicate", LOCAL, R,
        [Step("all_gather", ("tp", 4, 0)), UNPAD], [Step("all_gather", ("tp", 4, 0))],
    ),
    ("Replicate -> Shard(0)", R, LOCAL, [PAD, Step("slice", ("tp", 4, 0))], [Step("slice", ("tp", 4, 0))]),
    ("Shard(1) -> Replicate", HEADS, R, [Step("all_gather", ("tp", 4, 1))], [Step("all_gather", ("tp", 4, 1))]),
    ("Shard(2) -> Replicate", Shard(2), R, [Step("all_gather", ("tp", 4, 2))], [Step("all_gather", ("tp", 4, 2))]),
    ("Replicate -> Shard(1)", R, HEADS, [Step("slice", ("tp", 4, 1))], [Step("slice", ("tp", 4, 1))]),
    (
        "Shard(0) -> Shard(1)", LOCAL, HEADS,
        [Step("all_to_all", ("tp", 4, 1, 0)), UNPAD], [Step("all_to_all", ("tp", 4, 1, 0))],
    ),
    (
        "Shard(1) -> Shard(0)", HEADS, LOCAL,
        [PAD, Step("all_to_all", ("tp", 4, 0, 1))], [Step("all_to_all", ("tp", 4, 0, 1))],
    ),
]  # fmt: skip
ROWS = [pytest.param(*row, id=name) for name, *row in TABLE]


@pytest.mark.parametrize(("source", "target", "ragged", "even"), ROWS)
def test_steps(source: Placement, target: Placement, ragged: list[Step], even: list[Step]) -> None:
    assert transition_steps(source, target, "tp", 4, Tokens(9, 4)) == ragged
    assert transition_steps(source, target, "tp", 4, Tokens(8, 4)) == even


@pytest.mark.parametrize(
    ("source", "target"),
    [(LOCAL, PARTIAL), (R, PARTIAL), (HEADS, PARTIAL), (HEADS, Shard(2)), (PARTIAL, HEADS), (Mixed(HEADS), R)],
    ids=str,
)
def test_there_is_no_other_way(source: Placement, target: Placement) -> None:
    assert transition_steps(source, target, "tp", 4, Tokens(8, 4)) is None


def test_mixed_sums_go_on_only_as_the_reported_all_reduce() -> None:
    assert transition_steps(Mixed(PARTIAL), LOCAL, "tp", 4, Tokens(8, 4)) == [Step("all_reduce", ("tp", 4))]
    assert transition_steps(Mixed(PARTIAL), R, "tp", 4, Tokens(8, 4)) is None


def cut(value: Tensor, placement: Placement, size: int, padded: int) -> list[Tensor]:
    """What the ranks hold of a [T, N, d] value; local-token values carry NaN rows as padding."""
    if placement == R:
        return [value] * size
    if placement == PARTIAL:
        summands = [
            torch.randn(value.shape, dtype=value.dtype, generator=torch.Generator().manual_seed(r))
            for r in range(size - 1)
        ]
        return [*summands, value - sum(summands)]
    assert isinstance(placement, Shard)
    if placement == LOCAL:
        rows = value.new_full((padded - len(value), *value.shape[1:]), float("nan"))
        value = torch.cat((value, rows))
    return list(value.chunk(size, placement.dim))


def perform(step: Step, held: list[Tensor]) -> list[Tensor]:
    """A step on all ranks at once, from its definition."""
    size = len(held)
    if step.op in ("pad", "unpad"):
        return [getattr(ops, step.op)(x, *step.args) for x in held]
    assert step.args[:2] == ("tp", size)
    dims = step.args[2:]
    if step.op == "all_reduce":
        return [torch.stack(held).sum(0)] * size
    if step.op == "reduce_scatter":
        return list(torch.stack(held).sum(0).chunk(size, *dims))
    if step.op == "all_gather":
        return [torch.cat(held, *dims)] * size
    if step.op == "slice":
        return [x.chunk(size, *dims)[r] for r, x in enumerate(held)]
    assert step.op == "all_to_all"
    split_dim, concat_dim = dims
    pieces = [x.chunk(size, split_dim) for x in held]
    return [torch.cat([pieces[s][r] for s in range(size)], concat_dim) for r in range(size)]


@pytest.mark.parametrize("tokens", [12, 9, 3, 1])
@pytest.mark.parametrize(("source", "target", "ragged", "even"), ROWS)
def test_steps_lead_to_the_target(
    source: Placement, target: Placement, ragged: list[Step], even: list[Step], tokens: int
) -> None:
    size, padded = 4, -(-tokens // 4) * 4
    value = torch.randn(tokens, 8, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(9))
    held = cut(value, source, size, padded)
    steps = transition_steps(source, target, "tp", size, Tokens(tokens, size))
    assert steps is not None
    for step in steps:
        held = perform(step, held)
    for rank, (got, want) in enumerate(zip(held, cut(value, target, size, padded))):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-13, equal_nan=True, msg=f"rank {rank}")
