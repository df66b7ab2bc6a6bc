"""Diagnosis of hand-made scenes: what each mistake is called, with which numbers, and what proves nothing.

Every scene is made with plain torch from the layout vocabulary (DESIGN section 2): rank r owns the token rows
[r * per, (r + 1) * per), per = ceil(T / tp); padding is NaN.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.distributed.tensor.placement_types import Partial, Placement, Replicate, Shard

import emulator.ops  # noqa: F401  (registers the vocabulary)
from emulator.layout.placement import Layout, Tokens
from emulator.ops.registry import Mixed
from emulator.runtime.mesh import Mesh
from emulator.verify.diagnosis import KINDS, diagnose
from emulator.verify.scene import Diagnosis, Scene

ops = torch.ops.emulator
F64, NAN = torch.float64, float("nan")
R, LOCAL, PARTIAL = Replicate(), Shard(0), Partial("sum")
WIDTH, OUT = 24, 16
SIZES = [(tp, tokens) for tp in (2, 4) for tokens in (16, 13, 3)]
W = "model.layers.0.mlp.gate_proj.weight"


def token(placement: Placement = R) -> Layout:
    return Layout("token").placed(tp=placement)


def parameter(placement: Placement = R) -> Layout:
    return Layout("weight").placed(tp=placement)


@dataclass(frozen=True)
class Arg:
    """A tensor argument: name (of a parameter, if its layout says weight), values by rank, layout, and the ops that it
    came through: (target, arguments behind the tensor)."""

    name: str
    values: Sequence[Tensor]
    layout: Layout = field(default_factory=token)
    through: Sequence[tuple[Any, tuple]] = ()


class Bench:
    """T tokens on tp ranks, random values, and scenes made of them."""

    def __init__(self, tp: int, real: int, ep: int | None = None):
        self.mesh, self.tokens = Mesh(tp=tp, ep=ep or tp), Tokens(real, tp)
        self.tp, self.real, self.per, self.padding = tp, real, -(-real // tp), -real % tp
        self.ranks = range(tp)
        self.windows = [(min(r * self.per, real), min((r + 1) * self.per, real)) for r in self.ranks]
        self.generator = torch.Generator().manual_seed(100 * tp + real)
        self.x = self.random(real, WIDTH)

    def random(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator, dtype=F64)

    def padded(self, x: Tensor) -> Tensor:
        """Rows up to tp * per; the new ones hold NaN (-1 for whole numbers)."""
        fill = NAN if x.is_floating_point() else -1
        return torch.cat((x, torch.full((self.padding, *x.shape[1:]), fill, dtype=x.dtype)))

    def local(self, x: Tensor) -> list[Tensor]:
        """Every rank's rows, with padding."""
        return [part.clone() for part in self.padded(x).split(self.per)]

    def full(self, x: Tensor) -> list[Tensor]:
        return [x.clone() for _ in self.ranks]

    def shards(self, x: Tensor, dim: int) -> list[Tensor]:
        return [part.clone() for part in x.chunk(self.tp, dim)]

    def shares(self, x: Tensor) -> list[Tensor]:
        """Random addends of x, one a rank."""
        first = [self.random(*x.shape) for _ in range(self.tp - 1)]
        return [*first, x - torch.stack(first).sum(0)]

    def expected(self, reference: Tensor, layout: Layout) -> list[Tensor | None]:
        placement = layout.on("tp")
        if placement == PARTIAL:
            return [None] * self.tp
        if layout.kind != "token" or placement == R:
            return list(self.full(reference))
        if placement == LOCAL:
            return [reference[a:b] for a, b in self.windows]
        assert isinstance(placement, Shard)
        return list(self.shards(reference, placement.dim))

    def scene(
        self,
        target: Any,
        arguments: Sequence[Any],
        found: Sequence[Tensor],
        reference: Tensor,
        layout: Layout,
        **more: Any,
    ) -> Scene:
        """arguments: Args and constants. Empty found values: the node raised."""
        graph, operands = fx.Graph(), [[] for _ in self.ranks]  # type: ignore[var-annotated]
        args: list[Any] = []
        for argument in arguments:
            node = argument
            if isinstance(argument, Arg):
                make = graph.get_attr if argument.layout.kind == "weight" else graph.placeholder
                node = graph.create_node(make.__name__, argument.name)
                node.meta.update(layout=argument.layout, module="")
                for step, rest in argument.through:
                    node = graph.call_function(step, (node, *rest))
                    node.meta.update(layout=argument.layout, module="")
            args.append(node)
            for rank, mine in enumerate(operands):
                mine.append(argument.values[rank] if isinstance(argument, Arg) else argument)
        node = graph.call_function(target, tuple(args))
        node.meta.update(layout=layout, module="model.layers.0.mlp")
        expected = self.expected(reference, layout)
        fields: dict[str, Any] = {
            "ids": [None] * self.tp,
            "wrong": [r for r in self.ranks if self.is_wrong(found[r], expected[r], layout)],
            "tolerance": 1e-9 * float(reference.abs().nan_to_num().max()),
            "weights": {},
            "related": {},
            **more,
        }
        return Scene(
            node=node, mesh=self.mesh, tokens=self.tokens, found=list(found), expected=expected, reference=reference,
            operands=operands, **fields,
        )  # fmt: skip

    def is_wrong(self, found: Tensor, expected: Tensor | None, layout: Layout) -> bool:
        if expected is None:
            return True  # shares are right or wrong together
        rows = len(expected)
        if layout.kind == "token":
            rows = self.per if layout.on("tp") == LOCAL else self.real
        if found.shape != (rows, *expected.shape[1:]):
            return True
        return not torch.allclose(found[: len(expected)].double(), expected.double(), 0, 1e-9, equal_nan=True)


@pytest.fixture(params=SIZES, ids=lambda size: f"tp{size[0]}-{size[1]}tokens")
def bench(request: pytest.FixtureRequest) -> Bench:
    return Bench(*request.param)


def told(scene: Scene, kind: str, *words: str) -> Diagnosis:
    """The diagnosis, after a look at its kind, its words and its numbers."""
    assert scene.wrong, "the scene shows no mistake"
    found = diagnose(scene)
    assert found.kind == kind, found
    assert kind in KINDS
    for word in words:
        assert word in found.text, found
    assert json.loads(json.dumps(found.holds)) is not None
    return found


# --- sums ------------------------------------------------------------------------------------------------------------


def linear(bench: Bench, found_of: Callable[[list[Tensor]], list[Tensor]], **more: Any) -> Scene:
    """A whole weight on local tokens; found_of(right values of the ranks) -> values found."""
    w = bench.random(OUT, WIDTH)
    y = bench.x @ w.T
    arguments = [Arg("x", bench.local(bench.x), token(LOCAL)), Arg(W, bench.full(w), parameter())]
    return bench.scene(ops.linear, arguments, found_of(bench.local(y)), y, token(LOCAL), weights={W: w}, **more)


def rms(x: Tensor, w: Tensor, eps: float) -> Tensor:
    return w * x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt()


