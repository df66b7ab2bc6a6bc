"""The reference run: what it keeps, how choices are forced, and tolerances below float64."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from emulator.model.batch import Request, own_caches
from emulator.model.weights import seeded, weight_groups
from emulator.model.workload import build_workload
from emulator.verify.choices import is_choice
from emulator.verify.reference import run_reference, tolerances


@pytest.fixture
def run(lowered) -> Callable[..., dict[str, Tensor]]:
    """run(keep=None, force=None) of the mini GLM on 5 tokens; run.inputs and run.weights are what it was given."""
    program = lowered.program
    weights = {k: v for group in weight_groups(program, seeded(0), torch.float32) for k, v in group.items()}
    made = build_workload(program.config, [[Request(5)]], seed=0, dp_index=0, dtype=torch.float32, block_size=16)
    batch = made.steps[0]

    def call(keep: set[str] | None = None, force: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
        call.inputs = own_caches(batch)  # type: ignore[attr-defined]
        return run_reference(program, weights, call.inputs, keep=keep, force=force)  # type: ignore[attr-defined]

    call.weights, call.fresh = weights, lambda: own_caches(batch)  # type: ignore[attr-defined]
    return call


def test_only_what_is_asked_for_is_kept(run, nodes_of) -> None:
    names = {nodes_of("moe_gate")[0].name, nodes_of("add_rms_norm2")[0].name}
    assert set(run(names)) == {nodes_of("moe_gate")[0].name}  # a pair is no tensor: its parts have names of their own
    everything = run(None)
    assert {nodes_of("linear")[0].name, nodes_of("lm_head")[0].name} <= set(everything)


def test_a_kept_cache_is_the_cache_as_it_was_then(run, nodes_of) -> None:
    name = nodes_of("cache_write")[0].name
    kept = run({name})[name]
    cache = run.inputs["latent_caches"][0]
    assert torch.equal(kept.isnan(), cache.isnan())
    cache.zero_()  # the next step writes in place
    assert not torch.equal(kept, cache)


def test_a_forced_choice_is_followed_and_the_own_one_returned(run, nodes_of, lowered) -> None:
    # with no key selected the attention's output is zero, whatever the values
    ids, attention = (nodes_of(op)[0].name for op in ("dsa_indexer_topk", "mla_sparse_attention"))
    free = run({ids, attention} | choices(lowered))
    forced = run({ids, attention}, force={**free, ids: torch.full_like(free[ids], -1)})
    assert float(free[attention].abs().max()) > 0
    assert float(forced[attention].abs().max()) == 0
    assert torch.equal(forced[ids], free[ids])


def choices(lowered) -> set[str]:
    """Names of all discrete choices: top-k ids, experts and their weights."""
    return {n.name for n in lowered.program.graph.nodes if is_choice(n)}


def test_every_row_of_a_causal_prefill_sees_itself_and_what_came_before(run, nodes_of) -> None:
    # 5 tokens and a top-k of 32: every row takes all keys that it may see
    ids: dict[str, Any] = run({n.name for n in nodes_of("dsa_indexer_topk")})
    for value in ids.values():
        assert [sorted(x for x in row if x >= 0) for row in value.tolist()] == [list(range(t + 1)) for t in range(5)]


def test_tolerances_below_float64_are_some_eps_of_the_largest_value(run, lowered, nodes_of) -> None:
    eps = torch.finfo(torch.float32).eps
    names = {n.name for op in ("linear", "moe_gate", "rms_norm", "lm_head") for n in nodes_of(op)} | choices(lowered)
    reference = run(names)
    found = tolerances(lowered.program, run.weights, run.fresh(), reference, torch.float32, 0)
    assert set(found.absolute) == names
    for name in names - choices(lowered):
        largest = float(reference[name].abs().max())
        assert eps * largest <= found.absolute[name] <= 1000 * eps * largest, name
    assert set(found.flips) == choices(lowered)  # only choices may flip
    assert all(share > 0 for share in found.flips.values())
