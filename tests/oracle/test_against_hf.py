"""Both mini models against Hugging Face's: each decoder layer, the top-k choices and the logits.

float32 is compared with the stock model; float64 with the same code, its float32 islands widened. A layer is fed HF's
own input, so that errors do not add up.
"""

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from emulator.model.config import load_config
from emulator.model.rope import inverse_frequencies, softmax_scale

from .hugging_face import make_checkpoint, mini_config, run

MINIS = ("glm-5.1-mini", "deepseek-v3.2-mini")
TOKENS = (96, 97)  # a multiple of the ranks, and one that leaves a remainder; both well above index_topk 32
LAYER = {torch.float32: 5e-6, torch.float64: 1e-12}
LOGITS = {torch.float32: 2e-5, torch.float64: 1e-11}

each_mini = pytest.mark.parametrize("mini", MINIS)
each_count = pytest.mark.parametrize("count", TOKENS)
each_dtype = pytest.mark.parametrize("dtype", LAYER, ids=["float32", "float64"])


def distance(a: Tensor, b: Tensor) -> float:
    assert a.shape == b.shape
    return float((a - b).abs().max())


def id_sets(ids: Tensor) -> list[set[int]]:
    """Per row, the ids that its query may see: HF fills a short row up with later tokens, we with -1."""
    return [{i for i in row if 0 <= i <= t} for t, row in enumerate(ids.tolist())]


@each_mini
@each_count
@each_dtype
def test_every_layer_and_its_topk_equal_hf(make_pair: Callable, mini: str, count: int, dtype: torch.dtype) -> None:
    pair = make_pair(mini, dtype)
    ids = pair.tokens(count)
    hf = pair.run(ids)
    layers = list(pair.ours.layers(ids, hf.inputs))
    assert len(layers) == len(hf.outputs) == 5
    for i, layer in enumerate(layers):
        assert distance(layer.hidden, hf.outputs[i]) < LAYER[dtype], f"layer {i}"
        chosen = id_sets(layer.ids)
        assert [len(row) for row in chosen] == [min(t + 1, 32) for t in range(count)]
        assert chosen == id_sets(hf.topk[i]), f"layer {i}"


@each_mini
@each_count
@each_dtype
def test_logits_of_the_graph_equal_hf(make_pair: Callable, mini: str, count: int, dtype: torch.dtype) -> None:
    pair = make_pair(mini, dtype)
    ids = pair.tokens(count)
    hf = pair.run(ids)
    logits, topk = pair.ours.run(pair.ours.batch(ids))
    assert hf.logits.abs().max() > 2
    assert distance(logits, hf.logits) < LOGITS[dtype]
    if dtype == torch.float64:  # in float32 the layers' inputs differ, so that a near-tie could go either way
        assert [id_sets(x) for x in topk] == [id_sets(x) for x in hf.topk]


@each_mini
def test_packed_requests_and_chunks_equal_hf(make_pair: Callable, mini: str) -> None:
    """HF runs each sequence by itself; we pack two, and take one of them in two chunks over the same caches."""
    pair = make_pair(mini, torch.float64)
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


@each_mini
def test_cache_rows_equal_hf(make_pair: Callable, mini: str) -> None:
    """Latents, rotated keys and index keys themselves: of the index keys, the layers above show only the choices."""
    pair = make_pair(mini, torch.float64)
    ids = pair.tokens(97)
    with torch.no_grad():
        cache = pair.hf.model(input_ids=ids.unsqueeze(0), use_cache=True).cache
    batch = pair.ours.batch(ids)
    pair.ours.run(batch)
    for i, layer in enumerate(cache.layers):
        latent = torch.cat([layer.keys, layer.values], -1)[0, 0]
        assert distance(batch.latent_caches[i][batch.slots], latent) < 1e-11, f"layer {i}"
        assert distance(batch.index_caches[i][batch.slots], layer.indexer_keys[0]) < 1e-11, f"layer {i}"


@each_mini
def test_checkpoint_on_disk_is_per_expert(make_pair: Callable, mini: str) -> None:
    """What the loader read above is the form in which checkpoints are published."""
    pair = make_pair(mini, torch.float32)
    with safe_open(pair.hf.folder / "model.safetensors", framework="pt") as handle:
        names = set(handle.keys())
    last = f"model.layers.4.mlp.experts.{pair.ours.config.n_routed_experts - 1}"
    assert {f"{last}.{part}_proj.weight" for part in ("gate", "up", "down")} <= names
    assert not any(name.endswith(("gate_up_proj", "experts.down_proj")) for name in names)


@each_mini
def test_config_as_hf_saves_it_means_the_same(make_pair: Callable, mini: str) -> None:
    """HF writes the rope and the layer schedules out in its newer form."""
    pair = make_pair(mini, torch.float64)
    ours, saved = pair.ours, load_config(str(pair.hf.folder))
    layers = range(ours.config.num_hidden_layers)
    assert [saved.is_moe(i) for i in layers] == [ours.config.is_moe(i) for i in layers] == [False] * 2 + [True] * 3
    assert all(saved.has_indexer(i) for i in layers)
    assert softmax_scale(saved) == softmax_scale(ours.config)
    assert torch.equal(inverse_frequencies(saved)[0], inverse_frequencies(ours.config)[0])
    ids = pair.tokens(96)
    assert torch.equal(replace(ours, config=saved).logits(ids), ours.logits(ids))


class _DtypeWatch(TorchDispatchMode):
    """Notes the ops that make a float tensor other than float64."""

    def __init__(self) -> None:
        super().__init__()
        self.narrow: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.dtype != torch.float64:
                self.narrow.add(str(func))
        return result


@each_mini
def test_the_float64_oracle_is_hf_in_float64(
    make_pair: Callable, mini: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """It computes nothing in float32, as the stock model does; with the same weights it gives the same logits."""
    wide, stock = make_pair(mini, torch.float64), make_pair(mini, torch.float32)
    ids = wide.tokens(96)
    with _DtypeWatch() as watch:
        wide.run(ids)
    assert watch.narrow == set()
    with _DtypeWatch() as watch:
        run(copy.deepcopy(stock.hf.model).double(), ids)
    assert watch.narrow

    same = make_checkpoint(tmp_path_factory.mktemp("wide"), mini_config(mini), torch.float64).model
    same.load_state_dict(stock.hf.model.state_dict())
    assert 0 < distance(run(same, ids).logits, stock.run(ids).logits.double()) < 2e-5
