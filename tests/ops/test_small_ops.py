"""Small ops against formulas written out here: norms, rope, swiglu, embedding, routing, absorbed weights, cache."""

import itertools
import math

import pytest
import torch
from torch import Tensor

import emulator.ops  # noqa: F401  (registers the vocabulary)

ops = torch.ops.emulator
F64 = torch.float64
NAN = float("nan")


def floats(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)), dtype=F64)


# --- norms -----------------------------------------------------------------------------------------------------------


def test_rms_norm_by_hand() -> None:
    # mean square of (3, 4) is 12.5; with eps 3.5 the root is 4
    y = ops.rms_norm(torch.tensor([[3.0, 4.0]], dtype=F64), torch.tensor([2.0, 10.0], dtype=F64), 3.5)
    assert y.tolist() == [[1.5, 10.0]]


def test_rms_norm_keeps_rows_apart_and_finite_at_zero() -> None:
    x = floats(5, 7)
    x[2] = 0
    y = ops.rms_norm(x, torch.ones(7, dtype=F64), 1e-6)
    assert y[2].tolist() == [0.0] * 7  # eps keeps 0 / 0 away
    for row, got in zip(x.tolist(), y):
        root = math.sqrt(sum(v * v for v in row) / 7 + 1e-6)
        torch.testing.assert_close(got, torch.tensor([v / root for v in row], dtype=F64), rtol=1e-14, atol=0)


def test_rms_norm_rounds_before_the_weight() -> None:
    # HF: weight * normed.to(dtype). Rounding once, after the product, gives another bfloat16 for some weights
    x = torch.tensor([[1.0, 1.0, 1.0, 0.0]], dtype=torch.bfloat16)
    wide = 1 / math.sqrt(0.75)
    separated = []
    for step in range(128):
        weight = torch.tensor(1 + step / 128, dtype=torch.bfloat16)
        early = torch.tensor(wide).bfloat16() * weight
        late = torch.tensor(wide * float(weight)).bfloat16()
        got = ops.rms_norm(x, weight.expand(4).contiguous(), 0.0)[0, 0]
        assert got == early
        separated.append(bool(early != late))
    assert any(separated)  # the two orders do differ somewhere, so this test can fail


def test_rms_norm_of_low_precision_is_computed_wide() -> None:
    # rounded once, at the end: squares, mean and root in bfloat16 would be off by several units in the last place
    x = floats(4, 64).bfloat16()
    wide = x.double()
    expected = (wide / wide.pow(2).mean(-1, keepdim=True).sqrt()).bfloat16()
    assert torch.equal(ops.rms_norm(x, torch.ones(64, dtype=torch.bfloat16), 0.0), expected)


