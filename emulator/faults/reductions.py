"""Faults of sums over ranks: twice, never, of different tokens, over another group, at the wrong moment."""

from torch import fx

from emulator.faults.fault import at, graph_fault
from emulator.faults.on_graph import GraphEdit

TWICE = "reduced_twice scaled"
ADDS = (at("input_layernorm", "add_rms_norm2"), at("model.norm", "add_rms_norm"))  # who takes an MLP's sum
SHARED = {"shared_experts": "gather_scatter"}


@graph_fault(
    cases=("prefill-attention-output-times-tp",), places=at("self_attn.o_proj", "reduce_scatter"), diagnoses=TWICE
)
def complete_rows_reduce_scattered(edit: GraphEdit) -> None:
    """o_proj makes complete rows on every rank, and a reduce_scatter sums them as if they were partial."""
    _without_cut(edit, edit.find("0.self_attn.o_proj", "slice"))
    rows = edit.find("0.self_attn.o_proj", "linear")
    edit.reroute(rows, _reduce_scatter(edit, edit.padded(rows)))


@graph_fault(
    cases=("prefill-attention-output-times-tp",), plan="tp", variants={"attention": "replicated"},
    places=at("self_attn.o_proj", "all_reduce"), diagnoses=TWICE,
)  # fmt: skip
def complete_rows_all_reduced(edit: GraphEdit) -> None:
    """o_proj holds its whole weight (disable_tp), and the all_reduce of the sharded one is still there."""
    rows = edit.find("0.self_attn.o_proj", "linear")
    edit.reroute(rows, _all_reduce(edit, rows))


@graph_fault(plan="tp", places=at("mlp.down_proj", "all_reduce"), diagnoses=TWICE)
def all_reduce_twice(edit: GraphEdit) -> None:
    """The sum of a row-parallel linear is all_reduced once more."""
    total = edit.find("0.mlp.down_proj", "all_reduce")
    edit.reroute(total, _all_reduce(edit, total))


@graph_fault(places=at("mlp.down_proj", "reduce_scatter"), diagnoses=TWICE)
def sum_scattered_twice(edit: GraphEdit) -> None:
    """The scattered sum of a row-parallel linear is gathered and reduce_scattered once more."""
    rows = edit.find("0.mlp.down_proj", "reduce_scatter")
    whole = edit.add("all_gather", rows, "tp", edit.sizes["tp"], 0)
    edit.reroute(rows, _reduce_scatter(edit, whole))


@graph_fault(
    plan="tp", layers=3, cases=("complete-moe-output-reduced-again",), places=at("mlp", "all_reduce"), diagnoses=TWICE
)
def complete_moe_output_all_reduced(edit: GraphEdit) -> None:
    """MoE output that combine has completed goes through the tp all_reduce of the all-gather variant."""
    node = edit.find("2.mlp", "unpad" if edit.is_padded else "all_gather")
    edit.reroute(node, _all_reduce(edit, node))


@graph_fault(
    layers=3, cases=("complete-moe-output-reduced-again", "dense-mlp-sums-different-tokens"),
    places=at("mlp", "all_reduce"), diagnoses="mixed_tokens pad_leaked",
)  # fmt: skip
def local_moe_output_all_reduced(edit: GraphEdit) -> None:
    """MoE output, local-token and complete, is all_reduced over tp: rows of different tokens are summed."""
    node = edit.find("2.mlp", "add")
    edit.reroute(node, _all_reduce(edit, node))


@graph_fault(
    cases=("dense-mlp-sums-different-tokens",), places=at("mlp.down_proj", "all_reduce"), diagnoses="mixed_tokens"
)
def dense_mlp_sums_different_tokens(edit: GraphEdit) -> None:
    """A dense MLP keeps feature shards and an all_reduce while its input is local-token."""
    _on_local_tokens(edit, "0.mlp")


@graph_fault(
    layers=3, variants=SHARED, cases=("dense-mlp-sums-different-tokens",),
    places=at("mlp.shared_experts.down_proj", "all_reduce"), diagnoses="mixed_tokens",
)  # fmt: skip
def shared_experts_sum_different_tokens(edit: GraphEdit) -> None:
    """The shared expert keeps feature shards and an all_reduce on local-token rows (the RFC's literal row)."""
    _on_local_tokens(edit, "2.mlp.shared_experts")