def test_complete_values_summed(bench: Bench) -> None:
    arguments = [Arg("x", bench.full(bench.x)), "tp", bench.tp]
    scene = bench.scene(ops.all_reduce, arguments, bench.full(bench.tp * bench.x), bench.x, token())
    diagnosis = told(scene, "reduced_twice", f"{bench.tp} x the expected one", "tp group", "all_reduce adds up")
    assert diagnosis.holds == {"factor": bench.tp, "group": "tp"}


def test_complete_values_scattered_as_sums(bench: Bench) -> None:
    arguments = [Arg("x", bench.full(bench.padded(bench.x))), "tp", bench.tp, 0]
    scene = bench.scene(ops.reduce_scatter, arguments, bench.local(bench.tp * bench.x), bench.x, token(LOCAL))
    told(scene, "reduced_twice", f"{bench.tp} x the expected one", "reduce_scatter adds up values that were complete")


def test_a_factor_that_is_the_groups_size(bench: Bench) -> None:
    text = told(linear(bench, lambda right: [bench.tp * y for y in right]), "reduced_twice").text
    assert f"{bench.tp} x the expected value, {bench.tp} being the size of the tp group" in text


def test_a_fraction_that_is_the_groups_size(bench: Bench) -> None:
    told(linear(bench, lambda right: [y / bench.tp for y in right]), "not_reduced", f"1/{bench.tp} of", "tp group")


def test_another_factor_is_just_that(bench: Bench) -> None:
    diagnosis = told(linear(bench, lambda right: [2.5 * right[0], *right[1:]]), "scaled", "Rank 0 holds 2.5 x")
    assert diagnosis.holds["factor"] == pytest.approx(2.5, abs=1e-9)
    told(linear(bench, lambda right: [-right[0], *right[1:]]), "scaled", "-1 x", "the sign is wrong")


def test_a_factor_in_some_rows() -> None:
    def found(right: list[Tensor]) -> list[Tensor]:
        right[1][2:4] *= 3
        return right

    told(linear(Bench(2, 13), found), "scaled", "Rank 1 holds 3 x", "rows 9..11")  # rank 1 begins at token 7


def test_the_groups_size_in_some_rows_is_no_sum() -> None:
    def found(right: list[Tensor]) -> list[Tensor]:
        right[1][2:4] *= 2
        return right

    told(linear(Bench(2, 13), found), "scaled", "Rank 1 holds 2 x the expected value in rows 9..11")


def test_a_complete_operand_is_no_share(bench: Bench) -> None:
    # its sum over the ranks would repair the value, but every rank holds the same
    arguments = [Arg("x", bench.full(bench.x)), 1 / bench.tp]
    scene = bench.scene(torch.mul, arguments, bench.full(bench.x / bench.tp), bench.x, token())
    assert "share" not in told(scene, "not_reduced", f"1/{bench.tp} of the expected value").text


def test_partial_sums_cut_where_they_should_be_summed(bench: Bench) -> None:
    shares = [bench.padded(s) for s in bench.shares(bench.x)]
    found = [s.chunk(bench.tp)[r].clone() for r, s in enumerate(shares)]
    arguments = [Arg("x", shares, token(PARTIAL)), "tp", bench.tp, 0]
    diagnosis = told(bench.scene(ops.slice, arguments, found, bench.x, token(LOCAL)), "not_reduced", "share of a sum")
    assert diagnosis.holds["group"] == "tp"


def test_a_norm_of_partial_sums(bench: Bench) -> None:
    w, shares = bench.random(WIDTH), bench.shares(bench.x)
    arguments = [Arg("x", shares, token(PARTIAL)), Arg("n.weight", bench.full(w), parameter()), 1e-6]
    found = [rms(s, w, 1e-6) for s in shares]
    scene = bench.scene(ops.rms_norm, arguments, found, rms(bench.x, w, 1e-6), token(), weights={"n.weight": w})
    told(scene, "not_reduced", "Operand `x` (x) is each rank's share of a sum", "tp group")


def test_a_value_that_is_a_share(bench: Bench) -> None:
    scene = bench.scene(torch.neg, [Arg("x", bench.full(bench.x))], bench.shares(-bench.x), -bench.x, token())
    told(scene, "not_reduced", "The value is each rank's share of a sum", "tp group")


def test_a_rank_that_skips_an_all_reduce(bench: Bench) -> None:
    shares = bench.shares(bench.x)
    found = bench.full(bench.x)
    found[1] = shares[1]
    scene = bench.scene(ops.all_reduce, [Arg("x", shares, token(PARTIAL)), "tp", bench.tp], found, bench.x, token())
    told(scene, "not_reduced", "Rank 1 holds the operand of all_reduce as it stood")


def test_a_rank_whose_share_is_wrong(bench: Bench) -> None:
    w = bench.random(OUT, WIDTH)
    xs, held = bench.shards(bench.x, 1), bench.shards(w, 1)
    arguments = [Arg("x", xs, token(Shard(1))), Arg(W, held, parameter(Shard(1)))]
    found = [x @ part.T for x, part in zip(xs, held)]
    found[1] = 3 * found[1]  # the sum over the ranks is no multiple of anything
    scene = bench.scene(ops.linear, arguments, found, bench.x @ w.T, token(PARTIAL), weights={W: w})
    told(scene, "scaled", "Rank 1 holds 3 x the expected value.")


def test_rows_of_different_tokens_are_summed() -> None:
    # cases.toml, dense-mlp-sums-different-tokens: part0 = x, part1 = 10 x, token value = index + 1
    bench = Bench(2, 4)
    values = torch.arange(1, 5, dtype=F64).unsqueeze(1)
    total = torch.tensor([[31.0], [42.0]], dtype=F64)
    arguments = [Arg("x", [values[:2], 10 * values[2:]], token(LOCAL)), "tp", 2]
    scene = bench.scene(
        ops.all_reduce, arguments, [total, total], 11 * values, token(LOCAL),
        ids=[torch.tensor([0, 1]), torch.tensor([2, 3])],
    )  # fmt: skip
    diagnosis = told(scene, "mixed_tokens", "row 0 is token 0 on rank 0, token 2 on rank 1")
    assert diagnosis.holds["tokens"] == [0, 2]


def test_a_mixed_sum_is_told_before_the_nan_it_makes(bench: Bench) -> None:
    rows = bench.local(bench.x)
    found = bench.full(torch.stack(rows).sum(0))  # NaN where some rank has padding
    arguments = [Arg("x", rows, token(LOCAL)), "tp", bench.tp]
    scene = bench.scene(ops.all_reduce, arguments, found, bench.x, token(LOCAL))
    told(scene, "mixed_tokens", f"row 0 is token 0 on rank 0, token {bench.per} on rank 1")
    if (bench.tp, bench.real) == (4, 3):
        told(scene, "mixed_tokens", "padding on rank 3")


# --- groups, dims, gathers, cuts, padding ----------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [16, 13, 3])
def test_a_sum_over_the_wrong_group(tokens: int) -> None:
    bench = Bench(4, tokens, ep=2)
    shares = bench.shares(bench.x)
    found = [shares[0] + shares[1]] * 2 + [shares[2] + shares[3]] * 2
    scene = bench.scene(ops.all_reduce, [Arg("x", shares, token(PARTIAL)), "ep", 2], found, bench.x, token())
    diagnosis = told(scene, "wrong_group", "over the ep group (2 ranks)", "over the tp group (4)")
    assert diagnosis.holds == {"group": "ep", "right_group": "tp"}


