"""What the oracle would notice: each mistake moves the logits by far more than any tolerance in this folder."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from emulator.model.config import ModelConfig

from .ours import Ours
from .test_against_hf import distance, each_mini


def other_indexer_rope(ours: Ours) -> Ours:
    return ours.changed(model_type="deepseek_v32" if ours.config.indexer_interleaved else "glm_moe_dsa")


def no_mscale(ours: Ours) -> Ours:
    """The softmax scale without yarn's factor; the rotation itself stays as it is."""
    rope = ours.config.rope_parameters
    return ours.changed(rope_parameters=rope.model_copy(update={"mscale_all_dim": None, "attention_factor": 1.0}))


def no_correction_bias(ours: Ours) -> Ours:
    zeroed = {n: torch.zeros_like(w) for n, w in ours.weights.items() if n.endswith("e_score_correction_bias")}
    assert len(zeroed) == 3
    return replace(ours, weights=ours.weights | zeroed)


def dense_attention(ours: Ours) -> Ours:
    return ours.changed(index_topk=97)


def one_id_fewer(ours: Ours) -> Ours:
    return ours.changed(index_topk=31)


def unnormalised_router(ours: Ours) -> Ours:
    return ours.changed(norm_topk_prob=False)


def unscaled_router(ours: Ours) -> Ours:
    return ours.changed(routed_scaling_factor=1.0)


def ungrouped_router(ours: Ours) -> Ours:
    return ours.changed(n_group=1, topk_group=1)


MISTAKES = [other_indexer_rope, no_correction_bias, dense_attention, one_id_fewer, unnormalised_router, unscaled_router]
DEEPSEEK_ONLY = [no_mscale, ungrouped_router]  # GLM has neither yarn nor expert groups


@pytest.mark.parametrize(
    ("mini", "mistake"),
    [(mini, m) for mini in ("glm-5.1-mini", "deepseek-v3.2-mini") for m in MISTAKES]
    + [("deepseek-v3.2-mini", m) for m in DEEPSEEK_ONLY],
)
def test_mistake_moves_the_logits(make_pair: Callable, mini: str, mistake: Callable[[Ours], Ours]) -> None:
    pair = make_pair(mini, torch.float32)
    ids = pair.tokens(97)
    assert distance(mistake(pair.ours).logits(ids), pair.run(ids).logits) > 1e-3


@each_mini
def test_every_kind_of_weight_counts(make_pair: Callable, mini: str) -> None:
    """A weight whose rows are reversed moves the logits, so each one is read from its own tensor and used."""
    pair = make_pair(mini, torch.float32)
    ids = pair.tokens(97)
    expected = pair.run(ids).logits
    names = [n for n in pair.ours.weights if not n.startswith(tuple(f"model.layers.{i}." for i in (1, 3, 4)))]
    assert len(names) == 42  # 17 of a dense layer, 21 of a sparse one, 4 at the top (the rotary frequencies are one)
    for name in names:
        reversed_rows: dict[str, Tensor] = {name: pair.ours.weights[name].flip(0)}
        wrong = replace(pair.ours, weights=pair.ours.weights | reversed_rows)
        assert distance(wrong.logits(ids), expected) > 1e-3, name


@each_mini
def test_index_topk_is_below_the_token_count(make_pair: Callable, mini: str) -> None:
    """With topk >= tokens every choice is the same, and no indexer error could be seen."""
    config: ModelConfig = make_pair(mini, torch.float32).ours.config
    assert config.index_topk == 32 < 96
