"""Soundness of every layout rule, by simulation.

For each op: every combination of placements of its tensor arguments that the rule accepts is run on simulated ranks
(arguments cut by their placements, the real kernel per rank, outputs put together by the placements the rule promises)
and compared with the op on whole arguments. A combination the rule accepts but that does not come out whole is a bug.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor.placement_types import Placement, Shard

import emulator.ops  # noqa: F401  (registers the vocabulary)
from emulator.ops.registry import LOCAL, OPS, PARTIAL, Illegal, Mixed, R, op_name
from emulator.ops.views import VIEW_RULES

F64 = torch.float64
COLUMN, ROW = Shard(0), Shard(1)  # of a weight [out, in]
HEADS = Shard(1)  # of a value [T, N, d] or [T, N*d]
T, IN, OUT, N, WIDTH, VOCAB, EXPERTS, TOPK = 6, 12, 18, 6, 6, 24, 6, 2  # all divide by 2 and by 3


@dataclass(frozen=True)
class Case:
    """One op on whole arguments. tensors: in argument order; statics: the rest."""

    name: str
    call: Callable[..., Any]
    rule: Callable[..., Any]
    tensors: dict[str, Tensor]
    statics: dict[str, Any] = field(default_factory=dict)
    legal: frozenset[tuple[Placement, ...]] = frozenset()

    def run(self, tensors: dict[str, Tensor], **rank_args: Any) -> tuple[Tensor, ...]:
        output = self.call(**{k: t.clone() for k, t in tensors.items()}, **self.statics, **rank_args)
        return tuple(output) if isinstance(output, (tuple, list)) else (output,)

    def combinations(self) -> Iterator[dict[str, Placement]]:
        choices = [[R, PARTIAL, *(Shard(d) for d in range(t.dim()))] for t in self.tensors.values()]
        for combination in itertools.product(*choices):
            yield dict(zip(self.tensors, combination))

    def accepted(self) -> Iterator[tuple[dict[str, Placement], tuple[Placement, ...]]]:
        for placements in self.combinations():
            try:
                promised = self.rule(placements)
            except Illegal:
                continue
            yield placements, promised if isinstance(promised, tuple) else (promised,)


def floats(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)), dtype=F64)


def cut(value: Tensor, placement: Placement, size: int, generator: torch.Generator) -> list[Tensor]:
    """What each of `size` ranks holds. Partial: random summands."""
    if placement == R:
        return [value] * size
    if isinstance(placement, Shard):
        assert value.shape[placement.dim] % size == 0
        return list(value.chunk(size, placement.dim))
    assert placement == PARTIAL
    if value.dtype == torch.bool:  # no sum of bools: a mask can be split only by "or", which no rule may rely on
        summands = [value, *(~value for _ in range(size - 1))]
        return summands
    draw = torch.randn if value.is_floating_point() else lambda s, **k: torch.randint(-9, 9, s, **k)
    summands = [draw(value.shape, generator=generator, dtype=value.dtype) for _ in range(size - 1)]
    return [*summands, value - sum(summands)]


def lengths_of_ranks(tensors: dict[str, Tensor], size: int) -> dict[str, list[Tensor]]:
    """Row by row: how many rows of each request a rank holds, and how many keys its last one of them sees."""
    owner = [i for i, n in enumerate(tensors["query_lens"].tolist()) for _ in range(n)]
    ends = tensors["query_lens"].cumsum(0).tolist()
    per, found = len(owner) // size, {"query_lens": [], "kv_lens": []}
    for rank in range(size):
        rows, keys = torch.zeros_like(tensors["query_lens"]), torch.zeros_like(tensors["kv_lens"])
        for row in range(rank * per, (rank + 1) * per):
            request = owner[row]
            rows[request] += 1
            keys[request] = tensors["kv_lens"][request] - (ends[request] - 1 - row)
        found["query_lens"].append(rows)
        found["kv_lens"].append(keys)
    return found


def whole(parts: Sequence[Tensor], placement: Placement) -> Tensor:
    """The value that the ranks' parts make up."""
    if isinstance(placement, Shard):
        return torch.cat(list(parts), placement.dim)
    if placement == PARTIAL:
        return torch.stack(list(parts)).sum(0)
    assert placement == R, placement
    for part in parts[1:]:
        torch.testing.assert_close(part, parts[0], rtol=0, atol=0, equal_nan=True, msg="replicas differ")
    return parts[0]


