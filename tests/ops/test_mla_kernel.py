"""Sparse MLA kernel against a per-row, per-head loop that expands keys and values one at a time."""

import math

import pytest
import torch
from torch import Tensor

from emulator.ops import mla_kernel
from emulator.ops.mla_kernel import sparse_attention
from emulator.ops.paged import physical_rows, request_rows, row_limits

NAN = float("nan")
N, n, r, R, v = 3, 6, 4, 10, 5
FORMS = [None, "gather", "expanded"]


class Batch:
    """Random ragged batch in float64: every cache row that no request wrote is NaN."""

    def __init__(self, query_lens: list[int], kv_lens: list[int], topk: int, padding: int = 0, seed: int = 0) -> None:
        gen = torch.Generator().manual_seed(seed)
        self.query_lens, self.kv_lens = query_lens, kv_lens
        self.block_size = 4
        self.block_table, self.cache = shuffled_cache(kv_lens, self.block_size, R + r, gen)
        rows = sum(query_lens) + padding
        self.q = torch.randn(rows, N, n + r, generator=gen, dtype=torch.float64)
        self.w_uk = torch.randn(N, n, R, generator=gen, dtype=torch.float64) / math.sqrt(R)
        self.w_uv = torch.randn(N, R, v, generator=gen, dtype=torch.float64) / math.sqrt(R)
        self.topk = torch.full((rows, topk), -1, dtype=torch.int32)
        for row, _, visible in self.rows():
            chosen = torch.randperm(max(visible, 0), generator=gen)[:topk].int()
            self.topk[row, : chosen.numel()] = chosen

    def rows(self) -> list[tuple[int, int, int]]:
        """(packed row, request, number of visible keys)"""
        result = []
        for request, (q, kv) in enumerate(zip(self.query_lens, self.kv_lens)):
            for j in range(q):
                result.append((len(result), request, kv - (q - 1 - j)))
        return result

    def run(self, dtype: torch.dtype = torch.float64, form: str | None = None) -> Tensor:
        return sparse_attention(
            *(t.to(dtype) for t in (self.q, self.cache, self.w_uk, self.w_uv)),
            self.topk,
            torch.tensor(self.query_lens),
            torch.tensor(self.kv_lens),
            self.block_table,
            block_size=self.block_size,
            scale=0.3,
            form=form,
        )

    def reference(self) -> Tensor:
        out = torch.full((self.q.shape[0], N, v), NAN, dtype=torch.float64)
        for row, request, visible in self.rows():
            chosen = [t for t in self.topk[row].tolist() if 0 <= t < visible]
            for h in range(N):
                weights, values = [], []
                for t in chosen:
                    slot = int(self.block_table[request, t // self.block_size]) * self.block_size + t % self.block_size
                    latent, k_pe = self.cache[slot, :R], self.cache[slot, R:]
                    logit = self.q[row, h, :n] @ (self.w_uk[h] @ latent) + self.q[row, h, n:] @ k_pe
                    weights.append(math.exp(0.3 * float(logit)))
                    values.append(latent @ self.w_uv[h])
                total = sum(weights)
                out[row, h] = sum((w / total * x for w, x in zip(weights, values)), torch.zeros(v, dtype=torch.float64))
        return out


def shuffled_cache(kv_lens: list[int], block_size: int, width: int, gen: torch.Generator) -> tuple[Tensor, Tensor]:
    """Blocks in random order with a spare one at the end; table entries past a request point at that NaN block."""
    blocks = [-(-kv // block_size) for kv in kv_lens]
    total = sum(blocks) + 3
    order = torch.randperm(total - 1, generator=gen).tolist()
    table = torch.full((len(kv_lens), max(blocks) + 2), total - 1, dtype=torch.int64)
    cache = torch.full((total * block_size, width), NAN, dtype=torch.float64)
    for request, kv in enumerate(kv_lens):
        for b in range(blocks[request]):
            table[request, b] = order.pop()
        for t in range(kv):
            slot = int(table[request, t // block_size]) * block_size + t % block_size
            cache[slot] = torch.randn(width, generator=gen, dtype=torch.float64)
    return table, cache


def check(batch: Batch, form: str | None) -> None:
    torch.testing.assert_close(batch.run(form=form), batch.reference(), atol=1e-12, rtol=0, equal_nan=True)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("topk", [1, 7, 200])
def test_ragged_batch_with_context_and_padding(form: str | None, topk: int) -> None:
    batch = Batch([5, 3, 0, 1], [5, 13, 9, 101], topk, padding=4)
    check(batch, form)
    assert batch.run(form=form)[9:].isnan().all()
    assert not batch.run(form=form)[:9].isnan().any()


@pytest.mark.parametrize("form", FORMS)
def test_ids_that_select_nothing(form: str | None) -> None:
    """-1 anywhere in the row, ids in the future, rows without ids, rows without visible keys, an empty request."""
    batch = Batch([6, 4, 2], [11, 2, 0], 5)
    gen = torch.Generator().manual_seed(1)
    for row, _, visible in batch.rows():
        candidates = torch.randperm(visible + 3, generator=gen) if visible > 0 else torch.arange(5)
        batch.topk[row] = -1
        keep = candidates[:3].int()
        batch.topk[row, [1, 2, 4]] = torch.cat((keep, torch.full((3 - keep.numel(),), -1, dtype=torch.int32)))
    batch.topk[3] = -1
    batch.topk[4] = torch.tensor([50, 1 << 30, -7, 11, -1])
    out = batch.run(form=form)
    check(batch, form)
    blind = [row for row, _, visible in batch.rows() if visible <= 0]
    assert blind == [6, 7, 10, 11]
    assert not out[[3, 4, *blind]].any()


@pytest.mark.parametrize("form", FORMS)
def test_subset_of_few_visible_keys_is_respected(form: str | None) -> None:
    """Fewer visible keys than K does not mean all of them are selected."""
    batch = Batch([9], [9], 16)
    for row, _, visible in batch.rows():
        batch.topk[row] = -1
        odd = torch.arange(visible - 1, -1, -2, dtype=torch.int32)
        batch.topk[row, 16 - odd.numel() :] = odd
    check(batch, form)


@pytest.mark.parametrize("form", FORMS)
def test_order_of_ids_does_not_matter(form: str | None) -> None:
    batch = Batch([12, 3], [20, 40], 9)
    first = batch.run(form=form)
    batch.topk = batch.topk[:, torch.randperm(9, generator=torch.Generator().manual_seed(2))].long()
    torch.testing.assert_close(batch.run(form=form), first, atol=1e-13, rtol=0)


@pytest.mark.parametrize("form", FORMS)
def test_many_chunks(form: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Budgets so small that rows, keys and heads are all split, with uneven remainders."""
    monkeypatch.setattr(mla_kernel, "_CHUNK_ROWS", 7)
    monkeypatch.setattr(mla_kernel, "_KEY_TILE", 5)
    monkeypatch.setattr(mla_kernel, "_GATHER_BYTES", 3 * 6 * (R + r) * 8)  # 3 rows of 6 ids
    monkeypatch.setattr(mla_kernel, "_ABSORB_BYTES", 8 * N * (R + r) * 8)  # 8 rows
    monkeypatch.setattr(mla_kernel, "_EXPAND_BYTES", 2 * 67 * (n + r + v) * 8)  # 2 of 3 heads of the longest request
    check(Batch([31, 1, 1, 24], [31, 50, 3, 67], 6, padding=1), form)


def test_more_rows_than_a_default_chunk() -> None:
    batch = Batch([mla_kernel._CHUNK_ROWS + 5], [mla_kernel._CHUNK_ROWS + 9], 6)
    reference = batch.reference()
    for form in FORMS:
        torch.testing.assert_close(batch.run(form=form), reference, atol=1e-12, rtol=0)


def test_cost_estimate_splits_a_long_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """The automatic choice expands for the early rows, gathers for the late ones, and both parts are right."""
    monkeypatch.setattr(mla_kernel, "_CHUNK_ROWS", 8)
    dims = mla_kernel._Dims(N=N, n=n, r=r, R=R, v=v, K=40, dtype=torch.float64)
    assert 0 < dims.expanded_rows(120, 0) < 120
    assert dims.expanded_rows(1, 5000) == 0  # decode never expands its whole context
    check(Batch([120, 1], [120, 30], 40), None)


def test_expansion_that_would_not_fit_is_not_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    dims = mla_kernel._Dims(N=N, n=n, r=r, R=R, v=v, K=4096, dtype=torch.float32)
    assert dims.expanded_rows(1024, 0) == 1024
    monkeypatch.setattr(mla_kernel, "_EXPAND_LIMIT_BYTES", 300 * (n + r + v) * 4)
    assert dims.expanded_rows(1024, 0) == 256


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("dtype", "atol"), [(torch.float32, 2e-6), (torch.bfloat16, 3e-2)])
def test_narrow_dtypes(form: str | None, dtype: torch.dtype, atol: float) -> None:
    batch = Batch([5, 3, 1], [5, 13, 101], 7, padding=2)
    out = batch.run(dtype, form)
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), batch.reference(), atol=atol, rtol=0, equal_nan=True)


@pytest.mark.parametrize("form", FORMS)
def test_bfloat16_is_rounded_only_once(form: str | None) -> None:
    """Inputs exact in bfloat16 give the float64 result rounded to bfloat16: arithmetic inside is wider."""
    batch = Batch([4, 2], [9, 30], 7)
    for name in ("q", "cache", "w_uk", "w_uv"):
        setattr(batch, name, getattr(batch, name).bfloat16().double())
    reference = batch.reference()
    torch.testing.assert_close(batch.run(torch.bfloat16, form).double(), reference, atol=1e-6, rtol=2**-8)


def test_paged_helpers() -> None:
    query_lens, kv_lens = torch.tensor([2, 0, 3]), torch.tensor([7, 4, 1])
    assert request_rows(query_lens, kv_lens) == [(0, 2, 7, 0), (2, 3, 1, 2)]
    request_t, visible_t = row_limits(query_lens, kv_lens)
    assert request_t.tolist() == [0, 0, 2, 2, 2]
    assert visible_t.tolist() == [6, 7, 0, 0, 1]
    table = torch.tensor([5, 0, 9, -1], dtype=torch.int32)
    assert physical_rows(table, 10, 4).tolist() == [20, 21, 22, 23, 0, 1, 2, 3, 36, 37]
    assert physical_rows(table, 0, 4).tolist() == []
