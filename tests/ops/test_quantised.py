"""Quantised products: worked values, exact integer sums, and the distance from float products."""

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor.placement_types import Shard

import emulator.ops  # noqa: F401  (registers the vocabulary)
from emulator.ops import quantised
from emulator.ops.linear import linear_in_shards
from emulator.ops.quantised import dequantised, int4_linear, int_matmul, pack_int4, quantised_linear, unpack_int4
from emulator.ops.registry import LOCAL, OPS, PARTIAL, Illegal, R

ops = torch.ops.emulator
F64 = torch.float64


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)), dtype=F64)


def codes(*shape: int, largest: int = 127) -> Tensor:
    return torch.randint(-largest, largest + 1, shape, generator=torch.Generator().manual_seed(sum(shape))).to(
        torch.int8
    )


def column(*values: float, dtype: torch.dtype = F64) -> Tensor:
    return torch.tensor(values, dtype=dtype).unsqueeze(1)


def test_dynamic_by_hand():
    # row 0: scale 254/127 = 2, codes [127, -50, 0.5 -> 0, 1.5 -> 2]; row 1: scale 1, codes [3, 0, -127, 0]
    x = torch.tensor([[254.0, -100.0, 1.0, 3.0], [3.0, 0.0, -127.0, 0.4]], dtype=F64)
    weight = torch.tensor([[1, 2, 3, 4], [-1, 0, 5, 0], [0, 0, 0, 127]], dtype=torch.int8)
    scale, offset = column(0.5, 2.0, 0.25), column(0.0, 0.0, 0.0)
    sums = torch.tensor([[127 - 100 + 8, -127, 2 * 127], [3 - 381, -3 - 635, 0]], dtype=F64)
    expected = sums * torch.tensor([[2.0], [1.0]], dtype=F64) * scale.t()
    assert torch.equal(quantised_linear(x, weight, scale, offset), expected)
    # an offset of a channel takes offset * sum(codes) = 79 and -124 times the offset away
    moved = quantised_linear(x, weight, scale, column(0.0, 3.0, 0.0))
    assert torch.equal(moved - expected, torch.tensor([[0, -3 * 79 * 4.0, 0], [0, 3 * 124 * 2.0, 0]], dtype=F64))


def test_static_by_hand():
    # scale 0.5, offset -10: codes [2, -1, clipped 127, clipped -128] of [6.0, 4.6 -> 9, 90, -70]
    x = torch.tensor([[6.0, 4.6, 90.0, -70.0]], dtype=F64)
    weight = torch.tensor([[1, 1, 0, 0], [0, 0, 2, 1]], dtype=torch.int8)
    quant_bias = torch.tensor([10 * 2, 10 * 3], dtype=torch.int32)
    deq = torch.tensor([0.5 * 0.25, 0.5 * 4], dtype=torch.float32)
    y = quantised_linear(
        x, weight, column(0.25, 4.0), column(0, 0), torch.tensor([0.5]), torch.tensor([-10], dtype=torch.int8),
        quant_bias, deq,
    )  # fmt: skip
    assert y.tolist() == [[(2 - 1 + 20) * 0.125, (2 * 127 - 128 + 30) * 2.0]]


def test_integer_sums_are_exact_where_float32_is_not(monkeypatch):
    a, b = torch.full((3, 4096), -128, dtype=torch.int8), torch.full((5, 4096), 127, dtype=torch.int8)
    b[0, 0] = 126
    expected = torch.full((3, 5), -128 * 127 * 4096, dtype=torch.int32)
    expected[:, 0] += 128
    assert torch.equal(int_matmul(a, b), expected)
    monkeypatch.setattr(quantised, "_int_mm_is_exact", lambda: False)  # a CPU whose library saturates
    assert torch.equal(int_matmul(a, b), expected)


@pytest.mark.parametrize("rows", [0, 1, 7])
def test_any_number_of_rows(rows):
    y = quantised_linear(random(rows, 12), codes(5, 12), random(5, 1).abs(), torch.zeros(5, 1, dtype=F64))
    assert y.shape == (rows, 5)


def test_padding_stays_nan_and_zero_rows_stay_zero():
    x = random(4, 12)
    x[1], x[2] = float("nan"), 0.0
    dynamic = codes(5, 12), random(5, 1).abs(), torch.zeros(5, 1, dtype=F64)
    static = (
        *dynamic,
        torch.tensor([0.1]),
        torch.tensor([5], dtype=torch.int8),
        -5 * dynamic[0].sum(1).int(),
        torch.ones(5),
    )
    for y in (quantised_linear(x, *dynamic), quantised_linear(x, *static)):
        assert y[1].isnan().all()
        assert torch.equal(y[2], torch.zeros(5, dtype=F64))
        assert not y[[0, 3]].isnan().any()


def test_int4_pairs():
    values = torch.arange(-8, 8, dtype=torch.int8).view(2, 2, 4).repeat(1, 2, 1)
    assert pack_int4(torch.tensor([[-8], [7]], dtype=torch.int8)).tolist() == [[0x78]]
    assert pack_int4(torch.tensor([[7], [-1]], dtype=torch.int8)).tolist() == [[0xF7 - 256]]
    assert pack_int4(values).shape == (2, 2, 4)
    assert torch.equal(unpack_int4(pack_int4(values)), values)