def simulate(case: Case, placements: dict[str, Placement], promised: Sequence[Placement], size: int) -> None:
    """Asserts that the op on the ranks' parts makes up the op on the whole."""
    generator = torch.Generator().manual_seed(1)
    parts = {k: cut(t, placements[k], size, generator) for k, t in case.tensors.items()}
    for name in {"query_lens", "kv_lens"} & set(parts):
        if placements[name] == LOCAL:  # the lengths on a rank's rows, not a cut of the list of requests
            parts[name] = lengths_of_ranks(case.tensors, size)[name]
    rank_args = OPS[case.name].rank_args if case.name in OPS else None
    outputs = []
    for rank in range(size):
        mine = {k: p[rank] for k, p in parts.items()}
        extra = {}
        if rank_args is not None:
            extra = rank_args(mine["weight"], rank if placements["weight"] != R else 0)
        outputs.append(case.run(mine, **extra))
    expected = case.run(case.tensors)
    assert len(promised) == len(expected), f"{case.name}: {len(promised)} placements for {len(expected)} outputs"
    for i, (value, placement) in enumerate(zip(expected, promised)):
        got = whole([o[i] for o in outputs], placement)
        torch.testing.assert_close(got, value, rtol=0, atol=1e-12 * max(1.0, scale(value)), equal_nan=True)


def scale(value: Tensor) -> float:
    return float(value.double().nan_to_num(0.0).abs().max()) if value.numel() else 0.0


def vocabulary_case(
    name: str, tensors: dict[str, Tensor], *legal: tuple[Placement, ...], case_id: str = "", **statics: Any
) -> Any:
    rule = OPS[name].rule
    call = getattr(torch.ops.emulator, name)
    case = Case(name, call, lambda p: rule(**p), tensors, statics, frozenset(legal))
    return pytest.param(case, id=case_id or name)


def view_case(function: Any, tensors: dict[str, Tensor], call: Callable, *legal: tuple[Placement, ...]) -> Any:
    rule = VIEW_RULES[function]
    case = Case(function.__name__, call, lambda p: rule(*p.values()), tensors, {}, frozenset(legal))
    return pytest.param(case, id=function.__name__)


IDS = torch.tensor([3, 0, 23, 11, 7, 12])
POSITIONS = torch.tensor([0, 1, 2, 3, 0, 1])  # two requests, of 4 and 2 tokens
INV_FREQ = torch.tensor([1.0, 0.25], dtype=F64)
BATCH = {
    "query_lens": torch.tensor([4, 2, 0, 0, 0, 0]),  # six requests, so that a split by requests is a possible cut
    "kv_lens": torch.tensor([4, 2, 0, 0, 0, 0]),
    "block_table": torch.tensor([[1, 2], [0, -1], [-1, -1], [-1, -1], [-1, -1], [-1, -1]]).repeat(1, 3),
}
SLOTS = torch.tensor([2, 3, 4, 5, 0, 1])  # block size 2: the table above, position by position
TOPK_IDS = torch.tensor([[0, -1], [1, 0], [0, 2], [3, 1], [0, -1], [0, 1]], dtype=torch.int32).repeat(1, 3)
TOPK_IDS[:, 2:] = -1
CACHE = floats(6, 6)
LOGITS_MASK = torch.tensor([True, True, False, True, True, False])