@graph_fault(plan="tp", places=ADDS, diagnoses="not_reduced")
def all_reduce_missing(edit: GraphEdit) -> None:
    """The all_reduce behind a row-parallel linear is left out: the residual takes one rank's share of the sum."""
    edit.without(edit.find("0.mlp.down_proj", "all_reduce"))


@graph_fault(places=at("mlp.down_proj", "slice"), diagnoses="not_reduced")
def partial_sums_sliced(edit: GraphEdit) -> None:
    """Partial sums are cut to local tokens by a slice where a reduce_scatter belongs."""
    edit.replace(edit.find("0.mlp.down_proj", "reduce_scatter"), "slice", "tp", edit.sizes["tp"], 0)


@graph_fault(
    layers=3, variants=SHARED, cases=("needed-moe-all-reduce-missing",),
    places=at("mlp.shared_experts.down_proj", "slice"), diagnoses="not_reduced",
)  # fmt: skip
def shared_expert_sum_missing(edit: GraphEdit) -> None:
    """The sharded shared expert's partial sums are taken for complete, beside a routed part that is right."""
    edit.replace(edit.find("2.mlp.shared_experts.down_proj", "reduce_scatter"), "slice", "tp", edit.sizes["tp"], 0)


@graph_fault(places=at("model.embed_tokens", "slice"), diagnoses="not_reduced")
def embedding_not_reduced(edit: GraphEdit) -> None:
    """Rows of the vocabulary-parallel embedding are sliced before they are summed over the ranks."""
    edit.replace(edit.find("model.embed_tokens", "reduce_scatter"), "slice", "tp", edit.sizes["tp"], 0)


@graph_fault(plan="tp", layers=2, places=at("input_layernorm", "add_rms_norm2"), diagnoses="not_reduced")
def norm_before_reduction(edit: GraphEdit) -> None:
    """The norm is applied to partial sums and its output is all_reduced: a norm is not linear."""
    edit.without(edit.find("0.mlp.down_proj", "all_reduce"))
    normed = edit.find("1.input_layernorm", "getitem", 0)
    edit.reroute(normed, _all_reduce(edit, normed))


@graph_fault(
    plan="tp", ep_parts=2, places=(at("mlp.down_proj", "all_reduce"), *ADDS), diagnoses="wrong_group not_reduced"
)
def reduced_over_ep_group(edit: GraphEdit) -> None:
    """A tp sum runs over the smaller ep group."""
    edit.replace(edit.find("0.mlp.down_proj", "all_reduce"), "all_reduce", "ep", edit.sizes["ep"])


@graph_fault(places=at("mlp.down_proj"))
def all_reduce_then_slice(edit: GraphEdit) -> None:
    """A partial sum becomes local-token by all_reduce and slice in place of reduce_scatter: right values, twice the
    bytes."""
    rows = edit.find("0.mlp.down_proj", "reduce_scatter")
    partial = edit.find("0.mlp.down_proj", "linear")
    edit.reroute(partial, _all_reduce(edit, partial))
    edit.replace(rows, "slice", "tp", edit.sizes["tp"], 0)


# --- edits -----------------------------------------------------------------------------------------------------------


def _all_reduce(edit: GraphEdit, source: fx.Node) -> fx.Node:
    return edit.add("all_reduce", source, "tp", edit.sizes["tp"])


def _reduce_scatter(edit: GraphEdit, source: fx.Node) -> fx.Node:
    return edit.add("reduce_scatter", source, "tp", edit.sizes["tp"], 0)


def _without_cut(edit: GraphEdit, cut: fx.Node) -> None:
    source = edit.without(cut)
    if edit.is_padded:
        edit.without(source)


def _on_local_tokens(edit: GraphEdit, mlp: str) -> None:
    """Feature-sharded MLP without its gather, and all_reduce for its reduce_scatter."""
    if edit.is_padded:
        edit.without(edit.find(mlp, "unpad"))
    edit.without(edit.find(mlp, "all_gather"))
    if edit.is_padded:
        edit.without(edit.find(f"{mlp}.down_proj", "pad"))
    edit.replace(edit.find(f"{mlp}.down_proj", "reduce_scatter"), "all_reduce", "tp", edit.sizes["tp"])