def test_a_sum_over_another_group_before_the_right_one(bench: Bench) -> None:
    bench = Bench(4, bench.real, ep=2)
    shares = bench.shares(bench.x)
    found = [shares[0] + shares[1]] * 2 + [shares[2] + shares[3]] * 2
    scene = bench.scene(ops.all_reduce, [Arg("x", shares, token(PARTIAL)), "ep", 2], found, bench.x, token(PARTIAL))
    told(scene, "wrong_group", "over the ep group (2 ranks)", "over the tp group (4)")
    scene.node.graph.call_function(ops.all_reduce, (scene.node, "tp", 4))  # ... which follows: this one is too many
    told(scene, "reduced_twice", "2 x the expected value, 2 being the size of the ep group")


def test_a_gather_along_the_wrong_dim(bench: Bench) -> None:
    logits = bench.random(bench.real, 8 * bench.tp)
    shards = bench.shards(logits, 1)
    arguments = [Arg("x", shards, token(Shard(1))), "tp", bench.tp, 0]
    scene = bench.scene(ops.all_gather, arguments, bench.full(torch.cat(shards)), logits, token())
    assert told(scene, "wrong_dim", "along dim 0; along dim 1").holds["right_dims"] == [1]


@pytest.mark.parametrize(("axis", "dim", "kind"), [("tp", 1, "wrong_dim"), ("ep", 0, "wrong_group")])
def test_padding_cannot_be_removed_behind_a_wrong_gather(axis: str, dim: int, kind: str) -> None:
    bench = Bench(4, 13, ep=2)
    size, rows = (4 if axis == "tp" else 2), bench.local(bench.x)
    pairs = [rows[:2], rows[:2], rows[2:], rows[2:]]
    gathered = [torch.cat(rows if axis == "tp" else pair, dim) for pair in pairs]
    arguments = [Arg("x", gathered, through=[(ops.all_gather, (axis, size, dim))]), 0, 13]
    empty = [torch.empty(0, dtype=F64)] * 4
    told(bench.scene(ops.unpad, arguments, empty, bench.x, token()), kind, "(all_gather)", "gives the right values")


def test_features_cut_in_place_of_tokens(bench: Bench) -> None:
    whole = bench.padded(bench.x)
    arguments = [Arg("x", bench.full(whole)), "tp", bench.tp, 1]
    scene = bench.scene(ops.slice, arguments, bench.shards(whole, 1), bench.x, token(LOCAL))
    told(scene, "feature_slice", "slices of features (dim 1) where slices of tokens were meant")


def test_a_slice_of_features_seen_where_it_is_used() -> None:
    bench, w = Bench(2, 16), Bench(2, 16).random(OUT, WIDTH)
    x = Arg("x", bench.shards(bench.x, 1), token(Shard(1)), through=[(ops.slice, ("tp", 2, 1))])
    arguments = [x, Arg(W, bench.full(w), parameter())]
    empty = [torch.empty(0, dtype=F64)] * 2
    scene = bench.scene(ops.linear, arguments, empty, bench.x @ w.T, token(LOCAL), weights={W: w})
    told(scene, "feature_slice", "`x` (slice_1) is a slice of features (dim 1")


def test_features_of_all_tokens_found_where_own_tokens_belong(bench: Bench) -> None:
    arguments = [Arg("x", bench.local(bench.x), token(LOCAL))]
    scene = bench.scene(torch.clone, arguments, bench.shards(bench.x, 1), bench.x, token(LOCAL))
    told(scene, "feature_slice", "a slice of features (dim 1) of all tokens where its own rows was meant")
    arguments = [Arg("x", bench.shards(bench.x, 1), token(Shard(1)))]
    scene = bench.scene(torch.clone, arguments, bench.local(bench.x), bench.x, token(Shard(1)))
    told(scene, "feature_slice", "all features of its own tokens where shard(1) was meant")


def test_a_full_value_gathered_again(bench: Bench) -> None:
    arguments = [Arg("x", bench.full(bench.x)), "tp", bench.tp, 0]
    scene = bench.scene(ops.all_gather, arguments, bench.full(bench.x.repeat(bench.tp, 1)), bench.x, token())
    told(scene, "residual_gathered", f"{bench.real} rows become {bench.tp * bench.real}")


def test_rows_that_repeat(bench: Bench) -> None:
    found = bench.full(bench.x.repeat(bench.tp, 1))
    scene = bench.scene(torch.clone, [Arg("x", found)], found, bench.x, token())
    told(scene, "residual_gathered", f"repeat {bench.tp} times")


@pytest.mark.parametrize("gathered", [True, False])
@pytest.mark.parametrize(("tp", "tokens"), [(2, 16), (2, 13), (4, 16), (4, 13)])
def test_a_full_residual_meets_local_rows(tp: int, tokens: int, gathered: bool) -> None:
    bench = Bench(tp, tokens)
    w, residual = bench.random(WIDTH), bench.random(tokens, WIDTH)
    through = [(ops.all_gather, ("tp", tp, 0)), (ops.unpad, (0, tokens))] if gathered else []
    arguments = [
        Arg("x", bench.local(bench.x), token(LOCAL)), Arg("residual", bench.full(residual), through=through),
        Arg("n.weight", bench.full(w), parameter()), 1e-6,
    ]  # fmt: skip
    empty = [torch.empty(0, dtype=F64)] * tp  # rows of different numbers cannot be added
    reference = rms(bench.x + residual, w, 1e-6)
    scene = bench.scene(ops.add_rms_norm, arguments, empty, reference, token(LOCAL), weights={"n.weight": w})
    words = (
        f"`residual` ({'unpad' if gathered else 'residual'}) holds all {tokens} rows where each rank's own {bench.per}"
    )
    told(scene, "residual_gathered" if gathered else "not_sliced", words)


def test_local_rows_where_all_were_meant(bench: Bench) -> None:
    w = bench.random(OUT, WIDTH)
    y = bench.x @ w.T
    arguments = [Arg("x", bench.local(bench.x), token(LOCAL)), Arg(W, bench.full(w), parameter())]
    scene = bench.scene(ops.linear, arguments, bench.local(y), y, token(), weights={W: w})
    told(scene, "not_gathered", "`x` (x) holds only each rank's own rows", "tp group")


def rope_of_local_rows(bench: Bench) -> Scene:
    """Local rows, all positions: they do not fit."""
    freq, positions = torch.tensor([1.0, 0.1, 0.01], dtype=F64), torch.arange(bench.real)
    arguments = [
        Arg("x", bench.local(bench.x), token(LOCAL)), Arg("positions", bench.full(positions)),
        Arg("inv_freq", bench.full(freq), parameter()), WIDTH - 6, False, 1.0,
    ]  # fmt: skip
    empty = [torch.empty(0, dtype=F64)] * bench.tp
    return bench.scene(ops.rope, arguments, empty, rotate(bench.x, positions, freq), token(LOCAL))