CASES = [
    vocabulary_case(
        "linear",
        {"x": floats(T, IN), "weight": floats(OUT, IN)},
        (R, R), (LOCAL, R), (R, COLUMN), (HEADS, ROW),
    ),
    vocabulary_case(
        "linear",
        {"x": floats(T, IN), "weight": floats(OUT, IN), "bias": floats(OUT)},
        (R, R, R), (LOCAL, R, R), (R, COLUMN, Shard(0)), (HEADS, ROW, PARTIAL),
        case_id="linear-bias",
    ),
    vocabulary_case(
        "lm_head",
        {"x": floats(T, IN), "weight": floats(OUT, IN)},
        (R, R), (LOCAL, R), (R, COLUMN),
    ),
    vocabulary_case(
        "embedding",
        {"ids": IDS, "weight": floats(VOCAB, WIDTH)},
        (R, R), (LOCAL, R), (R, COLUMN),
    ),
    vocabulary_case("rms_norm", {"x": floats(T, WIDTH), "weight": floats(WIDTH)}, (R, R), (LOCAL, R), eps=1e-3),
    vocabulary_case(
        "add_rms_norm",
        {"x": floats(T, WIDTH), "residual": floats(T, WIDTH, seed=1), "weight": floats(WIDTH)},
        (R, R, R), (LOCAL, LOCAL, R),
        eps=1e-3,
    ),
    vocabulary_case(
        "add_rms_norm2",
        {"x": floats(T, WIDTH), "residual": floats(T, WIDTH, seed=1), "weight": floats(WIDTH)},
        (R, R, R), (LOCAL, LOCAL, R),
        eps=1e-3,
    ),
    vocabulary_case(
        "rope",
        {"x": floats(T, N, 6), "positions": POSITIONS, "inv_freq": INV_FREQ},
        (R, R, R), (LOCAL, LOCAL, R), (HEADS, R, R),
        case_id="rope-heads", start=2, interleaved=True, scaling=1.5,
    ),
    vocabulary_case(
        "add",
        {"x": floats(T, WIDTH), "y": floats(T, WIDTH, seed=1)},
        (R, R), (LOCAL, LOCAL), (PARTIAL, PARTIAL),
    ),
    vocabulary_case(
        "swiglu",
        {"gate": floats(T, IN), "up": floats(T, IN, seed=1)},
        (R, R), (LOCAL, LOCAL), (Shard(1), Shard(1)),
    ),
    vocabulary_case("swiglu", {"gate": floats(T, IN)}, (R,), (LOCAL,), case_id="swiglu-packed"),
    vocabulary_case(
        "cache_write",
        {"cache": CACHE, "rows": floats(T, 12), "slots": SLOTS},
        (R, R, R),
        start=3,
    ),
    vocabulary_case(
        "moe_gate",
        {"x": floats(T, WIDTH), "weight": floats(EXPERTS, WIDTH)},
        (R, R), (LOCAL, R),
    ),
    vocabulary_case(
        "moe_topk",
        {"logits": floats(T, EXPERTS), "bias": floats(EXPERTS) * 0.1, "token_mask": LOGITS_MASK},
        (R, R, R), (LOCAL, R, LOCAL),
        k=TOPK, n_group=3, topk_group=2, normalise=True, scale=2.5,
    ),
    vocabulary_case("mla_absorb", {"weight": floats(N * 5, WIDTH)}, (R,), (COLUMN,), nope=3, value=2),
    vocabulary_case(
        "mla_sparse_attention",
        {
            "q": floats(T, N, 6), "cache": CACHE, "w_uk_t": floats(N, 4, 4), "w_uv": floats(N, 4, 6),
            "ids": TOPK_IDS, **BATCH,
        },
        (R,) * 8, (HEADS, R, Shard(0), Shard(0), R, R, R, R), (LOCAL, R, R, R, LOCAL, LOCAL, LOCAL, R),
        block_size=2, scale=0.7,
    ),
    vocabulary_case(
        "multihead_latent_attention",
        {"q": floats(T, N, 6), "cache": CACHE, "w_uk_t": floats(N, 4, 4), "w_uv": floats(N, 4, 6), **BATCH},
        (R,) * 7, (HEADS, R, Shard(0), Shard(0), R, R, R), (LOCAL, R, R, R, LOCAL, LOCAL, R),
        block_size=2, scale=0.7,
    ),
    vocabulary_case(
        "dsa_indexer_key",
        {
            "x": floats(T, IN), "wk": floats(6, IN), "norm_weight": floats(6), "norm_bias": floats(6, seed=1),
            "positions": POSITIONS, "inv_freq": INV_FREQ,
        },
        (R,) * 6, (LOCAL, R, R, R, LOCAL, R),
        eps=1e-6, interleaved=False, scaling=1.0,
    ),
    vocabulary_case(
        "dsa_indexer_topk",
        {
            "q_resid": floats(T, IN), "x": floats(T, IN, seed=1), "wq_b": floats(N * 6, IN),
            "weights_proj": floats(N, IN), "index_cache": CACHE, "positions": POSITIONS, "inv_freq": INV_FREQ, **BATCH,
        },
        (R,) * 10, (LOCAL, LOCAL, R, R, R, LOCAL, R, LOCAL, LOCAL, R),
        block_size=2, topk=2, interleaved=False, scaling=1.0,
    ),
    view_case(
        torch.unflatten,
        {"x": floats(T, N * 4)},
        lambda x: torch.unflatten(x, -1, (-1, 4)),
        (R,), (LOCAL,), (HEADS,),
    ),
    view_case(torch.flatten, {"x": floats(T, N, 6)}, lambda x: torch.flatten(x, 1), (R,), (LOCAL,), (HEADS,)),
    view_case(
        torch.cat,
        {"a": floats(T, 6), "b": floats(T, 12)},
        lambda a, b: torch.cat((a, b), -1),
        (R, R), (LOCAL, LOCAL),
    ),
    view_case(torch.split, {"x": floats(T, 18)}, lambda x: torch.split(x, [12, 6], -1), (R,), (LOCAL,)),
]  # fmt: skip

