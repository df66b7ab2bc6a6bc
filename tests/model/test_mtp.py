"""Multi-token prediction: the formula of DeepSeek-V3's report around a decoder layer, and a Program that is otherwise
the same."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, fx

from emulator.model.batch import Request, batch_inputs
from emulator.model.config import load_config, parse_config
from emulator.model.decoder import DecoderLayer
from emulator.model.layers import ProgramOptions
from emulator.model.program import build_program
from emulator.model.weights import Checkpoint, seeded, weight_groups
from emulator.model.workload import build_workload
from emulator.verify.reference import run_reference

WITH = ProgramOptions(mtp=True)
F64 = torch.float64


def _described(nodes: list[fx.Node]) -> list[tuple]:
    return [(n.op, n.name, n.target, str(n.args), str(n.kwargs), n.meta["module"]) for n in nodes]


def _weights(program) -> dict[str, Tensor]:
    return {k: v for group in weight_groups(program, seeded(3), F64) for k, v in group.items()}


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


@pytest.mark.parametrize("model", ["glm-5.1-mini", "deepseek-v3.2-mini", "deepseek-v3-mini"])
def test_the_model_before_it_is_node_for_node_the_same(model):
    config = load_config(model)
    plain, with_mtp = build_program(config), build_program(config, WITH)
    nodes = [n for n in with_mtp.graph.nodes if n.target != "next_ids"]
    same = len(plain.graph.nodes) - 1  # all but the output
    assert _described(nodes[:same]) == _described(list(plain.graph.nodes)[:-1])
    behind = {n.meta["module"] for n in nodes[same:-1]}
    # what stands behind lm_head is the layer's, and the numbers that the model's layers are given as well
    assert {m for m in behind if not m.startswith(f"model.layers.{config.num_hidden_layers}")} == set()
    assert "next_ids" not in {n.target for n in plain.graph.nodes}
    logits, drafts = with_mtp.graph.output_node().all_input_nodes
    assert logits.name == plain.graph.output_node().args[0].name
    assert drafts.meta["module"] == f"model.layers.{config.num_hidden_layers}.shared_head.head"


@pytest.mark.parametrize("model", ["glm-5.1-mini", "deepseek-v3-mini"])
def test_its_logits_are_the_formulas(model):
    config = load_config(model).with_layers(3)
    program = build_program(config, WITH)
    weights = _weights(program)
    whole, eps, number = config.with_mtp_layers(1), config.rms_norm_eps, config.num_hidden_layers
    made = build_workload(whole, [[Request(5), Request(3)]], seed=1, dp_index=0, dtype=F64, block_size=16)
    batch = made.steps[0]
    values = run_reference(program, weights, batch_inputs(batch), keep=None)
    logits, drafts = (n.name for n in program.graph.output_node().all_input_nodes)
    [into_head] = [n.args[0].name for n in program.graph.nodes if n.name == logits]

    own = {k.removeprefix(f"model.layers.{number}."): w for k, w in weights.items() if f"layers.{number}." in k}
    embedded = own["embed_tokens.weight"][batch.next_ids]
    hidden = values[into_head]
    joined = [_norm(embedded, own["enorm.weight"], eps), _norm(hidden, own["hnorm.weight"], eps)]
    x = torch.cat(joined, -1) @ own["eh_proj.weight"].t()
    layer = DecoderLayer(whole, number, ProgramOptions())
    layer.load_state_dict({k: w for k, w in own.items() if k in dict(layer.named_parameters())}, assign=True)
    empty = build_workload(whole, [[Request(5), Request(3)]], seed=1, dp_index=0, dtype=F64, block_size=16).steps[0]
    with torch.no_grad():
        own_batch = replace(batch, latent_caches=empty.latent_caches, index_caches=empty.index_caches)
        output, residual, _ = layer(x, None, None, weights["model.rotary_emb.inv_freq"], own_batch)
    expected = _norm(output + residual, own["shared_head.norm.weight"], eps) @ own["shared_head.head.weight"].t()
    assert drafts != logits
    torch.testing.assert_close(values[drafts], expected, rtol=0, atol=1e-11)
    torch.testing.assert_close(
        batch.latent_caches[number], empty.latent_caches[number], rtol=0, atol=1e-11, equal_nan=True
    )
    assert not batch.latent_caches[number].isnan().all()
    assert len(batch.latent_caches) == number + 1


def test_a_checkpoint_holds_it_as_the_layer_after_the_last(tiny, save_checkpoint):
    program = build_program(parse_config(tiny, "test"), WITH)
    weights = _weights(program)
    stored = {}
    for name, weight in weights.items():
        if ".mlp.experts." in name:
            stored[name.removesuffix(".weight")] = weight
        elif not name.endswith("inv_freq"):
            stored[name] = weight
    assert stored["model.layers.2.eh_proj.weight"].shape == (12, 24)
    read = {k: v for g in weight_groups(program, Checkpoint(save_checkpoint(stored)), F64) for k, v in g.items()}
    assert all(torch.equal(read[name], weights[name]) for name in weights)


def test_its_kinds_of_layer():
    config = load_config("glm-5.1-mini").model_copy(update={"index_topk_freq": 3, "first_k_dense_replace": 9})
    longer = config.with_mtp_layers(1)
    assert [longer.is_moe(i) for i in range(6)] == [False] * 5 + [True]
    # offset 2: max(i - 1, 0) % 3 == 0
    assert [longer.has_indexer(i) for i in range(6)] == [True, True, False, False, True, True]
    assert not any(load_config("deepseek-v3-mini").with_mtp_layers(1).has_indexer(i) for i in range(6))
    assert config.with_mtp_layers(0) is config


def test_it_stays_float_whatever_the_scheme():
    quantised = build_program(load_config("glm-5.1-mini"), replace(WITH, quant="w8a8")).quantised
    assert "model.layers.4.self_attn.q_a_proj" in quantised
    assert not [m for m in quantised if m.startswith("model.layers.5.")]