@pytest.mark.parametrize(("tp", "tokens"), [(2, 16), (2, 13), (4, 16), (4, 13)])
def test_the_other_layers_tell_which_operand_is_in_the_wrong_layout(tp: int, tokens: int) -> None:
    scene = rope_of_local_rows(Bench(tp, tokens))
    told(scene, "not_sliced", "`positions` (positions) holds all")
    graph = scene.node.graph
    full = [graph.placeholder(name) for name in ("x_1", "positions_1")]
    for node in full:
        node.meta.update(layout=token())
    sibling = graph.call_function(ops.rope, (*full, *scene.node.args[2:]))
    sibling.meta.update(layout=token(), module="model.layers.1.mlp")
    told(scene, "not_gathered", "`x` (x) holds only each rank's own rows")


def test_own_features_of_own_rows_are_no_logits() -> None:
    bench = Bench(4, 16)
    logits = bench.random(16, 8)
    parts = [rows.chunk(4, 1)[r].clone() for r, rows in enumerate(bench.local(logits))]
    arguments = [Arg("x", parts, token(Mixed(Shard(1)))), "tp", 4, 1]
    scene = bench.scene(ops.all_gather, arguments, bench.full(torch.cat(parts, 1)), logits, token())
    told(scene, "not_gathered", "joins features of different tokens")


def test_own_features_of_own_rows_meet_all_positions() -> None:
    bench = Bench(2, 16)
    scene = rope_of_local_rows(bench)
    scene.node.args[0].meta["layout"] = token(Mixed(Shard(1)))
    for operands in scene.operands:
        operands[0] = operands[0][:, 12:].contiguous()
    told(scene, "not_gathered", "holds on every rank its own rows, and of these its own features")


def test_a_rank_without_its_gather(bench: Bench) -> None:
    if bench.padding:
        pytest.skip("the gathered rows hold padding, so there is no such boundary")
    rows, found = bench.local(bench.x), bench.full(bench.x)
    found[1] = rows[1]
    arguments = [Arg("x", rows, token(LOCAL)), "tp", bench.tp, 0]
    told(bench.scene(ops.all_gather, arguments, found, bench.x, token()), "not_gathered", "Rank 1", "as it stood")


def test_own_rows_cut_again(bench: Bench) -> None:
    rows = bench.local(bench.x)
    if bench.per < bench.tp:
        pytest.skip("too few rows to cut")
    found = [rows[r].chunk(bench.tp)[r].clone() for r in bench.ranks]
    arguments = [Arg("x", rows, token(LOCAL)), "tp", bench.tp, 0]
    scene = bench.scene(ops.slice, arguments, found, bench.x, token(LOCAL))
    told(scene, "sliced_twice", f"{bench.per} rows become {-(-bench.per // bench.tp)}")


@pytest.mark.parametrize(("tp", "tokens"), [(2, 13), (4, 13), (2, 3), (4, 3)])
def test_padding_that_was_not_removed(tp: int, tokens: int) -> None:
    bench = Bench(tp, tokens)
    w, whole = bench.random(OUT, WIDTH), bench.padded(bench.x)
    arguments = [Arg("x", bench.full(whole)), Arg(W, bench.full(w), parameter())]
    found = bench.full(whole @ w.T)
    scene = bench.scene(ops.linear, arguments, found, bench.x @ w.T, token(), weights={W: w})
    told(scene, "pad_leaked", f"still has its padding, {len(whole)} rows: the first {tokens} alone")


@pytest.mark.parametrize(
    ("came", "kind", "words"),
    [
        ((ops.pad, (0, 16)), "not_sliced", "Operand pad is padded to 16 rows for a cut to local-token that is missing"),
        ((ops.slice, ("tp", 4, 1)), "feature_slice", "slice of features (dim 1, cut by slice_1) of all padded rows"),
    ],
)
def test_padding_that_was_for_a_cut(came: tuple[Any, tuple], kind: str, words: str) -> None:
    bench = Bench(4, 13)
    x = Arg("x", bench.full(bench.padded(bench.x)), through=[came])
    scene = bench.scene(torch.neg, [x], bench.full(-bench.padded(bench.x)), -bench.x, token())
    told(scene, kind, words)


def test_rows_cut_without_padding() -> None:
    bench = Bench(4, 13)  # 13 rows in chunks of 4: rank 3 gets one
    found = [part.clone() for part in bench.x.chunk(4)]
    scene = bench.scene(ops.slice, [Arg("x", bench.full(bench.x)), "tp", 4, 0], found, bench.x, token(LOCAL))
    told(scene, "pad_missing", "13 rows over 4 ranks without the padding to 16")


def test_nan_in_real_rows(bench: Bench) -> None:
    def found(right: list[Tensor]) -> list[Tensor]:
        return [NAN * right[0], *right[1:]]

    told(linear(bench, found), "pad_leaked", "Rank 0 holds NaN in token row", f"{'s 0..' if bench.per > 1 else ' 0'}")


def test_nan_that_came_in_with_padding() -> None:
    bench = Bench(2, 13)
    x = bench.local(bench.x)  # rank 1 has one padding row
    found = [v / v.abs().amax() for v in x]
    scene = bench.scene(
        torch.nn.functional.normalize, [Arg("x", x, token(LOCAL))], found, bench.x / bench.x.abs().amax(), token(LOCAL),
        wrong=[1],
    )  # fmt: skip
    told(scene, "pad_leaked", "Rank 1", "rows 7..13", "comes in by operand", "NaN in row 6 (its padding)")


# --- rows ------------------------------------------------------------------------------------------------------------


def sliced(bench: Bench, found: list[Tensor]) -> Scene:
    """A token slice that gave other rows than its operand has there."""
    arguments = [Arg("x", bench.full(bench.padded(bench.x))), "tp", bench.tp, 0]
    return bench.scene(ops.slice, arguments, found, bench.x, token(LOCAL))


def reordered(bench: Bench, order: Sequence[int]) -> Scene:
    """Full rows in this order."""
    return bench.scene(torch.clone, [Arg("x", bench.full(bench.x))], bench.full(bench.x[list(order)]), bench.x, token())


def test_the_next_ranks_window(bench: Bench) -> None:
    rows = bench.local(bench.x)
    diagnosis = told(sliced(bench, [*rows[1:], rows[0]]), "window_shift", "(rank 1's window)")
    assert diagnosis.holds["ranks"]["0"][0] == bench.per


def test_the_first_window_on_every_rank(bench: Bench) -> None:
    diagnosis = told(sliced(bench, bench.full(bench.local(bench.x)[0])), "window_shift", "Rank 1", "(rank 0's window)")
    assert "0" not in diagnosis.holds["ranks"]


def test_windows_that_begin_a_row_early() -> None:
    for tp in (2, 4):
        bench = Bench(tp, 13)
        moved = torch.cat((torch.full((1, WIDTH), NAN, dtype=F64), bench.x))[: tp * bench.per]
        found = [part.clone() for part in bench.padded(moved)[: tp * bench.per].split(bench.per)]
        diagnosis = told(sliced(bench, found), "window_shift", "Rows are shifted by -1", "1 row of padding")
        assert diagnosis.holds["shifts"] == [-1]