# Rows sorted by expert are not a plain cut of dim 0 (each rank sorts its own), so these have their own tests below.
DISPATCHED = {"moe_dispatch", "grouped_matmul", "moe_combine"}


def test_every_op_with_a_rule_is_simulated() -> None:
    simulated = {param.values[0].name for param in CASES}
    assert simulated | DISPATCHED == set(OPS) | {f.__name__ for f in VIEW_RULES}


@pytest.mark.parametrize("case", CASES)
def test_rule_accepts_only_what_comes_out_whole(case: Case) -> None:
    found = set()
    for placements, promised in case.accepted():
        found.add(tuple(placements.values()))
        for size in (2, 3):
            try:
                simulate(case, placements, promised, size)
            except Exception as error:
                pytest.fail(f"{case.name} on {size} ranks accepts {placements} -> {promised}, but: {error}")
    assert case.legal <= found, f"{case.name} refuses {case.legal - found}"


UNSOUND = [
    # (case id, placements, what a wrong rule would promise)
    ("linear", (LOCAL, COLUMN), Shard(1)),
    ("linear", (LOCAL, ROW), LOCAL),
    ("linear-bias", (HEADS, ROW, R), PARTIAL),  # bias tp times
    ("linear-bias", (R, COLUMN, R), Shard(1)),
    ("rms_norm", (PARTIAL, R), PARTIAL),
    ("rms_norm", (Shard(1), Shard(0)), Shard(1)),
    ("swiglu", (PARTIAL, PARTIAL), PARTIAL),
    ("swiglu-packed", (Shard(1),), Shard(1)),
    ("rope-heads", (LOCAL, R, R), LOCAL),
    ("cache_write", (R, LOCAL, LOCAL), R),
    ("embedding", (R, COLUMN), R),
    ("mla_sparse_attention", (LOCAL, R, R, R, LOCAL, R, R, R), LOCAL),
    ("multihead_latent_attention", (LOCAL, R, R, R, R, R, R), LOCAL),
    ("multihead_latent_attention", (HEADS, R, R, R, R, R, R), HEADS),
    ("split", (Shard(1),), (Shard(1), Shard(1))),
    ("cat", (Shard(1), Shard(1)), Shard(1)),
]


@pytest.mark.parametrize(("case_id", "given", "claim"), UNSOUND, ids=[f"{c}-{g}" for c, g, _ in UNSOUND])
def test_simulation_can_tell_an_unsound_rule(case_id: str, given: tuple[Placement, ...], claim: Any) -> None:
    case = next(p.values[0] for p in CASES if p.id == case_id)
    promised = claim if isinstance(claim, tuple) else (claim,)
    with pytest.raises((AssertionError, RuntimeError, IndexError)):
        simulate(case, dict(zip(case.tensors, given)), promised, 2)


