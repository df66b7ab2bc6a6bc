"""Faults of where tokens are full and where they are local: gathers and slices too many, missing, of the wrong dim."""

import torch
from torch import fx

from emulator.faults.fault import Case, Place, at, graph_fault, no_padding
from emulator.faults.on_graph import GraphEdit
from emulator.layout.plan import layer_of


@graph_fault(
    layers=2, cases=("double-gather-at-dense-moe-boundary",),
    places=at("input_layernorm", "add_rms_norm2", "all_gather"), diagnoses="residual_gathered mixed_tokens",
)  # fmt: skip
def residual_gathered(edit: GraphEdit) -> None:
    """The residual (output 1 of a norm) is gathered between layers, and full rows meet local ones (RFC error 3)."""
    residual = edit.find("0.post_attention_layernorm", "getitem", 1)
    norm = edit.find("1.input_layernorm", "add_rms_norm2")
    edit.reroute(residual, edit.gather(residual), norm)


@graph_fault(
    layers=3, cases=("double-gather-at-dense-moe-boundary",),
    places=(at("self_attn", "all_gather", "rope"), at("self_attn.cache", "cache_write")), diagnoses="residual_gathered",
)  # fmt: skip
def double_gather_at_dense_moe_boundary(edit: GraphEdit) -> None:
    """A second all_gather between a dense and an MoE layer: full rows are gathered again and grow tp times."""
    full = edit.find("2.self_attn", "unpad" if edit.is_padded else "all_gather")
    edit.reroute(full, edit.add("all_gather", full, "tp", edit.sizes["tp"], 0))


@graph_fault(layers=2, cases=("double-gather-at-dense-moe-boundary",), places=at("self_attn", "all_gather"))
def rows_inflated_and_cut(edit: GraphEdit) -> None:
    """Full rows are gathered again, grow tp times (4096 to 65536 at tp 16) and are cut back: right values, tp times the
    bytes."""
    rows = edit.find("1.self_attn", "all_gather")
    again = edit.add("all_gather", rows, "tp", edit.sizes["tp"], 0)
    if edit.is_padded:
        edit.reroute(rows, again)
    else:
        edit.reroute(rows, edit.add("unpad", again, 0, edit.tokens.real))


@graph_fault(layers=3, places=at("mlp.gate", "all_gather", "moe_gate"))
def full_tokens_into_gate(edit: GraphEdit) -> None:
    """Full tokens are restored before the MoE gate and its logits are cut again (RFC error 1): right values, tp times
    the work."""
    gate = edit.find("2.mlp.gate", "moe_gate")
    source = gate.args[0]
    edit.reroute(source, edit.gather(source), gate)
    edit.reroute(gate, edit.cut(gate))


@graph_fault(layers=3, places=(at("mlp.shared_experts", "all_gather"), at("mlp.shared_experts.gate_proj")))
def full_tokens_into_shared_experts(edit: GraphEdit) -> None:
    """Full tokens are restored before the shared expert and its output is cut again (RFC error 1): right values, tp
    times the work."""
    gate, up = (edit.find(f"2.mlp.shared_experts.{name}", "linear") for name in ("gate_proj", "up_proj"))
    source = gate.args[0]
    edit.reroute(source, edit.gather(source), gate, up)
    down = edit.find("2.mlp.shared_experts.down_proj", "linear")
    edit.reroute(down, edit.cut(down))


@graph_fault(
    layers=2, cases=("layer-boundary-leaves-and-reenters-sp",),
    places=(at("mlp.down_proj"), at("mlp"), at("input_layernorm")),
)  # fmt: skip
def gather_and_slice_between_layers(edit: GraphEdit) -> None:
    """Each layer boundary restores full tokens and cuts them again: right values, two transitions too many."""
    rows = edit.find("0.mlp.down_proj", "reduce_scatter")
    edit.reroute(rows, edit.cut(edit.gather(rows)))


@graph_fault(places=(at("self_attn.o_proj"), at("post_attention_layernorm", "slice")))
def o_proj_on_full_tokens(edit: GraphEdit) -> None:
    """The rewrite does not fire with a replicated o_proj: it runs on all tokens on every rank and is cut afterwards."""
    cut = edit.find("0.self_attn.o_proj", "slice")
    source = edit.without(cut)
    if edit.is_padded:
        edit.without(source)
    rows = edit.find("0.self_attn.o_proj", "linear")
    edit.reroute(rows, edit.cut(rows))


@graph_fault(
    places=(at("self_attn", "rope"), at("self_attn.kv_row", "cat"), at("self_attn.q_a_proj", "linear")),
    diagnoses="not_gathered mixed_tokens",
)  # fmt: skip
def local_tokens_into_attention(edit: GraphEdit) -> None:
    """The gather before attention is missing: local tokens go straight into it (RFC error 2)."""
    if edit.is_padded:
        edit.without(edit.find("0.self_attn", "unpad"))
    edit.without(edit.find("0.self_attn", "all_gather"))


# of one token, the joined row of a rank without tokens is one that no hypothesis knows: the statistics are told
@graph_fault(
    mtp=True, variants={"embedding": "replicated"}, cases=("draft-inputs-split-unlike-target",),
    places=(at("embed_tokens"), at("enorm", "rms_norm"), at("hnorm", "rms_norm"), Place("model.layers.*")),
    diagnoses="not_sliced mixed_tokens unknown",
)  # fmt: skip
def draft_embedding_left_full(edit: GraphEdit) -> None:
    """The draft layer's embeddings are those of all tokens, the hidden states that they are joined with are local."""
    cut = edit.find(f"{_draft(edit)}.embed_tokens", "slice")
    source = edit.without(cut)
    if edit.is_padded:
        edit.without(source)


