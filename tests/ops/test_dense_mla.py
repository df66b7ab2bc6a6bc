"""Dense MLA kernel against a per-row, per-head loop that expands keys and values one at a time."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from emulator.ops import dense_mla
from emulator.ops.mla_kernel import sparse_attention

from .test_mla_kernel import shuffled_cache

N, n, r, R, v = 3, 6, 4, 10, 5
SCALE, BLOCK = 0.3, 4


class Batch:
    """Random ragged batch in float64: every cache row that no request wrote is NaN."""

    def __init__(self, query_lens: list[int], kv_lens: list[int], padding: int = 0) -> None:
        generator = torch.Generator().manual_seed(0)
        self.query_lens, self.kv_lens = query_lens, kv_lens
        self.block_table, self.cache = shuffled_cache(kv_lens, BLOCK, R + r, generator)

        def floats(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float64)

        self.q = floats(sum(query_lens) + padding, N, n + r)
        self.w_uk, self.w_uv = floats(N, n, R) / math.sqrt(R), floats(N, R, v) / math.sqrt(R)

    def run(self, dtype: torch.dtype = torch.float64) -> Tensor:
        return torch.ops.emulator.multihead_latent_attention(
            *(t.to(dtype) for t in (self.q, self.cache, self.w_uk, self.w_uv)),
            torch.tensor(self.query_lens), torch.tensor(self.kv_lens), self.block_table, BLOCK, SCALE,
        )  # fmt: skip

    def expected(self) -> Tensor:
        out = torch.full((len(self.q), N, v), float("nan"), dtype=torch.float64)
        row = 0
        for request, (rows, kv_len) in enumerate(zip(self.query_lens, self.kv_lens)):
            for j in range(rows):
                slots = [
                    int(self.block_table[request, t // BLOCK]) * BLOCK + t % BLOCK for t in range(kv_len - rows + j + 1)
                ]
                for h in range(N):
                    total, output = 0.0, torch.zeros(v, dtype=torch.float64)
                    for slot in slots:
                        latent, k_pe = self.cache[slot, :R], self.cache[slot, R:]
                        key = torch.cat((self.w_uk[h] @ latent, k_pe))
                        weight = math.exp(SCALE * float(self.q[row, h] @ key))
                        total, output = total + weight, output + weight * (latent @ self.w_uv[h])
                    out[row, h] = output / total if slots else output
                row += 1
        return out


def check(batch: Batch) -> None:
    torch.testing.assert_close(batch.run(), batch.expected(), atol=1e-12, rtol=0, equal_nan=True)


def test_ragged_batch_with_context_and_padding() -> None:
    batch = Batch([5, 3, 0, 1], [5, 13, 9, 101], padding=4)
    check(batch)
    assert batch.run()[9:].isnan().all()
    assert not batch.run()[:9].isnan().any()


def test_rows_that_see_no_key_are_zero() -> None:
    batch = Batch([4, 2, 1], [2, 0, 3])
    check(batch)
    assert [bool(row.any()) for row in batch.run()] == [False, False, True, True, False, False, True]


def test_a_batch_of_decodes() -> None:
    check(Batch([1] * 9, list(range(10, 19))))


def test_no_rows() -> None:
    assert Batch([0, 0], [1, 9]).run().shape == (0, N, v)


@pytest.mark.parametrize(("chunk_rows", "score_bytes"), [(7, 8 << 20), (128, 5 * N * 50 * 8), (128, 1)])
def test_many_chunks(chunk_rows: int, score_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are split with uneven remainders, by count, by the size of their scores, and one by one."""
    monkeypatch.setattr(dense_mla, "_CHUNK_ROWS", chunk_rows)
    monkeypatch.setattr(dense_mla, "_SCORE_BYTES", score_bytes)
    check(Batch([31, 1, 24], [31, 50, 67], padding=1))