ATTENTION = ("q", "cache", "w_uk_t", "w_uv", "ids", "query_lens", "kv_lens", "block_table")
INDEXER = (
    "q_resid", "x", "wq_b", "weights_proj", "index_cache", "positions", "inv_freq", "query_lens", "kv_lens",
    "block_table",
)  # fmt: skip


def names(op: str, *placements: Placement) -> dict[str, Placement]:
    return dict(zip(OPS[op].argument_names, placements))


PROMISED = [
    ("linear", names("linear", LOCAL, R), LOCAL),
    ("linear", names("linear", R, COLUMN), Shard(1)),
    ("linear", names("linear", Shard(1), ROW), PARTIAL),
    ("lm_head", names("lm_head", R, COLUMN), Shard(1)),
    ("embedding", names("embedding", R, COLUMN), PARTIAL),
    ("add_rms_norm2", names("add_rms_norm2", LOCAL, LOCAL, R), (LOCAL, LOCAL)),
    ("rope", names("rope", HEADS, R, R), HEADS),
    ("mla_absorb", {"weight": COLUMN}, (Shard(0), Shard(0))),
    ("mla_sparse_attention", {k: R for k in ATTENTION}, R),
    (
        "mla_sparse_attention",
        {**{k: R for k in ATTENTION}, "q": HEADS, "w_uk_t": Shard(0), "w_uv": Shard(0)},
        HEADS,
    ),
    ("multihead_latent_attention", names("multihead_latent_attention", *[R] * 7), R),
    ("multihead_latent_attention", names("multihead_latent_attention", HEADS, R, Shard(0), Shard(0), R, R, R), HEADS),
    ("dsa_indexer_topk", {k: R for k in INDEXER}, R),
    ("moe_topk", {"logits": LOCAL, "bias": R, "token_mask": LOCAL}, (LOCAL, LOCAL)),
]


@pytest.mark.parametrize(("op", "given", "promised"), PROMISED, ids=lambda v: str(v) if isinstance(v, str) else "")
def test_sound_layouts_of_the_design_are_accepted(op: str, given: dict[str, Placement], promised: Any) -> None:
    assert OPS[op].rule(**given) == promised


REFUSED = [
    ("local rows x column shard", "linear", names("linear", LOCAL, COLUMN)),
    ("local rows x row shard", "linear", names("linear", LOCAL, ROW)),
    ("partial sums x whole weight, then a bias", "linear", names("linear", PARTIAL, R, R)),
    ("bias counted tp times", "linear", names("linear", Shard(1), ROW, R)),
    ("whole bias on a feature shard", "linear", names("linear", R, COLUMN, R)),
    ("norm of partial sums", "rms_norm", names("rms_norm", PARTIAL, R)),
    ("norm of feature shards", "rms_norm", names("rms_norm", Shard(1), R)),
    ("full hidden, local residual", "add_rms_norm2", names("add_rms_norm2", R, LOCAL, R)),
    ("local hidden, full residual", "add_rms_norm2", names("add_rms_norm2", LOCAL, R, R)),
    ("partial hidden, local residual", "add_rms_norm2", names("add_rms_norm2", PARTIAL, LOCAL, R)),
    ("final norm of full and local", "add_rms_norm", names("add_rms_norm", R, LOCAL, R)),
    ("swiglu of partial sums", "swiglu", names("swiglu", PARTIAL, PARTIAL)),
    ("swiglu of packed feature shards", "swiglu", names("swiglu", Shard(1))),
    ("cache_write of local rows", "cache_write", names("cache_write", R, LOCAL, LOCAL)),
    ("cache_write of local rows at full slots", "cache_write", names("cache_write", R, LOCAL, R)),
    ("rope of local rows with full positions", "rope", names("rope", LOCAL, R, R)),
    ("rope of full rows with local positions", "rope", names("rope", R, LOCAL, R)),
    ("local queries, full ids", "mla_sparse_attention", {**{k: R for k in ATTENTION}, "q": LOCAL}),
    ("local queries, local ids", "mla_sparse_attention", {**{k: R for k in ATTENTION}, "q": LOCAL, "ids": LOCAL}),
    ("head shard, whole derived weights", "mla_sparse_attention", {**{k: R for k in ATTENTION}, "q": HEADS}),
    ("local queries of dense attention, full lengths", "multihead_latent_attention",
     names("multihead_latent_attention", LOCAL, R, R, R, R, R, R)),
    ("dense attention, head shard, whole derived weights", "multihead_latent_attention",
     names("multihead_latent_attention", HEADS, R, R, R, R, R, R)),
    ("indexer on local hidden", "dsa_indexer_topk", {**{k: R for k in INDEXER}, "x": LOCAL, "q_resid": LOCAL}),
    ("index keys of local rows at full positions", "dsa_indexer_key",
     names("dsa_indexer_key", LOCAL, R, R, R, R, R)),
    ("routing of local rows with a full mask", "moe_topk", {"logits": LOCAL, "bias": R, "token_mask": R}),
    ("dispatch of local rows by full ids", "moe_dispatch", names("moe_dispatch", LOCAL, R)),
    ("all experts' rows on a shard of experts", "grouped_matmul", names("grouped_matmul", R, Shard(0), R)),
    ("combine of local rows in full order", "moe_combine", names("moe_combine", LOCAL, R, LOCAL)),
    ("local + partial", "add", names("add", LOCAL, PARTIAL)),
    ("full + local", "add", names("add", R, LOCAL)),
    ("kv_b_proj split inside heads", "mla_absorb", {"weight": Shard(1)}),
]  # fmt: skip