@graph_fault(places=(at("lm_head", "lm_head", "all_gather"),), diagnoses="not_gathered mixed_tokens")
def lm_head_on_local_tokens(edit: GraphEdit) -> None:
    """No gather stands before lm_head: each rank's vocabulary shard meets its own tokens, and the shards of different
    tokens are joined."""
    if edit.is_padded:
        edit.without(edit.find("lm_head", "unpad"))
    edit.without(edit.find("lm_head", "all_gather", 0))


@graph_fault(places=at("lm_head", "all_gather"), diagnoses="wrong_dim")
def logits_gathered_along_tokens(edit: GraphEdit) -> None:
    """Vocabulary shards of the logits are joined along the tokens."""
    node = edit.find("lm_head", "all_gather", 1)
    node.args = (*node.args[:3], 0)


@graph_fault(places=(at("self_attn", "all_gather", "unpad"), at("self_attn.q_a_proj", "linear")), diagnoses="wrong_dim")
def hidden_gathered_along_features(edit: GraphEdit) -> None:
    """Local-token rows are joined along the features before attention."""
    node = edit.find("0.self_attn", "all_gather")
    node.args = (*node.args[:3], 1)


@graph_fault(
    cases=("full-head-rows-into-sharded-o-proj",), places=at("self_attn.o_proj", "slice", "linear"),
    diagnoses="feature_slice",
)  # fmt: skip
def heads_sliced_instead_of_tokens(edit: GraphEdit) -> None:
    """The cut before a replicated o_proj takes heads in place of tokens."""
    node = edit.find("0.self_attn.o_proj", "slice")
    node.args = (*node.args[:3], 1)


@graph_fault(
    cases=("rope-positions-and-query-in-different-layouts",),
    places=at("self_attn", "rope", "slice", "pad"), diagnoses="wrong_positions",
)  # fmt: skip
def positions_cut_queries_full(edit: GraphEdit) -> None:
    """Positions are cut to local tokens, the queries that they rotate are full."""
    rope = edit.find("0.self_attn", "rope")
    positions = rope.args[1]
    with edit.graph.inserting_before(rope):
        padded = edit.graph.call_function(torch.ops.emulator.pad, (positions, 0, edit.tokens.padded))
        own = edit.graph.call_function(torch.ops.emulator.slice, (padded, "tp", edit.sizes["tp"], 0))
    rope.replace_input_with(positions, own)


@graph_fault(
    places=(at("mlp", "all_gather"), at("mlp.gate_proj", "linear")), diagnoses="pad_leaked", no_effect=no_padding
)
def pad_rows_into_dense_mlp(edit: GraphEdit) -> None:
    """The padding of gathered rows is not removed before the dense MLP."""
    if edit.is_padded:
        edit.without(edit.find("0.mlp", "unpad"))


# no hypothesis speaks of zeros, so the statistics are the right answer
@graph_fault(layers=2, places=at("input_layernorm", "add_rms_norm2"), diagnoses="unknown")
def residual_dropped(edit: GraphEdit) -> None:
    """The residual is lost between two layers: the next norm adds zeros."""
    _instead_of_residual(edit, edit.call(torch.mul, edit.find("0.post_attention_layernorm", "getitem", 1), 0.0))


@graph_fault(layers=2, places=at("input_layernorm", "add_rms_norm2"), diagnoses="stale_rows")
def residual_of_earlier_block(edit: GraphEdit) -> None:
    """A layer adds the residual from before the last attention block."""
    _instead_of_residual(edit, edit.find("model.embed_tokens", "reduce_scatter"))


@graph_fault(places=at("input_layernorm", "rms_norm"), diagnoses="wrong_eps")
def norm_eps_wrong(edit: GraphEdit) -> None:
    """A norm uses 1e-6 where the config says 1e-5, or the reverse."""
    norm = edit.find("0.input_layernorm", "rms_norm")
    norm.args = (*norm.args[:2], 1e-6 if norm.args[2] == 1e-5 else 1e-5)


def _same_eps(case: Case) -> str | None:
    return "rms_norm_eps is 1e-6, which the latent norms have anyway" if case.config.rms_norm_eps == 1e-6 else None


@graph_fault(places=at("self_attn.kv_a_layernorm", "rms_norm"), diagnoses="wrong_eps", no_effect=_same_eps)
def latent_norm_with_config_eps(edit: GraphEdit) -> None:
    """kv_a_layernorm uses the config's rms_norm_eps in place of 1e-6."""
    norm = edit.find("0.self_attn.kv_a_layernorm", "rms_norm")
    norm.args = (*norm.args[:2], edit.find("0.input_layernorm", "rms_norm").args[2])


def _draft(edit: GraphEdit) -> int:
    """Number of the multi-token-prediction layer, the only one with an eh_proj."""
    [number] = {layer_of(n.meta["module"]) for n in edit.graph.nodes if n.meta["module"].endswith(".eh_proj")}
    assert number is not None
    return number


def _instead_of_residual(edit: GraphEdit, other: fx.Node) -> None:
    norm = edit.find("1.input_layernorm", "add_rms_norm2")
    norm.args = (norm.args[0], other, *norm.args[2:])