def test_rows_moved_around_the_end(bench: Bench) -> None:
    order = [(i + 2) % bench.real for i in range(bench.real)]
    diagnosis = told(reordered(bench, order), "window_shift", "around the end")
    # of three rows, two on is one back
    assert diagnosis.holds["shifts"] == ([-1] if bench.real == 3 else [2])


@pytest.mark.parametrize(
    ("name", "order"),
    [
        ("reversed", lambda t: range(t.real)[::-1]),
        ("round-robin", lambda t: [i for r in range(t.parts) for i in range(r, t.real, t.parts)]),
        ("in the ranks' reversed order", lambda t: [i for r in range(t.parts)[::-1] for i in range(*t.window(r))]),
    ],
)
@pytest.mark.parametrize(("tp", "tokens"), [(4, 16), (4, 13)])
def test_orders_with_a_name(tp: int, tokens: int, name: str, order: Callable[[Tokens], Sequence[int]]) -> None:
    bench = Bench(tp, tokens)
    diagnosis = told(reordered(bench, order(bench.tokens)), "rows_permuted", name)
    assert diagnosis.holds["order"].startswith(name)


def test_zigzag_and_round_robin_windows() -> None:
    bench = Bench(4, 16)
    chunks = bench.x.split(2)
    zigzag = [torch.cat((chunks[r], chunks[7 - r])) for r in range(4)]
    told(sliced(bench, zigzag), "rows_permuted", "zigzag", "Rank 0 holds 14..16 in place of 2..4")
    told(sliced(bench, [bench.x[r::4].clone() for r in range(4)]), "rows_permuted", "round-robin")


def test_swapped_windows_of_a_full_value() -> None:
    blocks = [[*range(4)], [*range(4, 8)], [*range(8, 12)], [12]]
    order = [*blocks[0], *blocks[2], *blocks[1], *blocks[3]]
    told(reordered(Bench(4, 13), order), "rows_permuted", "windows of ranks 1 and 2 swapped")


def test_an_order_without_a_name() -> None:
    order = [0, 1, 5, 3, 9, 2, 6, 7, 8, 4, 10, 11, 12]
    told(reordered(Bench(4, 13), order), "rows_permuted", "Rank 0 holds 5, 9, 2, 4 in place of 2, 4..6, 9")


def test_equal_tokens_do_not_hide_an_order() -> None:
    bench = Bench(4, 16)
    bench.x[9] = bench.x[2]  # the same token twice
    told(reordered(bench, range(16)[::-1]), "rows_permuted", "reversed")
    told(reordered(bench, [2, 9, 0, 1, 4, 3, 6, 5, 8, 7, *range(10, 16)]), "rows_permuted")


def test_a_block_that_stands_for_all() -> None:
    diagnosis = told(
        reordered(Bench(4, 16), [*range(4)] * 4), "window_shift", "rows 0..4, 0..4, 0..4 in place of rows 4..16"
    )
    assert diagnosis.holds["shifts"] == [-12, -8, -4]


def test_rows_reversed_within_each_window() -> None:
    bench = Bench(4, 13)
    found = bench.local(bench.x)
    found = [*(rows.flip(0) for rows in found[:3]), found[3]]
    told(sliced(bench, found), "rows_permuted", "reversed within each rank's window")


def test_rows_of_another_layer(bench: Bench) -> None:
    other = bench.random(bench.real, OUT)

    def found(right: list[Tensor]) -> list[Tensor]:
        return [right[0], bench.local(other)[1], *right[2:]]

    scene = linear(bench, found, related={"an earlier step": bench.random(bench.real, OUT), "layer 3": other})
    start = bench.windows[1][0]
    assert told(scene, "stale_rows", "Rank 1", "layer 3").holds["rows"]["1"][0] == start


def test_another_value_in_an_operands_place(bench: Bench) -> None:
    right, taken = bench.random(bench.real, WIDTH), bench.random(bench.real, WIDTH)
    arguments = [Arg("x", bench.local(bench.x), token(LOCAL)), Arg("y", bench.local(taken), token(LOCAL))]
    scene = bench.scene(
        ops.add, arguments, bench.local(bench.x + taken), bench.x + right, token(LOCAL),
        related={"input of layer 1": bench.random(bench.real, WIDTH), "residual of layer 0": right},
    )  # fmt: skip
    told(scene, "stale_rows", "`y` (y) is another value than meant: residual of layer 0")
    zeros = [torch.zeros_like(v) for v in scene.found]
    scene.operands = [[x, zero] for (x, _), zero in zip(scene.operands, zeros)]
    scene.found = [x + zero for x, zero in scene.operands]
    told(scene, "unknown", "Operand `y` (y) is all zeros")


# --- weights ---------------------------------------------------------------------------------------------------------


def column(bench: Bench, held_of: Callable[[Tensor], list[Tensor]], **others: Tensor) -> Scene:
    """A column-parallel linear; held_of(whole weight) -> what the ranks hold of it."""
    w = bench.random(OUT, WIDTH)
    held = held_of(w)
    found = [bench.x @ part.T for part in held]
    arguments = [Arg("x", bench.full(bench.x)), Arg(W, held, parameter(Shard(0)))]
    return bench.scene(ops.linear, arguments, found, bench.x @ w.T, token(Shard(1)), weights={W: w, **others})


def on_rank_1(bench: Bench, change: Callable[[Tensor], Tensor]) -> Callable[[Tensor], list[Tensor]]:
    def held(w: Tensor) -> list[Tensor]:
        shards = bench.shards(w, 0)
        shards[1] = change(shards[1])
        return shards

    return held


def test_another_ranks_shard(bench: Bench) -> None:
    def held(w: Tensor) -> list[Tensor]:
        shards = bench.shards(w, 0)
        return [shards[0], shards[0], *shards[2:]]

    diagnosis = told(column(bench, held), "weight_shard", f"Rank 1 computes with rank 0's shard of {W} (dim 0)")
    assert diagnosis.holds["ranks"] == [1]


def test_the_whole_weight_where_a_shard_was_meant(bench: Bench) -> None:
    told(column(bench, lambda w: bench.full(w)), "weight_shard", f"All ranks compute with the whole of {W}")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (torch.zeros_like, f"{W} as all zeros"),
        (lambda w: 2 * w, f"{W} times 2"),
        (lambda w: w.flip(0), "with its rows reversed"),
        (lambda w: w.roll(3, 1), "with its columns rotated by 21"),  # 24 columns: column 0 holds column 21
        (lambda w: torch.cat((w[:1], 0 * w[1:2], w[2:])), "with zeros in row 1"),
        (lambda w: torch.cat((w[:, :5], w[:, 5:7] * 3, w[:, 7:]), 1), "times 3 in columns 5..7"),
        (lambda w: torch.cat((w[:2], w[2:] + 0.25)), "with other values in row"),
        (lambda w: w[:, [1, 0, *range(2, WIDTH)]], "with columns 1, 0 in place of 0..2"),
    ],
)
def test_other_values_in_a_weight(bench: Bench, change: Callable[[Tensor], Tensor], words: str) -> None:
    told(column(bench, on_rank_1(bench, change)), "weight_value", "Rank 1 computes with", words)