@pytest.mark.parametrize(("op", "given"), [r[1:] for r in REFUSED], ids=[r[0] for r in REFUSED])
def test_unsound_layouts_of_the_design_are_refused(op: str, given: dict[str, Placement]) -> None:
    with pytest.raises(Illegal) as caught:
        OPS[op].rule(**given)
    assert caught.value.reason
    assert caught.value.allowed


def test_local_and_partial_on_one_axis_is_named_for_what_it_is() -> None:
    # DESIGN section 4: the RFC's literal row. Refused, but a way on is offered for runs without the static check
    with pytest.raises(Illegal) as up:
        OPS["linear"].rule(x=LOCAL, weight=COLUMN)
    assert up.value.fallback == Mixed(Shard(1))
    assert OPS["linear"].rule(x=Mixed(Shard(1)), weight=ROW) == Mixed(PARTIAL)
    assert OPS["swiglu"].rule(gate=Mixed(Shard(1)), up=Mixed(Shard(1))) == Mixed(Shard(1))


def test_a_refusal_is_never_a_crash() -> None:
    # a value may be sharded in a dim that an op does not expect: that has to be Illegal, which names the module
    with pytest.raises(Illegal):
        OPS["swiglu"].rule(gate=Shard(2), up=Shard(2))


# --- dispatched rows -------------------------------------------------------------------------------------------------

GROUPED_SOUND = {
    (R, R, R),  # whole rows, whole experts
    (LOCAL, R, LOCAL),  # each rank's own rows, whole experts (token-rows)
    (LOCAL, Shard(0), LOCAL),  # each rank's experts and the rows sent to them (expert-rows)
}


def test_grouped_matmul_accepts_exactly_the_sound_layouts() -> None:
    accepted = set()
    activations = [R, PARTIAL, Shard(0), Shard(1)]
    for rows, weight, counts in itertools.product(activations, [R, PARTIAL, Shard(0), Shard(1), Shard(2)], activations):
        try:
            OPS["grouped_matmul"].rule(rows=rows, weight=weight, counts=counts)
        except Illegal:
            continue
        accepted.add((rows, weight, counts))
    assert accepted == GROUPED_SOUND


@pytest.mark.parametrize("op", ["moe_dispatch", "moe_combine"])
def test_routing_of_rows_accepts_only_one_common_layout(op: str) -> None:
    arguments = {"moe_dispatch": ("x", "ids"), "moe_combine": ("rows", "order", "weights")}[op]
    for given in itertools.product([R, PARTIAL, Shard(0), Shard(1)], repeat=len(arguments)):
        if op == "moe_combine" and given == (LOCAL, LOCAL, R):  # each rank sums its own experts' rows of all tokens
            assert OPS[op].rule(*given) == PARTIAL
        elif set(given) in ({R}, {LOCAL}):
            OPS[op].rule(**dict(zip(arguments, given)))
        else:
            with pytest.raises(Illegal):
                OPS[op].rule(**dict(zip(arguments, given)))


