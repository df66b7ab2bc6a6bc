"""Diagnosis of hand-made scenes: what each mistake is called, with which numbers, and what proves nothing.

Every scene is made with plain torch from the layout vocabulary (DESIGN section 2): rank r owns the token rows
[r * per, (r + 1) * per), per = ceil(T / tp); padding is NaN.
"""

import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.distributed.tensor.placement_types import Partial, Placement, Replicate, Shard

import emulator.ops  # noqa: F401  (registers the vocabulary)
from emulator.layout.placement import Layout, Tokens
from emulator.runtime.mesh import Mesh
from emulator.verify.diagnosis import diagnose
from emulator.verify.scene import Diagnosis, Scene

ops = torch.ops.emulator
F64, NAN = torch.float64, float("nan")
R, LOCAL, PARTIAL = Replicate(), Shard(0), Partial("sum")
WIDTH, OUT = 24, 16
SIZES = [(tp, tokens) for tp in (2, 4) for tokens in (16, 13, 3)]
NAME = "model.layers.0.mlp.down_proj.weight"


def token(placement: Placement = R, **axes: Placement) -> Layout:
    return Layout("token").placed(tp=placement, **axes)


def weight(placement: Placement = R) -> Layout:
    return Layout("weight").placed(tp=placement)


class Bench:
    """T tokens on tp ranks (ep of them share experts), random values, and scenes made of them."""

    def __init__(self, tp: int, real: int, ep: int | None = None):
        self.mesh, self.tokens = Mesh(tp=tp, ep=ep or tp), Tokens(real, tp)
        self.tp, self.real, self.per = tp, real, -(-real // tp)
        self.ranks = range(tp)
        self.windows = [(min(r * self.per, real), min((r + 1) * self.per, real)) for r in self.ranks]
        self.generator = torch.Generator().manual_seed(100 * tp + real)
        self.x = self.random(real, WIDTH)

    def random(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator, dtype=F64)

    def padded(self, x: Tensor) -> Tensor:
        """Rows up to tp * per; the new ones hold NaN (-1 for whole numbers)."""
        fill = NAN if x.is_floating_point() else -1
        return torch.cat((x, torch.full((self.tp * self.per - len(x), *x.shape[1:]), fill, dtype=x.dtype)))

    def local(self, x: Tensor) -> list[Tensor]:
        """Every rank's rows, with padding."""
        return list(self.padded(x).clone().split(self.per))

    def full(self, x: Tensor) -> list[Tensor]:
        return [x.clone() for _ in self.ranks]

    def shards(self, x: Tensor, dim: int) -> list[Tensor]:
        return [s.clone() for s in x.chunk(self.tp, dim)]

    def shares(self, x: Tensor) -> list[Tensor]:
        """Random addends of x, one a rank."""
        first = [self.random(*x.shape) for _ in range(self.tp - 1)]
        return [*first, x - sum(first)]

    def expected(self, reference: Tensor, layout: Layout) -> list[Tensor | None]:
        placement = layout.on("tp")
        if layout.kind != "token" or placement == R:
            return list(self.full(reference))
        if placement == LOCAL:
            return [reference[a:b] for a, b in self.windows]
        return list(self.shards(reference, placement.dim)) if isinstance(placement, Shard) else [None] * self.tp

    def scene(
        self,
        target: Any,
        arguments: Sequence[Any],
        found: Sequence[Tensor],
        reference: Tensor,
        layout: Layout,
        **more: Any,
    ) -> Scene:
        """arguments: constants, (name, values by rank, layout) or, for a weight, its layout "weight" and full name."""
        graph, operands = fx.Graph(), [[] for _ in self.ranks]
        args: list[Any] = []
        for argument in arguments:
            if not isinstance(argument, tuple):
                args.append(argument)
                for mine in operands:
                    mine.append(argument)
                continue
            name, values, given = argument
            is_weight = given.kind == "weight"
            node = graph.create_node("get_attr", name) if is_weight else graph.placeholder(name)
            node.meta.update(layout=given, module="")
            args.append(node)
            for mine, value in zip(operands, values):
                mine.append(value)
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
        if len(found) < len(expected) or found.shape[1:] != expected.shape[1:]:
            return True
        rows = self.per if layout.on("tp") == LOCAL else self.real
        if layout.kind == "token" and len(found) != rows:
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
    for word in words:
        assert word in found.text, found
    assert json.loads(json.dumps(found.holds)) is not None
    assert found.text.endswith(".")
    return found


# --- sums ------------------------------------------------------------------------------------------------------------


def test_complete_values_summed(bench: Bench) -> None:
    arguments = [("x", bench.full(bench.x), token()), "tp", bench.tp]
    found = bench.full(bench.tp * bench.x)
    diagnosis = told(
        bench.scene(ops.all_reduce, arguments, found, bench.x, token()),
        "reduced_twice", f"{bench.tp} x", "tp group", "all_reduce",
    )  # fmt: skip
    assert diagnosis.holds == {"factor": bench.tp, "group": "tp"}


def test_complete_values_scattered_as_sums(bench: Bench) -> None:
    whole = bench.padded(bench.x)
    arguments = [("x", bench.full(whole), token()), "tp", bench.tp, 0]
    found = bench.local(bench.tp * bench.x)
    told(
        bench.scene(ops.reduce_scatter, arguments, found, bench.x, token(LOCAL)),
        "reduced_twice", f"{bench.tp} x", "reduce_scatter adds up values that were complete",
    )  # fmt: skip


def linear(bench: Bench, found_of: Callable[[list[Tensor]], list[Tensor]], **more: Any) -> Scene:
    """A whole weight on local tokens; found_of(right values) -> values found."""
    w = bench.random(OUT, WIDTH)
    y = bench.x @ w.T
    arguments = [("x", bench.local(bench.x), token(LOCAL)), (NAME, bench.full(w), weight())]
    return bench.scene(
        ops.linear, arguments, found_of(bench.local(y)), y, token(LOCAL), weights={NAME: w}, **more
    )  # fmt: skip


def test_a_factor_that_is_the_groups_size(bench: Bench) -> None:
    text = told(linear(bench, lambda right: [bench.tp * y for y in right]), "reduced_twice").text
    assert f"{bench.tp} x the expected value, {bench.tp} being the size of the tp group" in text


def test_a_fraction_that_is_the_groups_size(bench: Bench) -> None:
    told(linear(bench, lambda right: [y / bench.tp for y in right]), "not_reduced", f"1/{bench.tp}", "tp group")


def test_another_factor_is_just_that(bench: Bench) -> None:
    diagnosis = told(linear(bench, lambda right: [2.5 * right[0], *right[1:]]), "scaled", "Rank 0", "2.5 x")
    assert diagnosis.holds["factor"] == pytest.approx(2.5, abs=1e-9)
    told(linear(bench, lambda right: [-right[0], *right[1:]]), "scaled", "-1 x", "the sign is wrong")


def test_a_factor_in_some_rows() -> None:
    bench = Bench(2, 13)

    def found(right: list[Tensor]) -> list[Tensor]:
        right[1][2:4] *= 3
        return right

    told(linear(bench, found), "scaled", "Rank 1 holds 3 x", "rows 9..11")  # rank 1 begins at token 7


def test_partial_sums_cut_where_they_should_be_summed(bench: Bench) -> None:
    shares = [bench.padded(s) for s in bench.shares(bench.x)]
    found = [s.chunk(bench.tp)[r].clone() for r, s in enumerate(shares)]
    arguments = [("x", shares, token(PARTIAL)), "tp", bench.tp, 0]
    diagnosis = told(
        bench.scene(ops.slice, arguments, found, bench.x, token(LOCAL)),
        "not_reduced", "share of a sum", "tp group",
    )  # fmt: skip
    assert diagnosis.holds["group"] == "tp"


def rms(x: Tensor, w: Tensor, eps: float) -> Tensor:
    return w * x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt()


def test_a_norm_of_partial_sums(bench: Bench) -> None:
    w, shares = bench.random(WIDTH), bench.shares(bench.x)
    arguments = [("x", shares, token(PARTIAL)), ("n.weight", bench.full(w), weight()), 1e-6]
    found = [rms(s, w, 1e-6) for s in shares]
    told(
        bench.scene(ops.rms_norm, arguments, found, rms(bench.x, w, 1e-6), token(), weights={"n.weight": w}),
        "not_reduced", "Operand `x`",
    )  # fmt: skip


def test_a_value_that_is_a_share(bench: Bench) -> None:
    arguments = [("x", bench.full(bench.x), token())]
    scene = bench.scene(torch.neg, arguments, bench.shares(-bench.x), -bench.x, token())
    told(scene, "not_reduced", "share of a sum")


def test_a_rank_that_skips_an_all_reduce(bench: Bench) -> None:
    shares = bench.shares(bench.x)
    found = [bench.x, shares[1], *[bench.x] * (bench.tp - 2)]
    arguments = [("x", shares, token(PARTIAL)), "tp", bench.tp]
    told(
        bench.scene(ops.all_reduce, arguments, found, bench.x, token()),
        "not_reduced", "Rank 1 holds the operand of all_reduce as it stood",
    )  # fmt: skip


def test_rows_of_different_tokens_are_summed() -> None:
    # cases.toml, dense-mlp-sums-different-tokens: part0 = x, part1 = 10 x, token value = index + 1
    bench = Bench(2, 4)
    values = torch.arange(1, 5, dtype=F64).unsqueeze(1)
    operands = [values[:2], 10 * values[2:]]
    total = torch.tensor([[31.0], [42.0]], dtype=F64)
    scene = bench.scene(
        ops.all_reduce, [("x", operands, token(LOCAL)), "tp", 2], [total, total], 11 * values, token(LOCAL),
        ids=[torch.tensor([0, 1]), torch.tensor([2, 3])],
    )  # fmt: skip
    diagnosis = told(scene, "mixed_tokens", "row 0 is token 0 on rank 0, token 2 on rank 1")
    assert diagnosis.holds["tokens"] == [0, 2]


def test_a_mixed_sum_is_told_before_the_nan_it_makes(bench: Bench) -> None:
    rows = bench.local(bench.x)
    found = [torch.stack(rows).sum(0)] * bench.tp  # NaN where some rank has padding
    arguments = [("x", rows, token(LOCAL)), "tp", bench.tp]
    told(bench.scene(ops.all_reduce, arguments, found, bench.x, token(LOCAL)), "mixed_tokens", "different tokens")


# --- groups, dims, gathers and cuts ----------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [16, 13, 3])
def test_a_sum_over_the_wrong_group(tokens: int) -> None:
    bench = Bench(4, tokens, ep=2)
    shares = bench.shares(bench.x)
    found = [shares[0] + shares[1]] * 2 + [shares[2] + shares[3]] * 2
    arguments = [("x", shares, token(PARTIAL)), "ep", 2]
    diagnosis = told(
        bench.scene(ops.all_reduce, arguments, found, bench.x, token()),
        "wrong_group", "over the ep group (2 ranks)", "over the tp group (4)",
    )  # fmt: skip
    assert diagnosis.holds == {"group": "ep", "right_group": "tp"}


def test_a_gather_along_the_wrong_dim(bench: Bench) -> None:
    logits = bench.random(bench.real, 8 * bench.tp)
    shards = bench.shards(logits, 1)
    arguments = [("x", shards, token(Shard(1))), "tp", bench.tp, 0]
    scene = bench.scene(ops.all_gather, arguments, [torch.cat(shards)] * bench.tp, logits, token())
    assert told(scene, "wrong_dim", "along dim 0; along dim 1").holds["right_dims"] == [1]


def test_features_cut_in_place_of_tokens(bench: Bench) -> None:
    arguments = [("x", bench.full(bench.padded(bench.x)), token()), "tp", bench.tp, 1]
    found = [s.clone() for s in bench.padded(bench.x).chunk(bench.tp, 1)]
    told(
        bench.scene(ops.slice, arguments, found, bench.x, token(LOCAL)),
        "feature_slice", "slices of features (dim 1) where slices of tokens were meant",
    )  # fmt: skip


def test_a_full_value_gathered_again(bench: Bench) -> None:
    arguments = [("x", bench.full(bench.x), token()), "tp", bench.tp, 0]
    scene = bench.scene(ops.all_gather, arguments, bench.full(bench.x.repeat(bench.tp, 1)), bench.x, token())
    told(scene, "residual_gathered", f"{bench.real} rows become {bench.tp * bench.real}")


def test_rows_that_repeat_without_a_gather_at_hand(bench: Bench) -> None:
    found = bench.full(bench.x.repeat(bench.tp, 1))
    scene = bench.scene(torch.clone, [("x", found, token())], found, bench.x, token())
    told(scene, "residual_gathered", f"repeat {bench.tp} times")


def add_norm(bench: Bench, x: list[Tensor], residual: list[Tensor]) -> Scene:
    """add_rms_norm of local rows, given these operands: it raises where their rows do not fit."""
    w, right = bench.random(WIDTH), bench.random(bench.real, WIDTH)
    reference = rms(bench.x + right, w, 1e-6)
    arguments = [("x", x, token(LOCAL)), ("residual", residual, token()), ("n.weight", bench.full(w), weight()), 1e-6]
    found = [torch.empty(0, dtype=F64) for _ in bench.ranks]
    return bench.scene(ops.add_rms_norm, arguments, found, reference, token(LOCAL), weights={"n.weight": w})


@pytest.mark.parametrize(("tp", "tokens"), [(2, 16), (2, 13), (4, 16), (4, 13)])
def test_a_residual_that_was_gathered(tp: int, tokens: int) -> None:
    bench = Bench(tp, tokens)
    scene = add_norm(bench, bench.local(bench.x), [])  # the residual of the reference is drawn in there
    residual = Bench(tp, tokens)
    residual.random(WIDTH)
    whole = residual.random(tokens, WIDTH)
    gather = scene.node.graph.call_function(ops.all_gather, ())
    gather.meta.update(layout=token(), module="")
    local = next(n for n in scene.node.graph.nodes if n.name == "residual")
    gather.args = (local, "tp", tp, 0)
    scene.node.prepend(gather)
    scene.node.args = (scene.node.args[0], gather, *scene.node.args[2:])
    weight_value = rms(torch.ones(1, WIDTH, dtype=F64), torch.ones(WIDTH, dtype=F64), 0)
    assert weight_value.shape == (1, WIDTH)
    w = scene.weights["n.weight"]
    scene.operands = [[x, whole.clone(), w, 1e-6] for x in bench.local(bench.x)]
    told(scene, "residual_gathered", "`residual`", f"{tokens} rows where each rank's own {bench.per} were meant")