def test_a_weight_of_another_layer(bench: Bench) -> None:
    other = bench.random(OUT, WIDTH)
    scene = column(bench, lambda w: bench.shards(other, 0), **{W.replace("0", "1"): other})
    told(scene, "weight_value", f"{W.replace('0', '1')} in place of {W}")


def test_a_scaled_weight_is_no_sum_too_many() -> None:
    # both explain a factor of 2 on two ranks; the weight is the cause
    told(column(Bench(2, 16), lambda w: Bench(2, 16).shards(2 * w, 0)), "weight_value", "times 2")


def test_the_wrong_shard_in_a_row_parallel_sum(bench: Bench) -> None:
    w = bench.random(OUT, WIDTH)
    held = bench.shards(w, 1)
    held[1] = held[0]
    xs = bench.shards(bench.x, 1)
    arguments = [Arg("x", xs, token(Shard(1))), Arg(W, held, parameter(Shard(1)))]
    found = [x @ part.T for x, part in zip(xs, held)]
    scene = bench.scene(ops.linear, arguments, found, bench.x @ w.T, token(PARTIAL), weights={W: w})
    told(scene, "weight_shard", f"Rank 1 computes with rank 0's shard of {W} (dim 1)")


def test_an_op_that_took_another_shard_than_its_own(bench: Bench) -> None:
    scene = column(bench, lambda w: bench.shards(w, 0))
    scene.found[1], scene.wrong = scene.found[0].clone(), [1]
    told(scene, "weight_shard", "Rank 1", f"rank 0's shard of {W}")


