"""Steps of ragged requests on one paged cache: who owns which slots, and what phase a step is."""

import pytest
import torch

from emulator.errors import UsageError
from emulator.model.batch import Request
from emulator.model.config import load_config
from emulator.model.workload import build_workload, phase_of

CONFIG = load_config("glm-5.1-mini").with_layers(1)
BLOCK = 4


def _workload(*steps, seed=0, dp_index=0):
    requests = [[Request(*r) for r in step] for step in steps]
    return build_workload(CONFIG, requests, seed=seed, dp_index=dp_index, dtype=torch.float64, block_size=BLOCK)


def test_chunks_of_a_sequence_are_one_sequence():
    chunked, whole = _workload([(5,)], [(3, 5)], [(1, 8)]), _workload([(9,)])
    ids = torch.cat([b.input_ids for b in chunked.steps])
    assert torch.equal(ids, whole.steps[0].input_ids)
    assert [b.positions.tolist() for b in chunked.steps] == [[0, 1, 2, 3, 4], [5, 6, 7], [8]]
    assert [b.kv_lens.tolist() for b in chunked.steps] == [[5], [8], [9]]
    slots = torch.cat([b.slots for b in chunked.steps]).tolist()
    assert len(set(slots)) == 9
    # slot of position p: block table entry p // 4, offset p % 4; the table holds the whole sequence from the start
    table = chunked.steps[0].block_table[0].tolist()
    assert slots == [table[p // BLOCK] * BLOCK + p % BLOCK for p in range(9)]
    assert all(torch.equal(b.block_table, chunked.steps[0].block_table) for b in chunked.steps)


def test_every_token_has_its_successor():
    chunked, longer = _workload([(5,), (2,)], [(3, 5), (1, 2)]), _workload([(9,), (4,)])
    first, second = longer.steps[0].input_ids.split([9, 4])
    assert torch.equal(chunked.steps[0].next_ids, torch.cat([first[1:6], second[1:3]]))
    assert torch.equal(chunked.steps[1].next_ids, torch.cat([first[6:9], second[3:4]]))  # the last: what would follow
    cached = _workload([(2, 6)])
    assert cached.prefix is not None
    assert torch.equal(cached.prefix.next_ids, first[1:7])


def test_steps_share_their_caches_and_nobody_owns_the_last_block():
    made = _workload([(5,), (2,)], [(1, 5), (1, 2)])
    first, second = made.steps
    assert first.latent_caches[0] is second.latent_caches[0]
    assert first.latent_caches[0].shape[0] == (2 + 1 + 1) * BLOCK  # blocks of 6 and 3 tokens, and one spare
    assert int(max(first.slots.max(), second.slots.max())) < 3 * BLOCK
    assert torch.isnan(first.latent_caches[0]).all()
    assert not set(first.slots.tolist()) & set(second.slots.tolist())


def test_a_first_context_is_a_prefix_to_be_filled():
    made = _workload([(2, 6), (3,)])
    assert made.prefix is not None
    assert made.prefix.query_lens.tolist() == [6]
    whole = _workload([(8,), (3,)]).steps[0].input_ids
    assert torch.equal(torch.cat([made.prefix.input_ids, made.steps[0].input_ids[:2]]), whole[:8])
    assert _workload([(8,)]).prefix is None


def test_a_request_without_queries_sits_out():
    [step] = _workload([(0,), (2,)]).steps
    assert (step.query_lens.tolist(), len(step.input_ids)) == ([2], 2)
    [empty] = _workload([]).steps
    assert (empty.query_lens.shape, empty.input_ids.shape, empty.block_table.shape) == ((0,), (0,), (0, 1))


def test_dp_ranks_have_their_own_tokens():
    first, second = (_workload([(30,)], dp_index=dp).steps[0].input_ids for dp in (0, 1))
    assert not torch.equal(first, second)


def test_context_must_be_what_is_in_the_caches():
    with pytest.raises(UsageError, match="step 1, request 1 of dp rank 0: context 3, but 2 tokens"):
        _workload([(5,), (2,)], [(1, 5), (1, 3)])


@pytest.mark.parametrize(
    ("steps", "phase"),
    [
        ([[(5, 0)], [(7, 0)]], "prefill"),
        ([[(1, 9), (2, 18)], [(1, 4)]], "decode"),
        ([[(1, 9)], [(7, 0)]], "mixed"),  # one dp rank decodes, another prefills
        ([[(1, 9)], []], "decode"),  # an idle dp rank decides nothing
        ([[(1, 0)]], "prefill"),  # a prompt of one token
        ([[(64, 9)]], "prefill"),  # a chunk with context
        ([[], []], "prefill"),
    ],
)
def test_phase(steps, phase):
    assert phase_of([[Request(*r) for r in step] for step in steps]) == phase
