"""Batches: packed rows, right positions, slots that follow the block table, caches that show what nobody wrote."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from emulator.model.batch import Request, empty_caches, own_caches
from emulator.model.config import ModelConfig, load_config, parse_config
from emulator.model.layers import Batch
from emulator.model.workload import build_workload


@pytest.fixture
def config(tiny: dict[str, Any]) -> ModelConfig:
    return parse_config(tiny, "test")


REQUESTS = st.lists(st.builds(Request, query=st.integers(1, 9), context=st.integers(0, 20)), min_size=1, max_size=5)
RAGGED = [Request(5), Request(3, context=10), Request(1, context=100)]  # engine_layouts section 4: kv = [5, 13, 101]


def build(config: ModelConfig, requests: list[Request], seed: int = 0, block_size: int = 4) -> Batch:
    made = build_workload(config, [requests], seed=seed, dp_index=0, dtype=torch.float64, block_size=block_size)
    return made.steps[0]


def test_ragged_requests_with_context(config: ModelConfig) -> None:
    batch = build(config, RAGGED)
    assert batch.query_lens.tolist() == [5, 3, 1]
    assert batch.kv_lens.tolist() == [5, 13, 101]  # counting the request's own queries
    assert batch.positions.tolist() == [0, 1, 2, 3, 4, 10, 11, 12, 100]
    assert batch.token_mask.tolist() == [True] * 9
    assert batch.input_ids.shape == (9,)
    assert 0 <= int(batch.input_ids.min()) <= int(batch.input_ids.max()) < config.vocab_size


def test_blocks_are_dealt_once_and_unused_entries_are_minus_one(config: ModelConfig) -> None:
    table = build(config, RAGGED).block_table
    used = [row[row >= 0].tolist() for row in table]
    assert [len(u) for u in used] == [2, 4, 26]  # ceil(5/4), ceil(13/4), ceil(101/4)
    assert sorted(b for u in used for b in u) == list(range(32))
    assert all((row[len(u) :] == -1).all() for row, u in zip(table, used))
    assert [b for u in used for b in u] != list(range(32))  # not in order: a wrong table would show


@settings(max_examples=30, deadline=None)
@given(requests=REQUESTS, block_size=st.sampled_from([1, 3, 16]), seed=st.integers(0, 5))
def test_slots_follow_the_block_table(requests: list[Request], block_size: int, seed: int) -> None:
    batch = build(load_config("glm-5.1-mini"), requests, seed, block_size)
    expected = []
    for request, table in zip(requests, batch.block_table.tolist()):
        for position in range(request.context, request.context + request.query):
            expected.append(table[position // block_size] * block_size + position % block_size)
    assert batch.slots.tolist() == expected
    assert len(set(expected)) == len(expected)  # no two tokens share a slot
    assert max(expected) < len(batch.latent_caches[0]) - block_size  # a whole block stays free, for reads through -1


def test_caches_are_nan_until_written(config: ModelConfig) -> None:
    batch = build(config, RAGGED)
    assert len(batch.latent_caches) == len(batch.index_caches) == config.num_hidden_layers
    for latent, index in zip(batch.latent_caches, batch.index_caches):
        assert tuple(latent.shape) == (33 * 4, 7 + 2)  # 32 blocks and a spare one; latent rank + rope
        assert tuple(index.shape) == (33 * 4, 4)
        assert latent.isnan().all()
        assert index.isnan().all()


def test_index_caches_of_dense_mla_hold_nothing() -> None:
    latent, index = empty_caches(load_config("deepseek-v3-mini"), 8, torch.float64)
    assert [tuple(c.shape) for c in latent] == [(8, 56 + 14)] * 5
    assert [tuple(c.shape) for c in index] == [(8, 0)] * 5


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_caches_have_the_runs_dtype(config: ModelConfig, dtype: torch.dtype) -> None:
    latent, index = empty_caches(config, 8, dtype)
    assert {c.dtype for c in latent + index} == {dtype}
    assert all(c.isnan().all() for c in latent + index)
    assert len({c.data_ptr() for c in latent + index}) == 2 * config.num_hidden_layers  # no layer shares a cache


def test_the_same_seed_is_the_same_batch(config: ModelConfig) -> None:
    first, again, other = build(config, RAGGED), build(config, RAGGED), build(config, RAGGED, seed=1)
    assert torch.equal(first.input_ids, again.input_ids)
    assert torch.equal(first.block_table, again.block_table)
    assert not torch.equal(first.block_table, other.block_table)
    assert not torch.equal(first.input_ids, other.input_ids)


def test_graph_inputs_have_caches_of_their_own(config: ModelConfig) -> None:
    batch = build(config, [Request(3)])
    inputs = own_caches(batch)
    assert set(inputs) == set(batch.__dataclass_fields__)
    inputs["latent_caches"][0][:] = 1.0  # type: ignore[index]
    inputs["index_caches"][1][:] = 1.0  # type: ignore[index]
    assert batch.latent_caches[0].isnan().all()
    assert batch.index_caches[1].isnan().all()
    assert inputs["slots"] is batch.slots
