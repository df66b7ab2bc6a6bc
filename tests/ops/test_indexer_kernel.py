"""Top-k selection kernel against a per-row, per-head, per-key loop."""

import pytest
import torch
from torch import Tensor

from emulator.ops import indexer_kernel
from emulator.ops.indexer_kernel import topk_ids

NAN = float("nan")
BLOCK = 4


class Batch:
    """Random ragged batch in float64: every cache row that no request wrote is NaN."""

    def __init__(
        self, query_lens: list[int], kv_lens: list[int], padding: int = 0, heads: int = 5, dim: int = 6, seed: int = 0
    ) -> None:
        gen = torch.Generator().manual_seed(seed)
        self.query_lens, self.kv_lens = query_lens, kv_lens
        blocks = [-(-kv // BLOCK) for kv in kv_lens]
        total = sum(blocks) + 2
        order = torch.randperm(total - 1, generator=gen).tolist()
        self.table = torch.full((len(kv_lens), max(blocks) + 1), total - 1, dtype=torch.int64)
        self.cache = torch.full((total * BLOCK, dim), NAN, dtype=torch.float64)
        self.keys = [torch.randn(kv, dim, generator=gen, dtype=torch.float64) for kv in kv_lens]
        for request, keys in enumerate(self.keys):
            for b in range(blocks[request]):
                self.table[request, b] = order.pop()
            for t in range(len(keys)):
                self.cache[int(self.table[request, t // BLOCK]) * BLOCK + t % BLOCK] = keys[t]
        rows = sum(query_lens) + padding
        self.q = torch.randn(rows, heads, dim, generator=gen, dtype=torch.float64)
        self.weights = torch.randn(rows, heads, generator=gen, dtype=torch.float64)
        self.q[rows - padding :] = NAN

    def run(self, topk: int, dtype: torch.dtype = torch.float64) -> Tensor:
        return topk_ids(
            self.q.to(dtype), self.weights.to(dtype), self.cache.to(dtype), torch.tensor(self.query_lens),
            torch.tensor(self.kv_lens), self.table, block_size=BLOCK, topk=topk,
        )  # fmt: skip

    def scores(self) -> list[list[float]]:
        """Scores of the visible keys of every row."""
        result = []
        row = 0
        for q_len, kv, keys in zip(self.query_lens, self.kv_lens, self.keys):
            for j in range(q_len):
                scores = []
                for t in range(max(0, kv - (q_len - 1 - j))):
                    score = 0.0
                    for h in range(self.q.shape[1]):
                        dot = float(self.q[row, h] @ keys[t]) / self.q.shape[2] ** 0.5
                        score += float(self.weights[row, h]) * max(dot, 0.0)
                    scores.append(score)
                result.append(scores)
                row += 1
        return result


def check(batch: Batch, topk: int, dtype: torch.dtype = torch.float64, slack: float = 1e-12) -> None:
    ids = batch.run(topk, dtype)
    assert ids.dtype == torch.int32
    assert ids.shape == (batch.q.shape[0], topk)
    scores = batch.scores()
    for row, row_scores in enumerate(scores):
        count = min(topk, len(row_scores))
        chosen = ids[row, :count].tolist()
        assert ids[row, count:].tolist() == [-1] * (topk - count)
        assert len(set(chosen)) == count
        assert all(0 <= t < len(row_scores) for t in chosen)
        if len(row_scores) <= topk:
            assert chosen == list(range(count))
            continue
        # Every chosen key scores at least as much as every rejected one; ties may go either way.
        rejected = [s for t, s in enumerate(row_scores) if t not in set(chosen)]
        assert min(row_scores[t] for t in chosen) >= max(rejected) - slack
    assert (ids[len(scores) :] == -1).all()


@pytest.mark.parametrize("topk", [1, 3, 4, 7, 200])
def test_ragged_batch_with_context_and_padding(topk: int) -> None:
    check(Batch([5, 3, 0, 1], [5, 13, 9, 101], padding=3), topk)


def test_rows_without_visible_keys() -> None:
    batch = Batch([6, 2], [2, 0])
    check(batch, 1)
    assert batch.run(1)[:, 0].tolist() == [-1, -1, -1, -1, 0, batch.run(1)[5, 0], -1, -1]


def test_selection_is_exact_without_ties() -> None:
    """Sixteen heads: no score is exactly zero, so the chosen set is unique."""
    batch = Batch([40], [64], heads=16)
    ids = batch.run(8)
    for row, scores in enumerate(batch.scores()):
        best = sorted(range(len(scores)), key=lambda t: -scores[t])[:8]
        assert set(ids[row].tolist()) == set(best)


def test_negative_weights_rank_zero_scores_above_negative_ones() -> None:
    batch = Batch([1], [50])
    batch.weights = -batch.weights.abs()
    check(batch, 9)


@pytest.mark.parametrize(("gemm_rows", "tile_bytes"), [(1024, 1), (10, 4 << 20), (35, 1)])
def test_many_chunks(gemm_rows: int, tile_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of 2, 7 and 64 queries, keys whole or in tiles of 64, rows crossing from unscored to scored."""
    monkeypatch.setattr(indexer_kernel, "_GEMM_ROWS", gemm_rows)
    monkeypatch.setattr(indexer_kernel, "_TILE_BYTES", tile_bytes)
    check(Batch([90, 17], [90, 150]), 5)


def test_zero_score_ties_match_whole_row_topk() -> None:
    """With one head about half the scores are exactly 0; the kernel must break those ties as whole-row topk does."""
    batch = Batch([70], [200], heads=1)
    ids = batch.run(120)
    for row in range(70):
        visible = 131 + row
        score = batch.weights[row, 0] * (batch.keys[0] @ batch.q[row, 0] * 6**-0.5).relu()
        score[visible:] = float("-inf")
        assert set(ids[row].tolist()) == set(torch.topk(score, 120).indices.tolist())


@pytest.mark.parametrize(("dtype", "slack"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-5)])
def test_narrow_dtypes(dtype: torch.dtype, slack: float) -> None:
    """Inputs exact in bfloat16: float32 arithmetic inside must rank them almost as float64 does."""
    batch = Batch([5, 3, 40], [5, 13, 201], heads=16, dim=64)
    batch.q, batch.weights, batch.cache = (t.bfloat16().double() for t in (batch.q, batch.weights, batch.cache))
    batch.keys = [keys.bfloat16().double() for keys in batch.keys]
    check(batch, 4, dtype, slack)


@pytest.mark.parametrize(
    ("dtype", "step"), [(torch.bfloat16, 2**-12), (torch.float32, 2**-12), (torch.float64, 2**-36)]
)
def test_scores_are_wide_enough(dtype: torch.dtype, step: float) -> None:
    """Scores 1 + rank * step: bfloat16 would merge the first, float32 the last."""
    batch = Batch([3], [40], dim=2)
    rank = torch.randperm(40, generator=torch.Generator().manual_seed(3))
    position = torch.arange(40)
    slots = batch.table[0, position // BLOCK] * BLOCK + position % BLOCK
    batch.cache[slots] = torch.stack((torch.ones(40), rank), dim=1).double()
    batch.q[:] = torch.tensor([1.0, step])
    batch.weights[:] = 1.0
    for row, chosen in enumerate(batch.run(4, dtype)):
        assert set(chosen.tolist()) == set(rank[: 38 + row].topk(4).indices.tolist())