def test_int4_is_the_product_of_the_unpacked_codes():
    x, weight = random(7, 12), codes(6, 12, largest=7)
    scale, offset = random(6, 1).abs().float(), torch.zeros(6, 1)
    parts = torch.stack([p.sum(1) for p in weight.double().tensor_split(5, 1)], 1)
    bias = (8 * parts * scale.double()).float()
    found = int4_linear(x, pack_int4(weight), scale, offset, bias)
    assert torch.allclose(found, quantised_linear(x, weight, scale.double(), offset.double()), rtol=0, atol=1e-4)
    assert not torch.allclose(found, int4_linear(x, pack_int4(weight), scale, offset, 0 * bias), rtol=0, atol=1e-2)


@pytest.mark.parametrize("num_shards", [1, 2, 4])
def test_shards_of_a_row_are_as_far_from_it_as_their_scales_say(num_shards):
    x, weight, scale = random(9, 24) * torch.arange(1, 25), codes(8, 24), random(8, 1).abs()
    operands = weight, None, scale, torch.zeros(8, 1, dtype=F64)
    whole, parts = linear_in_shards(1, x, *operands), linear_in_shards(num_shards, x, *operands)
    # every input is off by half a step of its own scale, in both
    steps = torch.cat([(p.abs().amax(1, keepdim=True) / 127).expand_as(p) for p in x.chunk(num_shards, 1)], 1)
    reach = dequantised(weight, scale, operands[3]).abs().t()
    bound = (x.abs().amax(1, keepdim=True) / 127).expand_as(x) / 2 @ reach + steps / 2 @ reach
    assert ((parts - whole).abs() <= bound).all()
    assert torch.equal(parts, whole) == (num_shards == 1)
    # static scales do not depend on the cut: the sums of the shards' codes are the whole row's
    bias = weight.sum(1).int()
    static = weight, scale, operands[3], torch.tensor([0.3]), torch.tensor([-1], dtype=torch.int8), bias, torch.ones(8)
    cut = [
        quantised_linear(a, b, *static[1:5], bias if not i else 0 * bias, static[6])
        for i, (a, b) in enumerate(zip(x.chunk(num_shards, 1), weight.chunk(num_shards, 1)))
    ]
    assert torch.equal(sum(cut[1:], cut[0]), quantised_linear(x, *static))


def test_grouped_experts_each_have_their_own_scales():
    rows, weight, scale = random(7, 12), codes(3, 6, 12), random(3, 6, 1).abs()
    offset, counts = torch.zeros_like(scale), torch.tensor([[2, 0, 1], [1, 3, 0]])
    expert = torch.tensor([0, 0, 2, 0, 1, 1, 1])
    found = ops.grouped_matmul(rows, weight, counts, scale, offset)
    for row, e, y in zip(rows, expert, found):
        assert torch.equal(y, quantised_linear(row[None], weight[e], scale[e], offset[e])[0])
    in_order = expert.argsort(stable=True)
    single = ops.grouped_matmul(rows[in_order], weight, counts.sum(0, keepdim=True), scale, offset)
    assert torch.equal(single, found[in_order])


def test_the_indexers_query_projection():
    def topk(wq_b: Tensor, *beside: Tensor) -> Tensor:
        lens = torch.tensor([6])
        return ops.dsa_indexer_topk(
            random(6, 12), random(6, 10), wq_b, random(2, 10), random(8, 4), torch.arange(6), torch.ones(2),
            lens, lens, torch.tensor([[0]]), 8, 2, True, 1.0, *beside,
        )  # fmt: skip

    weight, scale, offset = codes(8, 12), random(8, 1).abs(), torch.zeros(8, 1, dtype=F64)
    exact = topk(dequantised(weight, scale, offset)).sort(1).values
    assert torch.equal(topk(weight, scale, offset).sort(1).values, exact)
    wild = scale * torch.linspace(-1, 1, 8, dtype=F64).unsqueeze(1)
    assert not torch.equal(topk(weight, wild, offset).sort(1).values, exact)


# --- layouts ----------------------------------------------------------------------------------------------------------

SCALE, OFFSET, DEQ = "weight_scale", "weight_offset", "deq_scale"
WHOLE = dict.fromkeys((SCALE, OFFSET, "input_scale", "input_offset", "quant_bias", DEQ), R)
COLUMN = {**WHOLE, **dict.fromkeys((SCALE, OFFSET, "quant_bias", DEQ), Shard(0))}
ROW = {**WHOLE, "quant_bias": PARTIAL}


@pytest.mark.parametrize(
    ("x", "weight", "beside", "output"),
    [(R, R, WHOLE, R), (LOCAL, R, WHOLE, LOCAL), (R, Shard(0), COLUMN, Shard(1)), (Shard(1), Shard(1), ROW, PARTIAL)],
)
def test_scales_follow_their_weight(x, weight, beside, output):
    rule = OPS["linear"].rule
    assert rule(x=x, weight=weight, **beside) == output
    for name in beside:
        for other in {R, Shard(0), PARTIAL} - {beside[name]}:
            with pytest.raises(Illegal, match=name):
                rule(x=x, weight=weight, **{**beside, name: other})


def test_scales_stand_with_their_experts():
    rule = OPS["grouped_matmul"].rule
    experts = {"rows": LOCAL, "weight": Shard(0), "counts": LOCAL, SCALE: Shard(0), OFFSET: Shard(0)}
    assert rule(**experts) == LOCAL
    with pytest.raises(Illegal, match="another rank's experts"):
        rule(**{**experts, SCALE: R})
