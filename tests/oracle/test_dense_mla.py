"""The dense-MLA mini against Hugging Face's DeepseekV3ForCausalLM, which expands keys and values and never absorbs:
layers, cache, logits, packed requests, chunks, decode and options."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from emulator.model.config import load_config
from emulator.model.rope import inverse_frequencies, softmax_scale
from emulator.ops.registry import op_name

from .ours import Ours, _program
from .test_against_hf import LAYER, LOGITS, distance, each_count, each_dtype
from .test_decode import CHUNKS, STEPS, TOLERANCE, _of_hf, _of_ours

MINI = "deepseek-v3-mini"
F64 = torch.float64


@each_count
@each_dtype
def test_every_layer_and_the_logits_equal_hf(make_pair: Callable, count: int, dtype: torch.dtype) -> None:
    pair = make_pair(MINI, dtype)
    ids = pair.tokens(count)
    hf = pair.run(ids)
    assert type(pair.hf.model).__name__ == "DeepseekV3ForCausalLM"
    layers = list(pair.ours.layers(ids, hf.inputs))
    assert len(layers) == len(hf.outputs) == 5
    for i, layer in enumerate(layers):
        assert layer.ids is None
        assert distance(layer.hidden, hf.outputs[i]) < LAYER[dtype], f"layer {i}"
    logits, topk = pair.ours.run(pair.ours.batch(ids))
    assert topk == []
    assert hf.logits.abs().max() > 2
    assert distance(logits, hf.logits) < LOGITS[dtype]


def test_the_graph_is_the_dense_op_in_every_layer(make_pair: Callable) -> None:
    ours = make_pair(MINI, F64).ours
    names = [op_name(node.target) for node in _program(ours.config, ours.options).graph.nodes]
    assert names.count("multihead_latent_attention") == names.count("cache_write") == 5
    assert not {"mla_sparse_attention", "dsa_indexer_key", "dsa_indexer_topk"} & set(names)
    assert not any("index" in name for name in ours.weights)


def test_packed_requests_and_chunks_equal_hf(make_pair: Callable) -> None:
    pair = make_pair(MINI, F64)
    long, short = pair.tokens(97), pair.tokens(41)
    expected = pair.run(long).logits
    packed, _ = pair.ours.run(pair.ours.batch(torch.cat([short, long]), 41, 97))
    assert distance(packed[:41], pair.run(short).logits) < 1e-11
    assert distance(packed[41:], expected) < 1e-11

    whole = pair.ours.batch(long)
    for start, stop in ((0, 57), (57, 97)):
        span = slice(start, stop)
        rows = {name: getattr(whole, name)[span] for name in ("input_ids", "positions", "slots", "token_mask")}
        lens = {"query_lens": torch.tensor([stop - start]), "kv_lens": torch.tensor([stop])}
        logits, _ = pair.ours.run(replace(whole, **rows, **lens))
        assert distance(logits, expected[span]) < 1e-11


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated")
def test_decode_equals_hfs(make_pair: Callable, dtype: torch.dtype) -> None:
    pair = make_pair(MINI, dtype)
    ids = pair.tokens(sum(CHUNKS) + STEPS)
    expected = _of_hf(pair.hf.model, ids)
    found = _of_ours(pair.ours, ids, (*CHUNKS, *[1] * STEPS))
    assert distance(torch.cat(found), expected) < TOLERANCE[dtype]
    alone = _of_ours(pair.ours, ids[-1:], (1,))[0]  # a step that forgets the cache is far off
    assert distance(alone, expected[-1:]) > 1e-2


def test_cache_rows_equal_hf_and_there_are_no_index_keys(make_pair: Callable) -> None:
    pair = make_pair(MINI, F64)
    ids = pair.tokens(97)
    with torch.no_grad():
        cache = pair.hf.model(input_ids=ids.unsqueeze(0), use_cache=True).cache
    batch = pair.ours.batch(ids)
    pair.ours.run(batch)
    assert len(cache.layers) == 5
    for i, layer in enumerate(cache.layers):
        latent = torch.cat([layer.keys, layer.values], -1)[0, 0]
        assert latent.shape == (97, 56 + 14)
        assert distance(batch.latent_caches[i][batch.slots], latent) < 1e-11, f"layer {i}"
        assert batch.index_caches[i].numel() == 0


@pytest.mark.parametrize(
    "changes", [{"rope_interleave": False}, {"attention_bias": True}, {"rope_scaling": None}], ids=str
)
def test_options_equal_hf(make_pair: Callable, changes: dict) -> None:
    """Half-split rope is an option of this class only; biases; rope without yarn."""
    pair, plain = make_pair(MINI, F64, **changes), make_pair(MINI, F64)
    ids = pair.tokens(97)
    hf = pair.run(ids)
    for i, layer in enumerate(pair.ours.layers(ids, hf.inputs)):
        assert distance(layer.hidden, hf.outputs[i]) < 1e-12, f"layer {i}"
    assert distance(pair.ours.logits(ids), hf.logits) < 1e-11
    if "attention_bias" not in changes:  # the same weights without the option are far off
        assert distance(replace(pair.ours, config=plain.ours.config).logits(ids), hf.logits) > 1e-3


def test_config_as_hf_saves_it_means_the_same(make_pair: Callable) -> None:
    pair = make_pair(MINI, F64)
    ours, saved = pair.ours, load_config(str(pair.hf.folder))
    assert [saved.is_moe(i) for i in range(5)] == [False] * 2 + [True] * 3
    assert softmax_scale(saved) == softmax_scale(ours.config)
    assert torch.equal(inverse_frequencies(saved)[0], inverse_frequencies(ours.config)[0])
    ids = pair.tokens(96)
    assert torch.equal(replace(ours, config=saved).logits(ids), ours.logits(ids))


def _no_mscale(ours: Ours) -> Ours:
    rope = ours.config.rope_parameters
    return ours.changed(rope_parameters=rope.model_copy(update={"mscale_all_dim": None, "attention_factor": 1.0}))


def _no_correction_bias(ours: Ours) -> Ours:
    zeroed = {n: torch.zeros_like(w) for n, w in ours.weights.items() if n.endswith("e_score_correction_bias")}
    return replace(ours, weights=ours.weights | zeroed)


def _ungrouped_router(ours: Ours) -> Ours:
    return ours.changed(n_group=1, topk_group=1)


def _half_split_rope(ours: Ours) -> Ours:
    return ours.changed(rope_interleave=False)


@pytest.mark.parametrize("mistake", [_no_mscale, _no_correction_bias, _ungrouped_router, _half_split_rope])
def test_the_oracle_notices(make_pair: Callable, mistake: Callable[[Ours], Ours]) -> None:
    pair = make_pair(MINI, F64)
    ids = pair.tokens(97)
    assert distance(mistake(pair.ours).logits(ids), pair.run(ids).logits) > 1e-2