def test_a_layout_that_wants_the_wrong_part(bench: Bench) -> None:
    w = bench.random(WIDTH, WIDTH)
    held, own = bench.full(w.T.contiguous()), bench.full(bench.x)
    arguments = [Arg("x", own), Arg("table", [h[: WIDTH // bench.tp] for h in held], parameter(Shard(0)))]
    whole = w.T.contiguous()
    found = [x @ h[: WIDTH // bench.tp].T for x, h in zip(own, held)]
    scene = bench.scene(ops.linear, arguments, found, bench.x @ whole.T, token(), weights={"table": whole})
    told(scene, "weight_shard", "the whole of table")


def test_weights_made_of_another_ranks_shard(bench: Bench) -> None:
    w = bench.random(OUT, WIDTH)
    held = bench.shards(w, 0)
    held[1] = held[0]
    arguments = [
        Arg("x", bench.full(bench.x)), Arg(W, [3 * h for h in held], parameter(Shard(0)), [(torch.mul, (3,))]),
    ]  # fmt: skip
    found = [bench.x @ (3 * h).T for h in held]
    scene = bench.scene(ops.linear, arguments, found, 3 * bench.x @ w.T, token(Shard(1)), weights={W: w})
    told(scene, "weight_shard", f"Rank 1 computes with rank 0's part of {W}")


def test_a_square_weight_transposed() -> None:
    bench = Bench(2, 13)
    w = bench.random(WIDTH, WIDTH)
    arguments = [Arg("x", bench.full(bench.x)), Arg(W, bench.full(w.T.contiguous()), parameter())]
    scene = bench.scene(ops.linear, arguments, bench.full(bench.x @ w), bench.x @ w.T, token(), weights={W: w})
    told(scene, "weight_value", f"All ranks compute with {W} transposed")


def test_ids_looked_up_in_another_ranks_block() -> None:
    bench = Bench(2, 13)
    table, ids = bench.random(40, WIDTH), torch.randint(40, (13,), generator=bench.generator)
    arguments = [Arg("ids", bench.full(ids)), Arg(W, bench.shards(table, 0), parameter(Shard(0)))]

    def rows(start: int, block: Tensor) -> Tensor:
        inside = (ids >= start) & (ids < start + 20)
        return torch.where(inside.unsqueeze(1), block[(ids - start).clamp(0, 19)], 0.0)

    found = [rows(0, table[:20]), rows(0, table[20:])]  # rank 1 takes its block for the first
    scene = bench.scene(ops.embedding, arguments, found, table[ids], token(PARTIAL), weights={W: table})
    told(scene, "weight_shard", "Rank 1 looks ids up as if it held rank 0's rows")


def with_bias(bench: Bench, times: Sequence[int], layout: Layout) -> Scene:
    """A linear whose rank r holds its bias times[r] times; a partial one adds it on rank 0 only."""
    w, b = bench.random(OUT, WIDTH), bench.random(OUT)
    name = W.replace("weight", "bias")
    partial = layout.on("tp") == PARTIAL
    xs = bench.shards(bench.x, 1) if partial else bench.local(bench.x)
    held = bench.shards(w, 1) if partial else bench.full(w)
    arguments = [
        Arg("x", xs, token(Shard(1) if partial else LOCAL)), Arg(W, held, parameter(Shard(1) if partial else R)),
        Arg(name, [n * b for n in times], parameter(PARTIAL if partial else R)),
    ]  # fmt: skip
    found = [x @ h.T + n * b for x, h, n in zip(xs, held, times)]
    return bench.scene(ops.linear, arguments, found, bench.x @ w.T + b, layout, weights={W: w, name: b})


def test_a_bias_on_rank_0_only(bench: Bench) -> None:
    diagnosis = told(with_bias(bench, [1] + [0] * (bench.tp - 1), token(LOCAL)), "bias_count", "the bias")
    with_rows = [r for r, (a, b) in enumerate(bench.windows) if r and b > a]
    assert diagnosis.holds["times"] == {str(r): 0 for r in with_rows}
    assert "lack" in diagnosis.text


def test_a_bias_added_on_every_rank_of_a_sum(bench: Bench) -> None:
    scene = with_bias(bench, [1] * bench.tp, token(PARTIAL))
    told(scene, "bias_count", f"The sum over the tp group holds {bench.tp} times the bias")


# --- ids, positions, lengths, constants ------------------------------------------------------------------------------


def topk(bench: Bench, found_of: Callable[[Tensor, int], Tensor]) -> Scene:
    """Top-k ids of full rows, 6 of the keys up to the row; found_of(ids, start of a rank's window) -> ids found."""
    ids = torch.full((bench.real, 6), -1, dtype=torch.int32)
    for row in range(bench.real):
        chosen = torch.randperm(row + 1, generator=bench.generator)[:6]
        ids[row, : len(chosen)] = chosen.int()
    found = [found_of(ids, a).flip(1) for a, _ in bench.windows]  # the order of a row's ids carries no meaning
    # the operands are no part of these mistakes, so that the op cannot be run again
    wrong = [r for r in bench.ranks if not torch.equal(found[r].sort(1).values, ids.sort(1).values)]
    return bench.scene(ops.dsa_indexer_topk, [Arg("q_resid", bench.full(bench.x))], found, ids, token(), wrong=wrong)


def test_top_k_ids_that_count_from_the_window(bench: Bench) -> None:
    scene = topk(bench, lambda ids, start: torch.where(ids >= start, ids - start, -1))
    told(scene, "local_ids", "local ids where global ones were meant", f"+ {bench.windows[1][0]}", "those before")


def test_top_k_ids_offset_twice(bench: Bench) -> None:
    scene = topk(bench, lambda ids, start: torch.where(ids >= 0, ids + start, -1))
    told(scene, "local_ids", "global ids where local ones were meant", f"- {bench.windows[1][0]}")


def test_ids_that_are_all_missing_are_not_local(bench: Bench) -> None:
    scene = topk(bench, lambda ids, start: torch.full_like(ids, -1) if start else ids)
    told(scene, "unknown")


def rotate(x: Tensor, positions: Tensor, freq: Tensor) -> Tensor:
    """The last 2 * len(freq) features of [T, d] as pairs (i, i + half)."""
    half = len(freq)
    angles = positions.double().unsqueeze(1) * freq
    first, second = x[:, -2 * half : -half], x[:, -half:]
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((x[:, : -2 * half], first * cos - second * sin, second * cos + first * sin), 1)


def roped(bench: Bench, used: Sequence[Tensor]) -> Scene:
    """Rotated local rows; used: positions that the ranks are given."""
    freq = torch.tensor([1.0, 0.1, 0.01], dtype=F64)
    x = bench.local(bench.x)
    arguments = [
        Arg("x", x, token(LOCAL)), Arg("positions", used, token(LOCAL)), Arg("inv_freq", bench.full(freq), parameter()),
        WIDTH - 6, False, 1.0,
    ]  # fmt: skip
    found = [rotate(mine, p, freq) for mine, p in zip(x, used)]
    return bench.scene(ops.rope, arguments, found, rotate(bench.x, torch.arange(bench.real), freq), token(LOCAL))


def test_positions_that_count_from_the_window(bench: Bench) -> None:
    own = torch.arange(bench.per)
    padded = [torch.where(own < b - a, own, -1) for a, b in bench.windows]
    start = bench.windows[1][0]
    told(roped(bench, padded), "wrong_positions", "local positions where global ones were meant", f"{start}")


def test_positions_one_too_far(bench: Bench) -> None:
    padded = [torch.where(p < 0, p, p + 1) for p in bench.local(torch.arange(bench.real))]
    told(roped(bench, padded), "wrong_positions", "positions shifted by +1")


def test_a_rank_with_other_lengths() -> None:
    bench = Bench(4, 13)
    lens, rows = bench.full(torch.tensor([13])), bench.full(bench.x)
    lens[2] = torch.tensor([12])

    def kept(x: Tensor, kv_lens: Tensor) -> Tensor:
        return torch.where(torch.arange(len(x)).unsqueeze(1) < kv_lens, x, 0.0)

    arguments = [Arg("x", rows), Arg("kv_lens", lens, Layout("batch"))]
    scene = bench.scene(kept, arguments, [kept(x, n) for x, n in zip(rows, lens)], bench.x, token())
    diagnosis = told(scene, "wrong_metadata", "Rank 2 has another `kv_lens`", "kv_lens[0] is 12 where 13 was meant")
    assert diagnosis.holds["ranks"] == [2]


def test_lengths_that_differ_but_do_no_harm() -> None:
    bench = Bench(4, 13)
    lens = [torch.tensor([13 - r]) for r in bench.ranks]
    arguments = [Arg("x", bench.full(bench.x)), Arg("kv_lens", lens, Layout("batch"))]
    scene = bench.scene(lambda x, kv_lens: 2 * x, arguments, bench.full(2 * bench.x), 3 * bench.x, token())
    told(scene, "scaled", "0.666667 x")


def written(bench: Bench, slots: Sequence[Tensor]) -> Scene:
    """Rows written into a cache of 20 slots, in the reference row i into slot 19 - i."""

    def filled(at: Tensor) -> Tensor:
        cache = torch.full((20, WIDTH), NAN, dtype=F64)
        cache[at[at >= 0]] = bench.x[at >= 0]
        return cache

    arguments = [
        Arg("cache", bench.full(torch.full((20, WIDTH), NAN, dtype=F64)), Layout("cache")),
        Arg("rows", bench.full(bench.x)), Arg("slots", slots), 0,
    ]  # fmt: skip
    right = filled(19 - torch.arange(bench.real))
    return bench.scene(ops.cache_write, arguments, [filled(at) for at in slots], right, Layout("cache"))


def test_slots_that_are_wrong_on_all_ranks(bench: Bench) -> None:
    slots = 19 - torch.arange(bench.real)
    slots[1] = 0
    scene = written(bench, bench.full(slots))
    diagnosis = told(scene, "wrong_metadata", "slots", "row 1 is written to slot 0", "slot 18")
    assert diagnosis.holds["rows"] == [1]
    assert all(operands[0].isnan().all() for operands in scene.operands)  # the cache was not written again


def test_slots_that_are_wrong_on_one_rank(bench: Bench) -> None:
    slots = bench.full(19 - torch.arange(bench.real))
    slots[1] = slots[1].flip(0)
    told(
        written(bench, slots),
        "wrong_metadata",
        "Rank 1 has another `slots`",
        f"is {20 - bench.real} where 19 was meant",
    )


def test_a_mask_that_hides_real_tokens(bench: Bench) -> None:
    logits, bias = bench.random(bench.real, 8), torch.zeros(8, dtype=F64)
    ids = logits.topk(2).indices
    masks = [torch.arange(bench.per) < b - a for a, b in bench.windows]
    right = [m.clone() for m in masks]
    masks[0][0] = False
    found = [torch.where(m.unsqueeze(1), i, -1) for m, i in zip(masks, bench.local(ids))]
    arguments = [
        Arg("logits", bench.local(logits), token(LOCAL)), Arg("gate.bias", bench.full(bias), parameter()),
        Arg("token_mask", masks, token(LOCAL)), 2, 1, 1, True, 1.0,
    ]  # fmt: skip
    scene = bench.scene(
        ops.moe_topk, arguments, found, ids, token(LOCAL), output=1, wrong=[0], weights={"gate.bias": bias},
        ids=[torch.where(m, 1, -1) for m in right],
    )  # fmt: skip
    told(scene, "wrong_metadata", "`token_mask` is wrong (rank 0, entry 0)")


def test_lengths_that_are_wrong_on_all_ranks(bench: Bench) -> None:
    def kept(x: Tensor, kv_lens: Tensor) -> Tensor:
        return torch.where(torch.arange(len(x)).unsqueeze(1) < kv_lens, x, 0.0)

    short = torch.tensor([bench.real - 2])
    arguments = [Arg("x", bench.full(bench.x)), Arg("kv_lens", bench.full(short), Layout("batch"))]
    scene = bench.scene(kept, arguments, bench.full(kept(bench.x, short)), bench.x, token())
    told(scene, "wrong_metadata", "`kv_lens` is wrong (all ranks, entry 0): +2 on every entry")


def test_padding_dispatched_to_experts() -> None:
    bench = Bench(4, 13)  # rank 3 has one token and three padding rows
    ids = torch.stack((torch.arange(13) % 6, torch.arange(13) % 6 + 1), 1)
    given = bench.local(ids)
    given[3][1:] = torch.tensor([2, 3])

    def rows(x: Tensor, chosen: Tensor) -> Tensor:
        pairs = sorted((int(e), t, k) for t, es in enumerate(chosen) for k, e in enumerate(es) if e >= 0)
        return x[[t for _, t, _ in pairs]]

    xs = bench.local(bench.x)
    found = [rows(x, chosen) for x, chosen in zip(xs, given)]
    arguments = [Arg("x", xs, token(LOCAL)), Arg("ids", given, token(LOCAL)), 8]
    scene = bench.scene(
        ops.moe_dispatch, arguments, found, rows(bench.x, ids), Layout("rows").placed(tp=LOCAL), wrong=[3]
    )
    scene.expected = [rows(x, chosen) for x, chosen in zip(xs, bench.local(ids))]
    told(scene, "pad_leaked", "`ids` takes padding for tokens")


def test_an_eps_of_another_norm(bench: Bench) -> None:
    w = bench.random(WIDTH)
    arguments = [Arg("x", bench.local(bench.x), token(LOCAL)), Arg("n.weight", bench.full(w), parameter()), 1e-5]
    found = bench.local(rms(bench.x, w, 1e-5))
    reference = rms(bench.x, w, 1e-6)
    scene = bench.scene(ops.rms_norm, arguments, found, reference, token(LOCAL), weights={"n.weight": w})
    assert told(scene, "wrong_eps", "eps 1e-05; eps 1e-06").holds == {"eps": 1e-5, "right_eps": 1e-6}


def test_an_eps_that_the_op_took_itself(bench: Bench) -> None:
    w = bench.random(WIDTH)
    arguments = [Arg("x", bench.local(bench.x), token(LOCAL)), Arg("n.weight", bench.full(w), parameter()), 1e-6]
    found, reference = bench.local(rms(bench.x, w, 0.0)), rms(bench.x, w, 1e-6)
    scene = bench.scene(
        ops.rms_norm, arguments, found, reference, token(LOCAL), weights={"n.weight": w}, tolerance=1e-12
    )
    told(scene, "wrong_eps", "computed with eps 0; eps 1e-06")


def test_a_constant_that_was_flipped() -> None:
    bench, freq = Bench(2, 13), torch.tensor([1.0, 0.1, 0.01], dtype=F64)
    positions = bench.local(torch.arange(13))
    arguments = [
        Arg("x", bench.local(bench.x), token(LOCAL)), Arg("positions", positions, token(LOCAL)),
        Arg("inv_freq", bench.full(freq), parameter()), WIDTH - 6, True, 1.0,
    ]  # fmt: skip
    pairs = torch.cat((bench.x[:, :-6], bench.x[:, -6::2], bench.x[:, -5::2]), 1)  # (2i, 2i+1) as (i, i + half)
    found = bench.local(rotate(pairs, torch.arange(13), freq))
    scene = bench.scene(ops.rope, arguments, found, rotate(bench.x, torch.arange(13), freq), token(LOCAL))
    told(scene, "wrong_constant", "interleaved = True; False gives the right values")


# --- nothing to say --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
def test_garbage_is_not_explained(bench: Bench, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)

    def noisy(right: list[Tensor]) -> list[Tensor]:
        right[0] = right[0] + torch.randn(right[0].shape, generator=generator, dtype=F64)
        return right

    diagnosis = told(linear(bench, noisy), "unknown", "No hypothesis holds on rank 0", "the node gives the right value")
    assert diagnosis.holds["rows"] == bench.windows[0][1]
    assert diagnosis.holds["first"] == [0, 0]
    told(sliced(bench, noisy(bench.local(bench.x))), "unknown")
    arguments = [Arg("x", bench.full(bench.x)), "tp", bench.tp]
    told(bench.scene(ops.all_reduce, arguments, noisy(bench.full(bench.x)), bench.x, token()), "unknown")
    told(other_numbers(bench, generator), "unknown")


def other_numbers(bench: Bench, generator: torch.Generator) -> Scene:
    """Other whole numbers."""
    right = torch.randint(50, (bench.real, 6), generator=generator)
    other = torch.randint(50, (bench.real, 6), generator=generator)
    return bench.scene(torch.clone, [Arg("x", bench.full(right))], bench.full(other), right, token())


def test_the_statistics_of_what_is_not_explained() -> None:
    bench = Bench(2, 4)
    reference = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0], [7.0, 8.0]], dtype=F64)
    found = [reference[:2].clone(), reference[2:].clone()]
    found[1][1] += torch.tensor([0.5, -1.5], dtype=F64)
    arguments = [Arg("x", bench.local(reference), token(LOCAL))]
    diagnosis = told(
        bench.scene(torch.clone, arguments, found, reference, token(LOCAL)),
        "unknown", "rank 1", "1 of 2 rows differ, largest error 1.5", "first at [1, 0]: found 7.5, expected 7",
    )  # fmt: skip
    assert diagnosis.holds["median_ratio"] == 1.0
    assert diagnosis.holds["wrong_rows"] == 1


def test_zeros_prove_no_factor_and_no_order(bench: Bench) -> None:
    reference = torch.zeros(bench.real, WIDTH, dtype=F64)
    reference[0, 0] = 3.0  # one value: any factor would explain it
    found = bench.local(bench.tp * reference)
    scene = bench.scene(torch.clone, [Arg("x", bench.local(reference), token(LOCAL))], found, reference, token(LOCAL))
    told(scene, "unknown")
    scene = bench.scene(
        torch.clone, [Arg("x", bench.local(reference), token(LOCAL))], bench.local(0 * reference), reference,
        token(LOCAL), related={"zeros": 0 * reference},
    )  # fmt: skip
    told(scene, "unknown", "found 0, expected 3")


def test_one_rank_alone() -> None:
    bench = Bench(1, 5)
    told(linear(bench, lambda right: [3 * y for y in right]), "scaled", "3 x")
    told(linear(bench, lambda right: [y + bench.random(*y.shape) for y in right]), "unknown")


def test_a_rank_without_a_real_row_proves_nothing() -> None:
    bench = Bench(4, 3)
    told(linear(bench, lambda right: [*right[:3], right[3] + 1], wrong=[3]), "unknown")


def test_a_value_of_no_known_shape(bench: Bench) -> None:
    scene = bench.scene(torch.clone, [Arg("x", bench.full(bench.x))], bench.full(bench.random(5, 7)), bench.x, token())
    told(scene, "unknown", f"has shape [5, 7], expected [{bench.real}, {WIDTH}]")


def test_a_node_that_cannot_run(bench: Bench) -> None:
    arguments = [Arg("x", bench.full(bench.x)), Arg(W, bench.full(bench.random(OUT, 7)), parameter())]
    empty = [torch.empty(0, dtype=F64)] * bench.tp
    scene = bench.scene(ops.linear, arguments, empty, bench.random(bench.real, OUT), token())
    told(scene, "unknown", f"does not run on its operands (rank 0: x [{bench.real}, {WIDTH}], weight [{OUT}, 7])")