def test_add_rms_norm_forms_agree() -> None:
    x, residual, weight = floats(4, 6), floats(4, 6, seed=1), floats(6)
    total = residual + x
    expected = total / (total.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight
    normed, new_residual = ops.add_rms_norm2(x, residual, weight, 1e-5)
    torch.testing.assert_close(normed, expected, rtol=1e-13, atol=1e-14)
    torch.testing.assert_close(new_residual, total, rtol=0, atol=0)
    torch.testing.assert_close(ops.add_rms_norm(x, residual, weight, 1e-5), expected, rtol=1e-13, atol=1e-14)


# --- rope ------------------------------------------------------------------------------------------------------------

FREQ = torch.tensor([1.0, 0.1, 0.01], dtype=F64)


def rotated(x: Tensor, positions: list[int], *, interleaved: bool, start: int = 0, scaling: float = 1.0) -> Tensor:
    return ops.rope(x, torch.tensor(positions), FREQ, start, interleaved, scaling)


def pairs_of(interleaved: bool) -> list[tuple[int, int]]:
    """Which two features turn together: neighbours, or one of each half."""
    return [(0, 1), (2, 3), (4, 5)] if interleaved else [(0, 3), (1, 4), (2, 5)]


@pytest.mark.parametrize("interleaved", [True, False])
def test_rope_turns_each_pair_by_its_angle(interleaved: bool) -> None:
    x = floats(1, 6)
    got = rotated(x, [7], interleaved=interleaved)[0]
    for i, (a, b) in enumerate(pairs_of(interleaved)):
        turned = complex(float(x[0, a]), float(x[0, b])) * complex(math.cos(7 * FREQ[i]), math.sin(7 * FREQ[i]))
        # both styles come out as [firsts | seconds]
        assert float(got[i]) == pytest.approx(turned.real, rel=1e-13, abs=1e-14)
        assert float(got[i + 3]) == pytest.approx(turned.imag, rel=1e-13, abs=1e-14)


@pytest.mark.parametrize("interleaved", [True, False])
def test_rope_keeps_the_norm_of_each_pair(interleaved: bool) -> None:
    x = floats(4, 6)
    got = rotated(x, [0, 3, 50, 1000], interleaved=interleaved)
    for i, (a, b) in enumerate(pairs_of(interleaved)):
        before, after = x[:, a] ** 2 + x[:, b] ** 2, got[:, i] ** 2 + got[:, i + 3] ** 2
        torch.testing.assert_close(after, before, rtol=1e-12, atol=0)


@pytest.mark.parametrize("interleaved", [True, False])
def test_dot_products_depend_on_the_distance_only(interleaved: bool) -> None:
    q, k = floats(1, 6).expand(3, 6), floats(1, 6, seed=1).expand(3, 6)
    near = rotated(q, [5, 105, 9], interleaved=interleaved) * rotated(k, [2, 102, 2], interleaved=interleaved)
    dots = near.sum(-1)
    assert float(dots[0]) == pytest.approx(float(dots[1]), rel=1e-12)  # distance 3 twice
    assert abs(float(dots[0]) - float(dots[2])) > 1e-3  # distance 7


def test_the_two_styles_pair_other_features() -> None:
    q, k = floats(1, 6), floats(1, 6, seed=1)
    dots = [
        float((rotated(q, [5], interleaved=style) * rotated(k, [2], interleaved=style)).sum())
        for style in (True, False)
    ]
    assert abs(dots[0] - dots[1]) > 1e-3


def test_rope_leaves_the_rest_of_the_head_alone_and_serves_all_heads() -> None:
    x = floats(2, 3, 10)
    got = rotated(x, [4, 11], interleaved=True, start=2, scaling=1.5)
    torch.testing.assert_close(got[..., :2], x[..., :2], rtol=0, atol=0)
    torch.testing.assert_close(got[..., 8:], x[..., 8:], rtol=0, atol=0)
    for head in range(3):
        alone = rotated(x[:, head, 2:8], [4, 11], interleaved=True) * 1.5  # scaling multiplies cos and sin
        torch.testing.assert_close(got[:, head, 2:8], alone, rtol=1e-13, atol=1e-14)


def test_rope_angles_are_not_taken_in_bfloat16() -> None:
    # position 1001 is no bfloat16 number (1000 is the nearest): a rounded position would turn by another angle
    x = torch.tensor([[1.0, 0.0]], dtype=torch.bfloat16)
    got = ops.rope(x, torch.tensor([1001]), torch.ones(1), 0, True, 1.0)
    assert got[0].tolist() == torch.tensor([math.cos(1001), math.sin(1001)]).bfloat16().tolist()


# --- elementwise, embedding, cache, pads -----------------------------------------------------------------------------


def test_swiglu_by_hand_and_packed() -> None:
    gate, up = floats(3, 4), floats(3, 4, seed=1)
    expected = torch.tensor(
        [[g / (1 + math.exp(-g)) * u for g, u in zip(gs, us)] for gs, us in zip(gate.tolist(), up.tolist())], dtype=F64
    )
    torch.testing.assert_close(ops.swiglu(gate, up), expected, rtol=1e-13, atol=1e-15)
    torch.testing.assert_close(ops.swiglu(torch.cat((gate, up), -1)), expected, rtol=1e-13, atol=1e-15)


def test_embedding_is_zero_outside_the_block() -> None:
    table, ids = floats(12, 3), torch.tensor([0, 3, 4, 7, 8, 11])
    block = ops.embedding(ids, table[4:8], 4)
    assert block[[0, 1, 4, 5]].abs().max() == 0
    torch.testing.assert_close(block[[2, 3]], table[[4, 7]], rtol=0, atol=0)
    shares = sum(ops.embedding(ids, table[lo : lo + 4], lo) for lo in (0, 4, 8))
    torch.testing.assert_close(shares, table[ids], rtol=0, atol=0)


def test_cache_write_puts_columns_into_slots() -> None:
    cache, rows = torch.full((6, 2), NAN, dtype=F64), floats(3, 5)
    result = ops.cache_write(cache, rows, torch.tensor([4, 0, 2]), 3)
    assert result.data_ptr() == cache.data_ptr()
    torch.testing.assert_close(cache[[4, 0, 2]], rows[:, 3:5], rtol=0, atol=0)
    assert cache[[1, 3, 5]].isnan().all()


def test_slot_minus_one_never_writes() -> None:
    # in torch an index of -1 is the last row (engine_layouts section 5, step 8): it holds a poison that must stay
    cache = torch.zeros(4, 2, dtype=F64)
    cache[3] = 777.0
    ops.cache_write(cache, floats(3, 2), torch.tensor([-1, 1, -1]), 0)
    assert cache[3].tolist() == [777.0, 777.0]
    assert cache[[0, 2]].abs().max() == 0
    assert cache[1].abs().min() > 0


@pytest.mark.parametrize(
    ("dtype", "is_pad"),
    [
        (torch.float64, lambda rows: bool(rows.isnan().all())),
        (torch.bfloat16, lambda rows: bool(rows.isnan().all())),
        (torch.int64, lambda rows: bool((rows == -1).all())),
        (torch.int32, lambda rows: bool((rows == -1).all())),
        (torch.bool, lambda rows: not rows.any()),
    ],
    ids=["float64", "bfloat16", "int64", "int32", "bool"],
)
def test_pad_rows_are_seen_when_they_leak(dtype: torch.dtype, is_pad) -> None:
    x = torch.ones(3, 2).to(dtype)
    padded = ops.pad(x, 0, 5)
    assert (padded.shape, padded.dtype) == ((5, 2), dtype)
    assert (padded[:3] == x).all()
    assert is_pad(padded[3:])
    assert (ops.unpad(padded, 0, 3) == x).all()


# --- mixture of experts ----------------------------------------------------------------------------------------------


def naive_topk(
    logits: Tensor, bias: Tensor, mask: list[bool], k: int, n_group: int, topk_group: int, normalise: bool, scale: float
) -> list[dict[int, float]]:
    """expert -> weight per row, by the text of the DeepSeek-V3 report: groups scored by their two best, then the k best
    biased scores of the groups kept; weights from the unbiased scores."""
    result = []
    for row, real in zip(logits.tolist(), mask):
        if not real:
            result.append({})
            continue
        scores = [1 / (1 + math.exp(-v)) for v in row]
        biased = [s + float(b) for s, b in zip(scores, bias)]
        width = len(row) // n_group
        groups = [list(range(g * width, (g + 1) * width)) for g in range(n_group)]
        ranked = sorted(groups, key=lambda g: -sum(sorted((biased[e] for e in g), reverse=True)[:2]))
        allowed = [e for g in ranked[:topk_group] for e in g]
        chosen = sorted(allowed, key=lambda e: -biased[e])[:k]
        total = sum(scores[e] for e in chosen) if normalise else 1.0
        result.append({e: scores[e] / total * scale for e in chosen})
    return result


@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize(("n_group", "topk_group"), [(1, 1), (6, 3), (6, 2), (2, 1)])
def test_routing_equals_a_loop(n_group: int, topk_group: int, normalise: bool) -> None:
    logits, bias = floats(20, 24), floats(24) * 0.5  # the bias is large, so that it changes choices
    mask = [t % 7 != 3 for t in range(20)]
    weights, ids = ops.moe_topk(logits, bias, torch.tensor(mask), 4, n_group, topk_group, normalise, 2.5)
    expected = naive_topk(logits, bias, mask, 4, n_group, topk_group, normalise, 2.5)
    unbiased = naive_topk(logits, torch.zeros(24), mask, 4, n_group, topk_group, normalise, 2.5)
    assert [set(e) for e in expected] != [set(u) for u in unbiased]
    for row, (real, want) in enumerate(zip(mask, expected)):
        if not real:
            assert ids[row].tolist() == [-1] * 4
            assert weights[row].tolist() == [0.0] * 4
            continue
        got = dict(zip(ids[row].tolist(), weights[row].tolist()))
        assert got == pytest.approx(want, rel=1e-12)


def test_grouped_routing_keeps_to_the_groups() -> None:
    # by hand: 3 groups of 2; the best single expert (0) sits in a group whose pair is weak
    logits = torch.tensor([[3.0, -9.0, 1.0, 1.1, 0.9, 0.8]], dtype=F64)
    _, ids = ops.moe_topk(logits, torch.zeros(6, dtype=F64), torch.ones(1, dtype=torch.bool), 2, 3, 1, True, 1.0)
    assert set(ids[0].tolist()) == {2, 3}


def test_routing_of_pad_rows_survives_poison() -> None:
    # a pad row holds NaN logits; nothing of it may come out
    logits = floats(3, 6)
    logits[1] = NAN
    weights, ids = ops.moe_topk(
        logits, torch.zeros(6, dtype=F64), torch.tensor([True, False, True]), 2, 3, 2, True, 1.0
    )
    assert ids[1].tolist() == [-1, -1]
    assert weights.isfinite().all()
    rows, counts, order = ops.moe_dispatch(floats(3, 4), ids, 6)
    assert (len(rows), int(counts.sum()), len(order)) == (4, 4, 4)
    combined = ops.moe_combine(rows, order, weights)
    assert combined[1].tolist() == [0.0] * 4
    assert combined.isfinite().all()


def test_gate_is_at_least_float32() -> None:
    # 256 + 1 in bfloat16 is 256: the logits must come from a wide product
    x = torch.tensor([[256.0, 1.0]], dtype=torch.bfloat16)
    logits = ops.moe_gate(x, torch.ones(1, 2, dtype=torch.bfloat16))
    assert logits.dtype == torch.float32
    assert logits.item() == 257.0


# --- absorbed weights ------------------------------------------------------------------------------------------------


def test_absorbed_weights_give_the_plain_products() -> None:
    # kv_b_proj [N * (nope + v), R]: keys = latent @ W^T per head (first nope rows), values = the other v rows
    N, nope, v, rank = 3, 4, 5, 7
    kv_b, latent, q = floats(N * (nope + v), rank), floats(6, rank), floats(6, N, nope)
    w_uk_t, w_uv = ops.mla_absorb(kv_b, nope, v)
    assert (tuple(w_uk_t.shape), tuple(w_uv.shape)) == ((N, nope, rank), (N, rank, v))
    plain = (latent @ kv_b.T).view(6, N, nope + v)
    for head, s, t in itertools.product(range(N), range(6), range(6)):
        logit = float(q[s, head] @ plain[t, head, :nope])
        assert float((q[s, head] @ w_uk_t[head]) @ latent[t]) == pytest.approx(logit, rel=1e-12, abs=1e-13)
    for head in range(N):
        torch.testing.assert_close(latent @ w_uv[head], plain[:, head, nope:], rtol=1e-12, atol=1e-13)
