"""A workload: steps of ragged requests on one paged cache, for every data-parallel rank."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from emulator.errors import UsageError
from emulator.model.batch import Request, empty_caches
from emulator.model.config import ModelConfig
from emulator.model.layers import Batch

Step = Sequence[Request]  # one dp rank's requests; request i of every step is the same sequence


@dataclass
class _Sequence:
    """A prompt and what follows: length tokens in the end, of which `context` were in the caches beforehand. ids: of
    these, and of the one after them."""

    context: int
    length: int
    ids: Tensor
    blocks: Tensor


@dataclass(frozen=True)
class Workload:
    """One dp rank's batches. prefix: what fills the caches with the first steps' contexts, None if nothing does.
    steps: share the caches of the first; sequences keep their blocks."""

    prefix: Batch | None
    steps: list[Batch]


def build_workload(
    config: ModelConfig, steps: Sequence[Step], *, seed: int, dp_index: int, dtype: torch.dtype, block_size: int
) -> Workload:
    """The batches of one dp rank. Token ids depend on seed, dp rank and sequence only, so that the same sequence may be
    cut into steps in several ways. Blocks are dealt out in a seeded random order. The caches hold NaN until written and
    end in a block that belongs to nobody, so that a read through index -1 meets NaN.

    Raises UsageError when a step's context is not what the steps before left in the caches.
    """
    sequences = _sequences(config, steps, seed, dp_index, block_size)
    num_blocks = sum(len(s.blocks) for s in sequences)
    latent, index = empty_caches(config, (num_blocks + 1) * block_size, dtype)

    def batch(requests: Step) -> Batch:
        return _batch(sequences, requests, latent, index, block_size)

    prefix = [Request(s.context) for s in sequences]
    return Workload(batch(prefix) if any(r.query for r in prefix) else None, [batch(requests) for requests in steps])


def _sequences(
    config: ModelConfig, steps: Sequence[Step], seed: int, dp_index: int, block_size: int
) -> list[_Sequence]:
    contexts: list[int] = []
    lengths: list[int] = []
    for number, requests in enumerate(steps):
        for i, request in enumerate(requests):
            if i == len(contexts):
                contexts.append(request.context)
                lengths.append(request.context)
            if request.query and request.context != lengths[i]:
                where = f"step {number}, request {i} of dp rank {dp_index}"
                raise UsageError(
                    f"{where}: context {request.context}, but {lengths[i]} tokens are in the caches by then"
                )
            lengths[i] += request.query
    counts = [-(-length // block_size) for length in lengths]
    dealt = torch.randperm(sum(counts), generator=_generator(seed, dp_index, -1))
    made, used = [], 0
    for i, (context, length, count) in enumerate(zip(contexts, lengths, counts)):
        generator = _generator(seed, dp_index, i)
        ids = torch.cat([torch.randint(config.vocab_size, (n,), generator=generator) for n in (length, 1)])
        made.append(_Sequence(context, length, ids, dealt[used : used + count]))
        used += count
    return made


def _generator(seed: int, dp_index: int, sequence: int) -> torch.Generator:
    return torch.Generator().manual_seed((seed * 1009 + dp_index) * 100_003 + sequence + 1)


def _batch(
    sequences: Sequence[_Sequence], requests: Step, latent: list[Tensor], index: list[Tensor], block_size: int
) -> Batch:
    """Packed rows of the requests that have queries in this step."""
    active = [(sequences[i], r) for i, r in enumerate(requests) if r.query]
    width = max((len(s.blocks) for s, _ in active), default=1)
    table = torch.full((len(active), width), -1)
    at = [torch.arange(r.context, r.context + r.query) for _, r in active]
    slots = []
    for row, ((sequence, _), positions) in enumerate(zip(active, at)):
        table[row, : len(sequence.blocks)] = sequence.blocks
        slots.append(sequence.blocks[positions // block_size] * block_size + positions % block_size)
    total = sum(r.query for _, r in active)
    return Batch(
        input_ids=_joined(s.ids[r.context : r.context + r.query] for s, r in active),
        positions=_joined(at),
        slots=_joined(slots),
        token_mask=torch.ones(total, dtype=torch.bool),
        query_lens=torch.tensor([r.query for _, r in active], dtype=torch.int64),
        kv_lens=torch.tensor([r.query + r.context for _, r in active], dtype=torch.int64),
        block_table=table,
        latent_caches=latent,
        index_caches=index,
        next_ids=_joined(s.ids[r.context + 1 : r.context + r.query + 1] for s, r in active),
    )


def _joined(parts: Iterator[Tensor] | list[Tensor]) -> Tensor:
    listed = list(parts)
    return torch.cat(listed) if listed else torch.empty(0, dtype=torch.int64)


def phase_of(requests: Sequence[Step]) -> str:
    """prefill, decode or mixed, from the batches of all dp ranks: never from one rank's part of them.

    A request decodes when it has context and at most as many new tokens as one step of speculative decoding takes
    (1 + drafts, here up to 4); a longer one, or one without context, is a prefill or a chunk of one.
    """
    decoding = [r.context > 0 and r.query <= 4 for step in requests for r in step if r.query]
    if not decoding or not any(decoding):
        return "prefill"
    return "decode" if all(decoding) else "mixed"
