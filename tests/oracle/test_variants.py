"""Options and forms beyond the two mini configs, against Hugging Face in float64."""

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from emulator.model.layers import ProgramOptions

from .hugging_face import mini_config, run, with_latent_norm_eps
from .ours import Ours
from .test_against_hf import LOGITS, distance, each_mini, id_sets

F64 = torch.float64


def test_latent_norm_eps_is_hfs_by_default_and_the_configs_on_request(make_pair: Callable) -> None:
    """GLM's config says 1e-5, HF's latent norms use 1e-6 all the same, engines use 1e-5. The latents are made small
    here, so that the difference stands clear of float32 noise."""
    pair = make_pair("glm-5.1-mini", F64)
    ids = pair.tokens(96)
    small = ("q_a_proj.weight", "kv_a_proj_with_mqa.weight")
    model = copy.deepcopy(pair.hf.model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(small):
                parameter *= 0.1
    ours = replace(pair.ours, weights={n: w * 0.1 if n.endswith(small) else w for n, w in pair.ours.weights.items()})
    stock = run(model, ids).logits

    assert ours.config.rms_norm_eps == 1e-5
    assert distance(ours.logits(ids), stock) < 1e-11
    engine = replace(ours, options=ProgramOptions(latent_norm_eps=None)).logits(ids)
    assert distance(engine, stock) > 20 * LOGITS[torch.float32]
    assert distance(engine, run(with_latent_norm_eps(model, 1e-5), ids).logits) < 1e-11


@each_mini
def test_attention_bias(make_pair: Callable, mini: str) -> None:
    pair = make_pair(mini, F64, attention_bias=True)
    ids = pair.tokens(97)
    hf = pair.run(ids)
    biases = [name for name in pair.ours.weights if name.endswith("proj.bias") or name.endswith("mqa.bias")]
    assert len(biases) == 3 * 5  # q_a_proj, kv_a_proj_with_mqa, o_proj
    for i, layer in enumerate(pair.ours.layers(ids, hf.inputs)):
        assert distance(layer.hidden, hf.outputs[i]) < 1e-12, f"layer {i}"
    assert distance(pair.ours.logits(ids), hf.logits) < 1e-11
    for name in biases:
        without = replace(pair.ours, weights=pair.ours.weights | {name: torch.zeros_like(pair.ours.weights[name])})
        assert distance(without.logits(ids), hf.logits) > 1e-3, name


SCHEDULES: dict[str, tuple[dict[str, Any], str]] = {
    "indexer_types": ({"indexer_types": ["full", "shared", "full", "shared", "shared"]}, "FSFSS"),
    "pattern": ({"index_topk_pattern": "FFSSF"}, "FFSSF"),
    "frequency": ({"index_topk_freq": 2, "index_skip_topk_offset": 1}, "FSFSF"),
    "frequency, default offset": ({"index_topk_freq": 3}, "FFSSF"),
    "types over pattern": ({"indexer_types": ["full"] * 4 + ["shared"], "index_topk_pattern": "FSSSS"}, "FFFFS"),
}


@pytest.mark.parametrize(("changes", "expected"), SCHEDULES.values(), ids=SCHEDULES)
def test_shared_indexer_schedule(make_pair: Callable, changes: dict[str, Any], expected: str) -> None:
    """A shared layer has no indexer weights and uses the ids of the last full one."""
    pair = make_pair("glm-5.1-mini", F64, **changes)
    ids = pair.tokens(96)
    hf = pair.run(ids)
    assert "".join("S" if topk is None else "F" for topk in hf.topk) == expected
    assert "".join("F" if pair.ours.config.has_indexer(i) else "S" for i in range(5)) == expected
    last = None
    for i, layer in enumerate(pair.ours.layers(ids, hf.inputs)):
        last = hf.topk[i] if hf.topk[i] is not None else last
        assert id_sets(layer.ids) == id_sets(last), f"layer {i}"
        assert distance(layer.hidden, hf.outputs[i]) < 1e-12, f"layer {i}"
    logits, topk = pair.ours.run(pair.ours.batch(ids))
    assert len(topk) == expected.count("F")
    assert distance(logits, hf.logits) < 1e-11


@each_mini
def test_unknown_model_type_is_known_by_its_structure(make_pair: Callable, mini: str) -> None:
    """Without a known model_type the indexer's rope is DeepSeek's half-split one, unless the config says otherwise."""
    pair = make_pair(mini, F64)
    config = mini_config(mini, model_type="someone_elses_model", architectures=["SomeoneElsesModel"])
    config.pop("indexer_rope_interleave", None)
    ids = pair.tokens(96)
    half_split = Ours.load(config, pair.hf.folder, F64).logits(ids)
    interleaved = Ours.load(config | {"indexer_rope_interleave": True}, pair.hf.folder, F64).logits(ids)
    same, other = (interleaved, half_split) if mini == "glm-5.1-mini" else (half_split, interleaved)
    assert torch.equal(same, pair.ours.logits(ids))
    assert torch.equal(half_split, pair.ours.changed(model_type="deepseek_v32").logits(ids))
    assert distance(other, same) > 1e-3