@dataclass(frozen=True)
class Routed:
    """x [T, D], expert ids and weights [T, k], expert weights [E, O, D]; some tokens are padding (ids -1)."""

    x: Tensor
    ids: Tensor
    weights: Tensor
    experts: Tensor

    def naive(self) -> Tensor:
        output = torch.zeros(len(self.x), self.experts.shape[1], dtype=F64)
        for t, (ids, weights) in enumerate(zip(self.ids.tolist(), self.weights.tolist())):
            for expert, weight in zip(ids, weights):
                if expert >= 0:
                    output[t] += weight * (self.experts[expert] @ self.x[t])
        return output


@pytest.fixture
def routed() -> Routed:
    ids = torch.tensor([[5, 0], [1, 4], [0, 5], [-1, -1], [3, 2], [5, 1]])
    return Routed(floats(T, WIDTH), ids, floats(T, TOPK).abs(), floats(EXPERTS, 4, WIDTH))


def test_dispatch_and_combine_on_whole_rows_equal_a_loop(routed: Routed) -> None:
    ops = torch.ops.emulator
    rows, counts, order = ops.moe_dispatch(routed.x, routed.ids, EXPERTS)
    assert counts.tolist() == [[2, 2, 1, 1, 1, 3]]  # counted by hand from the ids above
    assert order.tolist() == [1, 4, 2, 11, 9, 8, 3, 0, 5, 10]  # flat index t * 2 + j, by expert, stable
    torch.testing.assert_close(rows, routed.x[order // 2], rtol=0, atol=0)
    result = ops.moe_combine(ops.grouped_matmul(rows, routed.experts, counts), order, routed.weights)
    torch.testing.assert_close(result, routed.naive(), rtol=0, atol=1e-12)


@pytest.mark.parametrize("size", [2, 3])
def test_local_dispatch_with_whole_experts_makes_up_the_whole(routed: Routed, size: int) -> None:
    ops = torch.ops.emulator
    results = []
    for x, ids, weights in zip(routed.x.chunk(size), routed.ids.chunk(size), routed.weights.chunk(size)):
        rows, counts, order = ops.moe_dispatch(x, ids, EXPERTS)
        results.append(ops.moe_combine(ops.grouped_matmul(rows, routed.experts, counts), order, weights))
    torch.testing.assert_close(torch.cat(results), routed.naive(), rtol=0, atol=1e-12)


@pytest.mark.parametrize("size", [2, 3])
def test_rows_exchanged_between_experts_make_up_the_whole(routed: Routed, size: int) -> None:
    # token-rows -> expert-rows -> token-rows: each rank applies its block of experts to what all ranks send it
    ops, held = torch.ops.emulator, EXPERTS // size
    shards = zip(routed.x.chunk(size), routed.ids.chunk(size))
    sent = [ops.moe_dispatch(x, ids, EXPERTS) for x, ids in shards]
    splits = [counts.view(size, held).sum(1).tolist() for _, counts, _ in sent]  # [source][destination] rows
    pieces = [list(rows.split(split)) for (rows, _, _), split in zip(sent, splits)]
    returned: list[list[Tensor]] = [[] for _ in range(size)]
    for rank, experts in enumerate(routed.experts.chunk(size)):
        received = torch.cat([pieces[source][rank] for source in range(size)])
        counts = torch.cat([c[:, rank * held : (rank + 1) * held] for _, c, _ in sent])
        output = ops.grouped_matmul(received, experts, counts)
        for source, back in enumerate(output.split([splits[s][rank] for s in range(size)])):
            returned[source].append(back)
    results = [
        ops.moe_combine(torch.cat(rows), order, weights)
        for rows, (_, _, order), weights in zip(returned, sent, routed.weights.chunk(size))
    ]
    torch.testing.assert_close(torch.cat(results), routed.naive(), rtol=0, atol=1e-12)


def test_op_names_tell_vocabulary_from_plain_functions() -> None:
    assert op_name(torch.ops.emulator.linear) == "linear"
    assert op_name(torch.cat) is None