class _LargestValue(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        sizes = [t.numel() * t.itemsize for t in tree_leaves(result) if isinstance(t, Tensor)]
        self.bytes = max([self.bytes, *sizes])
        return result


def test_memory_grows_with_the_tokens_not_their_square(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dense_mla, "_SCORE_BYTES", 1 << 16)
    largest = []
    for tokens in (256, 1024):
        batch = Batch([tokens], [tokens])
        arguments = (batch.q, batch.cache, batch.w_uk, batch.w_uv, torch.tensor([tokens]), torch.tensor([tokens]))
        with _LargestValue() as watch:  # the kernel itself: the mode would see the op as one call
            dense_mla._attention(*arguments, batch.block_table, BLOCK, SCALE)
        largest.append(watch.bytes)
    assert largest[0] <= 1 << 16  # a chunk of scores
    assert largest[1] == 1024 * N * v * 8  # the output: a chunk's scores are no larger than before


def test_equals_sparse_attention_that_selects_every_key() -> None:
    batch = Batch([40, 3], [57, 20], padding=2)
    ids = torch.arange(57, dtype=torch.int32).expand(len(batch.q), 57)
    lens, keys = torch.tensor(batch.query_lens), torch.tensor(batch.kv_lens)
    sparse = sparse_attention(
        batch.q, batch.cache, batch.w_uk, batch.w_uv, ids, lens, keys, batch.block_table, block_size=BLOCK, scale=SCALE
    )
    torch.testing.assert_close(batch.run(), sparse, atol=1e-13, rtol=0, equal_nan=True)


@pytest.mark.parametrize(("dtype", "atol"), [(torch.float32, 2e-6), (torch.bfloat16, 3e-2)])
def test_narrow_dtypes(dtype: torch.dtype, atol: float) -> None:
    batch = Batch([5, 3, 1], [5, 13, 101], padding=2)
    out = batch.run(dtype)
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), batch.expected(), atol=atol, rtol=0, equal_nan=True)


def test_bfloat16_is_rounded_only_once() -> None:
    """Inputs exact in bfloat16 give the float64 result rounded to bfloat16: arithmetic inside is wider."""
    batch = Batch([4, 2], [9, 30])
    for name in ("q", "cache", "w_uk", "w_uv"):
        setattr(batch, name, getattr(batch, name).bfloat16().double())
    torch.testing.assert_close(batch.run(torch.bfloat16).double(), batch.expected(), atol=1e-6, rtol=2**-8)


def test_int8_scores_are_products_of_codes():
    """One query that sees two keys, by hand: n = r = R = 1, so that the absorbed query is [w_uk q_nope, q_pe]."""
    q, cache = torch.tensor([[[2.0, 127.0]]]), torch.tensor([[254.0, 3.1], [0.6, 1.0]])
    w_uk, w_uv = torch.full((1, 1, 1), 3.2), torch.full((1, 1, 1), 10.0)
    operands = [t.double() for t in (q, cache, w_uk, w_uv)]
    lens = (torch.tensor([1]), torch.tensor([2]), torch.tensor([[0]]), 2, 1e-4)
    found = torch.ops.emulator.multihead_latent_attention(*operands, *lens, True)
    # query 1e-4 * [6.4, 127]: scale 1e-4, codes [6, 127]
    # keys: scale 2, codes [127, 2 (1.55)]; scale 1/127, codes [76 (76.2), 127]
    scores = [1e-4 * 2 * (6 * 127 + 127 * 2), 1e-4 / 127 * (6 * 76 + 127 * 127)]
    weights = torch.softmax(torch.tensor(scores, dtype=torch.float64), 0)
    assert found.flatten().tolist() == pytest.approx([10 * float(weights @ torch.tensor([254.0, 76 / 127]).double())])


def test_int8_is_within_the_rounding_of_codes():
    batch = Batch([4, 3], [9, 3])
    operands = (batch.q, batch.cache, batch.w_uk, batch.w_uv, torch.tensor([4, 3]), torch.tensor([9, 3]))
    found = torch.ops.emulator.multihead_latent_attention(*operands, batch.block_table, BLOCK, SCALE, True)
    plain = batch.run()
    keys = batch.cache[batch.cache.isfinite().all(1)]
    query = torch.cat((torch.einsum("tna,nab->tnb", batch.q[..., :n], batch.w_uk), batch.q[..., n:]), -1) * SCALE
    # half a step each in a query (1/254 of its largest) and in a key; a score is off by at most `off` in all
    q_off, k_off = query.abs().amax(-1) / 254, float(keys.abs().max()) / 254
    k_sum = float(keys.abs().sum(1).max())
    off = float((q_off * k_sum + k_off * query.abs().sum(-1) + (R + r) * q_off * k_off).max())
    values = float((keys[:, :R].abs().max() + k_off) * batch.w_uv.abs().sum(1).max())
    bound = (math.exp(2 * off) - 1) * values + k_off * float(batch.w_uv.abs().sum(1).max())
    difference = float((found - plain).abs().max())
    assert 1e-4 < difference < bound
