"""Chunked prefill and decode on one paged cache, against Hugging Face's decode with its own cache."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from emulator.model.batch import Request, batch_inputs
from emulator.model.program import build_program
from emulator.model.workload import build_workload
from emulator.verify.reference import run_reference

from .ours import Ours
from .test_against_hf import LOGITS, distance

F32, F64 = torch.float32, torch.float64
CHUNKS, STEPS = (23, 19), 5  # index_topk is 32: from the second chunk on, rows see more keys than they may use
TOLERANCE = {F32: 2e-5, F64: LOGITS[F64]}
SHARED = {"indexer_types": ["full", "shared", "full", "shared", "shared"]}


def _of_hf(model: torch.nn.Module, ids: Tensor) -> Tensor:
    """Logits of every row: the prompt at once, then token by token."""
    cache, found, start = None, [], 0
    with torch.no_grad():
        for length in (sum(CHUNKS), *[1] * STEPS):
            output = model(input_ids=ids[None, start : start + length], past_key_values=cache, use_cache=True)
            cache = output.past_key_values
            found.append(output.logits[0])
            start += length
    return torch.cat(found)


def _of_ours(ours: Ours, ids: Tensor, lengths: tuple[int, ...]) -> list[Tensor]:
    """Logits by step of the traced graph; each step's batch holds this sequence and another one."""
    steps, start = [], 0
    for length in lengths:
        steps.append([Request(3 if not start else 1, 0 if not start else 2 + len(steps)), Request(length, start)])
        start += length
    workload = build_workload(
        ours.config, steps, seed=3, dp_index=0, dtype=ours.dtype, block_size=ours.options.block_size
    )
    program = build_program(ours.config, ours.options)
    [output] = program.graph.output_node().all_input_nodes
    found, start = [], 0
    for length, batch in zip(lengths, workload.steps):
        own = batch.input_ids.clone()
        own[-length:] = ids[start : start + length]
        inputs = {**batch_inputs(batch), "input_ids": own}
        found.append(run_reference(program, ours.weights, inputs, keep={output.name})[output.name][-length:])
        start += length
    return found


@pytest.mark.parametrize("dtype", [F32, F64])
@pytest.mark.parametrize(
    ("mini", "changes"),
    [("glm-5.1-mini", {}), ("glm-5.1-mini", SHARED), ("deepseek-v3.2-mini", {})],  # HF's V3.2 has no shared layers
    ids=["glm-5.1", "glm-5.1 with shared indexers", "deepseek-v3.2"],
)
@pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated")
def test_decode_equals_hfs(make_pair: Callable, mini: str, dtype: torch.dtype, changes: dict) -> None:
    pair = make_pair(mini, dtype, **changes)
    ids = pair.tokens(sum(CHUNKS) + STEPS)
    expected = _of_hf(pair.hf.model, ids)
    found = _of_ours(pair.ours, ids, (*CHUNKS, *[1] * STEPS))
    assert [len(f) for f in found] == [*CHUNKS, 1, 1, 1, 1, 1]
    error = distance(torch.cat(found), expected)
    print(f"{mini} {dtype}: {error:.2g}")
    assert error < TOLERANCE[dtype]
    # a step that forgets the cache is far off
    alone = _of_ours(pair.ours, ids[-1:], (1,))[0]
    assert distance(alone, expected[-1:]) > 1e-2
