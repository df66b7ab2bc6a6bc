"""Rank graphs: published collective counts at full size, who talks, what is shared, and what is refused.

Counts: reference/tensorcast_observed.md (GLM-5.1, prefill 4096, tp16 ep16) and the RFC's section 3.3.1. V3.2 has 61
layers, 3 of them dense, so 61 stands for 78 and 58 for 75.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterator

import pytest
from torch import fx
from torch.distributed.tensor.placement_types import Partial, Replicate, Shard

from emulator.errors import LayoutError, UsageError
from emulator.layout.lowering import lower
from emulator.layout.plan import load_plan, module_pattern
from emulator.layout.rank_graph import RankGraph
from emulator.ops.registry import op_name
from emulator.ops.transition import TRANSITIONS

R, LOCAL, PARTIAL = Replicate(), Shard(0), Partial("sum")
FULL_SIZE = {"tp": 16, "ep": 16, "tokens": 4096}
MODELS = [pytest.param("glm-5.1", 78, id="glm-5.1"), pytest.param("deepseek-v3.2", 61, id="deepseek-v3.2")]


def transitions(graph: RankGraph, op: str | None = None, traffic: str = "payload") -> Iterator[fx.Node]:
    for node in graph.graph.nodes:
        name = op_name(node.target)
        if name in TRANSITIONS and op in (None, name) and node.meta["traffic"] == traffic:
            yield node


def count(graph: RankGraph, op: str, *args: object) -> int:
    """Transition nodes of an op whose arguments behind the tensor start with `args`."""
    return sum(node.args[1 : 1 + len(args)] == args for node in transitions(graph, op))


def modules(graph: RankGraph, op: str, *args: object) -> Counter[str]:
    found = (n for n in transitions(graph, op) if n.args[1 : 1 + len(args)] == args)
    return Counter(module_pattern(n.meta["module"]) for n in found)


# --- published counts ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("model", "layers"), MODELS)
def test_counts_of_dsa_cp(model: str, layers: int, lowered: Callable[..., RankGraph]) -> None:
    graph, moe = lowered(model, "dsa_cp", **FULL_SIZE), layers - 3
    assert graph.violations == []
    assert count(graph, "reduce_scatter", "tp", 16, 0) == 1 + 3  # embedding, dense MLPs
    assert count(graph, "all_gather", "tp", 16, 0) == layers + 3 + 1  # into attention, into dense MLPs, into lm_head
    assert count(graph, "all_gather", "tp", 16, 1) == 1  # logits
    assert count(graph, "all_reduce") == 0
    assert count(graph, "slice", "tp", 16, 0) == layers  # attention output before o_proj
    assert sum("ep" in n.args for n in transitions(graph, "all_to_all_rows")) == 2 * moe
    allowed = {"reduce_scatter", "all_gather", "slice", "all_to_all_rows"}
    assert {op_name(n.target) for n in transitions(graph)} == allowed  # 4096 divides by 16: no pad, no unpad


@pytest.mark.parametrize(("model", "layers"), MODELS)
def test_counts_of_the_tp_baseline(model: str, layers: int, lowered: Callable[..., RankGraph]) -> None:
    graph, moe = lowered(model, "tp", **FULL_SIZE), layers - 3
    assert graph.violations == []
    assert count(graph, "all_reduce", "tp", 16) == layers + 3 + 1  # o_proj, dense MLPs, row-parallel embedding
    assert count(graph, "all_gather", "tp", 16, 0) == moe  # MoE exit
    assert count(graph, "all_gather", "tp", 16, 1) == 1
    assert count(graph, "reduce_scatter") == 0
    assert sum("ep" in n.args for n in transitions(graph, "all_to_all_rows")) == 2 * moe


@pytest.mark.parametrize(("model", "layers"), MODELS)
def test_counts_of_sequence_parallel(model: str, layers: int, lowered: Callable[..., RankGraph]) -> None:
    graph = lowered(model, "sp", **FULL_SIZE)
    assert graph.violations == []
    assert count(graph, "reduce_scatter", "tp", 16, 0) == layers + 3 + 1  # every all_reduce of tp, rewritten
    assert count(graph, "all_gather", "tp", 16, 0) == layers + 3 + 1
    assert count(graph, "all_reduce") == 0
    assert count(graph, "slice") == 0


def test_a_sharded_shared_expert_costs_a_gather_and_a_scatter_per_layer(lowered: Callable[..., RankGraph]) -> None:
    graph = lowered("glm-5.1", "dsa_cp", **FULL_SIZE, shared_experts="gather_scatter")
    assert graph.violations == []
    assert modules(graph, "reduce_scatter", "tp", 16, 0)["model.layers.*.mlp.shared_experts.down_proj"] == 75
    assert modules(graph, "all_gather", "tp", 16, 0)["model.layers.*.mlp.shared_experts"] == 75
    assert count(graph, "all_reduce") == 0


def test_the_embedding_changes_nothing_inside_the_layers(lowered: Callable[..., RankGraph]) -> None:
    # TensorCast's rewrite silently did not fire without the embedding's all_reduce (tensorcast_observed, deviation 1)
    row = lowered("glm-5.1", "dsa_cp", **FULL_SIZE)
    whole = lowered("glm-5.1", "dsa_cp", **FULL_SIZE, embedding="replicated")
    assert count(whole, "reduce_scatter", "tp", 16, 0) == 3
    assert count(whole, "slice", "tp", 16, 0) == 78 + 1  # and the embedding's rows are cut
    assert inside_layers(whole) == inside_layers(row)
    assert len({layer for layer, *_ in inside_layers(row)}) == 78


def inside_layers(graph: RankGraph) -> list[tuple[str, str, str, str]]:
    """(layer, module, port, layout) of every token value at a boundary inside the decoder layers, in order."""
    nodes = {node.name: node for node in graph.graph.nodes}
    found = []
    for boundary in graph.boundaries:
        layout = nodes[boundary.node].meta["layout"]
        match = re.match(r"model\.layers\.(\d+)", boundary.module)
        if match and layout.kind == "token":
            found.append((match[1], boundary.module, boundary.port, str(layout)))
    return found


# --- the RFC's boundary table ----------------------------------------------------------------------------------------

RFC_TABLE = [
    ("input_layernorm", "input", {"local-token"}),
    ("self_attn", "input", {"full-token"}),
    ("self_attn.q_a_proj", "input", {"full-token"}),
    ("self_attn.kv_a_proj_with_mqa", "input", {"full-token"}),
    ("self_attn.indexer", "input", {"full-token"}),
    ("self_attn.attn", "output", {"full-token"}),
    ("self_attn.o_proj", "input", {"local-token"}),
    ("self_attn.o_proj", "output", {"local-token"}),
    ("post_attention_layernorm", "input", {"local-token"}),
    ("post_attention_layernorm", "output", {"local-token"}),
    ("post_attention_layernorm", "output1", {"local-token"}),
    ("mlp.gate", "input", {"local-token"}),
    ("mlp.topk", "output", {"local-token"}),
    ("mlp.experts", "input", {"local-token"}),
    ("mlp.experts", "output", {"local-token"}),
    ("mlp.shared_experts", "output", {"local-token"}),
    ("mlp", "output", {"local-token"}),
]


@pytest.mark.parametrize(("model", "layers"), MODELS)
@pytest.mark.parametrize(("module", "port", "layouts"), RFC_TABLE, ids=[f"{m}-{p}" for m, p, _ in RFC_TABLE])
def test_boundaries_of_dsa_cp(
    model: str, layers: int, module: str, port: str, layouts: set[str], lowered: Callable[..., RankGraph]
) -> None:
    found = inside_layers(lowered(model, "dsa_cp", **FULL_SIZE))
    rows = [(layer, layout) for layer, name, p, layout in found if name.endswith(f".{layer}.{module}") and p == port]
    assert {layout for _, layout in rows} == layouts
    is_moe = module.startswith("mlp.")
    assert len({layer for layer, _ in rows}) == (layers - 3 if is_moe else layers)


def test_heads_are_sharded_under_sp(lowered: Callable[..., RankGraph]) -> None:
    found = inside_layers(lowered("glm-5.1", "sp", **FULL_SIZE))
    assert {x for _, name, port, x in found if name.endswith(".attn") and port == "output"} == {"shard(1)"}


# --- who talks -------------------------------------------------------------------------------------------------------


def test_collectives_name_the_module_that_wanted_them(lowered: Callable[..., RankGraph]) -> None:
    dsa, tp = lowered("glm-5.1", "dsa_cp", **FULL_SIZE), lowered("glm-5.1", "tp", **FULL_SIZE)
    assert modules(dsa, "all_gather", "tp", 16, 0) == {
        "model.layers.*.self_attn": 78, "model.layers.*.mlp": 3, "lm_head": 1,
    }  # fmt: skip
    assert modules(dsa, "all_gather", "tp", 16, 1) == {"lm_head": 1}
    assert modules(dsa, "slice") == {"model.layers.*.self_attn.o_proj": 78}
    assert modules(dsa, "reduce_scatter") == {"model.embed_tokens": 1, "model.layers.*.mlp.down_proj": 3}
    assert modules(dsa, "all_to_all_rows") == {
        "model.layers.*.mlp.experts.gate_up_proj": 75, "model.layers.*.mlp.experts.combine": 75,
    }  # fmt: skip
    assert modules(tp, "all_reduce") == {
        "model.embed_tokens": 1, "model.layers.*.self_attn.o_proj": 78, "model.layers.*.mlp.down_proj": 3,
    }  # fmt: skip
    assert modules(tp, "all_gather", "tp", 16, 0) == {"model.layers.*.mlp": 75}


def test_consumers_share_a_gather(lowered: Callable[..., RankGraph]) -> None:
    # q_a_proj, kv_a_proj, the indexer's key and its query side all read the one gathered value
    for node in transitions(lowered("glm-5.1", "dsa_cp", **FULL_SIZE), "all_gather"):
        module = node.meta["module"]
        if module.endswith("self_attn"):
            users = {u.meta["module"].removeprefix(module + ".") for u in node.users}
            assert users == {"q_a_proj", "kv_a_proj_with_mqa", "indexer.wk", "indexer"}
        elif module.endswith("mlp"):
            assert {u.meta["module"].removeprefix(module + ".") for u in node.users} == {"gate_proj", "up_proj"}


@pytest.mark.parametrize("plan", ["sp", "dsa_cp"])
@pytest.mark.parametrize("embedding", ["row", "replicated"])
def test_the_residual_is_never_gathered(plan: str, embedding: str, lowered: Callable[..., RankGraph]) -> None:
    # output 1 of the norms (the 4096 -> 65536 bug), and the embedding that is layer 0's residual
    graph = lowered("glm-5.1", plan, **FULL_SIZE, embedding=embedding)
    residuals = set()
    for node in graph.graph.nodes:
        if op_name(node.target) in ("add_rms_norm2", "add_rms_norm"):
            residuals.add(node.args[1])
            assert node.args[1].meta["layout"].on("tp") == LOCAL
    assert (
        len(residuals) == 2 * 78
    )  # two per layer: the first layer's own norm starts the chain, the final norm ends it
    gathered = {node.args[0] for node in transitions(graph, "all_gather")}
    assert not gathered & residuals


@pytest.mark.parametrize("plan", ["tp", "sp", "dsa_cp"])
def test_one_rank_needs_no_transition(plan: str, lowered: Callable[..., RankGraph], program_of) -> None:
    graph = lowered("glm-5.1-mini", plan, tp=1, ep=1, tokens=13)
    assert not [n for n in graph.graph.nodes if op_name(n.target) in TRANSITIONS]
    program = program_of("glm-5.1-mini")
    targets = [str(n.target) for n in program.graph.nodes if n.op != "output"]
    assert [str(n.target) for n in graph.graph.nodes if n.op != "output"] == targets


@pytest.mark.parametrize("tokens", [9, 3, 1])
def test_pads_and_unpads_come_in_the_right_places(tokens: int, lowered: Callable[..., RankGraph]) -> None:
    graph = lowered("glm-5.1-mini", "dsa_cp", tp=4, ep=4, tokens=tokens)
    padded = -(-tokens // 4) * 4
    for node in transitions(graph):
        name = op_name(node.target)
        if name == "reduce_scatter" or (name == "slice" and node.args[3] == 0):
            assert op_name(node.args[0].target) == "pad"
            assert node.args[0].args[1:] == (0, padded)
        if name == "all_gather" and node.args[3] == 0:
            assert [op_name(u.target) for u in node.users] == ["unpad"]
            assert next(iter(node.users)).args[1:] == (0, tokens)
            assert next(iter(node.users)).meta["module"] == node.meta["module"]  # one transition, one requester
    assert count(graph, "pad") == count(graph, "reduce_scatter") + count(graph, "slice")
    assert count(graph, "unpad") == count(graph, "all_gather", "tp", 4, 0)


def test_the_mask_and_routing_metadata_are_not_payload(lowered: Callable[..., RankGraph]) -> None:
    graph = lowered("glm-5.1-mini", "dsa_cp", tp=4, ep=4, tokens=16)
    # 3 MoE layers: one token mask for all of them, one row of counts each
    assert [op_name(n.target) for n in transitions(graph, traffic="metadata")].count("slice") == 1
    assert [op_name(n.target) for n in transitions(graph, traffic="metadata")].count("all_to_all") == 3
    assert count(graph, "slice") == 5  # one per layer, before o_proj


# --- weights ---------------------------------------------------------------------------------------------------------


def test_heads_that_do_not_divide_are_named(program_of) -> None:
    # 312 = 24 * 13 vocabulary rows do divide by 13; 24 heads do not
    with pytest.raises(UsageError) as error:
        lower(program_of("glm-5.1-mini"), load_plan("tp"), {"tp": 13, "ep": 1}, 26)
    text = str(error.value)
    assert "\n" not in text
    assert "self_attn.q_b_proj.weight" in text
    assert "24 heads" in text
    assert "tp 13" in text


def test_experts_that_do_not_divide_are_named(program_of) -> None:
    with pytest.raises(UsageError, match=r"mlp\.experts") as error:
        lower(program_of("glm-5.1-mini"), load_plan("dsa_cp"), {"tp": 2, "ep": 5}, 26)
    assert "48" in str(error.value)
    assert "ep 5" in str(error.value)


def test_heads_are_split_whole(program_of) -> None:
    # 24 heads of 28 = 672 rows also divide by 16 (42 rows), but 24 heads do not divide by 16
    program = program_of("glm-5.1-mini", 3, vocab_size=320, intermediate_size=256)
    with pytest.raises(UsageError, match="24 heads"):
        lower(program, load_plan("sp"), {"tp": 16, "ep": 1}, 32)
    lower(program, load_plan("dsa_cp"), {"tp": 16, "ep": 1}, 32)  # all heads on every rank: nothing to split


BIASES = [
    ("tp", PARTIAL, 0),  # o_proj's product is partial, so its bias counts once over the ranks
    ("sp", PARTIAL, 0),
    ("dsa_cp", R, 0),  # whole o_proj
]


@pytest.mark.parametrize(("plan", "o_proj", "violations"), BIASES, ids=[b[0] for b in BIASES])
def test_attention_bias_counts_once(plan: str, o_proj: object, violations: int, program_of) -> None:
    program = program_of("glm-5.1-mini", 3, attention_bias=True)
    graph = lower(program, load_plan(plan), {"tp": 4, "ep": 1}, 16)
    assert len(graph.violations) == violations
    biases = {n.target: n.meta["layout"].on("tp") for n in graph.graph.nodes if str(n.target).endswith(".bias")}
    biases = {k: v for k, v in biases.items() if "k_norm" not in k}
    assert len(biases) == 3 * 3  # q_a_proj, kv_a_proj_with_mqa, o_proj in 3 layers
    for name, placement in biases.items():
        assert placement == (o_proj if "o_proj" in name else R), name


# --- refused ---------------------------------------------------------------------------------------------------------


def test_the_rfcs_literal_shared_expert_is_refused_by_name(lowered: Callable[..., RankGraph]) -> None:
    graph = lowered("glm-5.1", "dsa_cp", **FULL_SIZE, shared_experts="allreduce_local")
    first = graph.violations[0]
    assert first.module == "model.layers.3.mlp.shared_experts.gate_proj"  # the first MoE layer
    assert first.op == "linear"
    assert first.found == "local-token x shard(0) on tp"
    assert {module_pattern(v.module) for v in graph.violations} == {
        "model.layers.*.mlp.shared_experts.gate_proj", "model.layers.*.mlp.shared_experts.up_proj",
    }  # fmt: skip
    assert len({v.module for v in graph.violations}) == 2 * 75
    assert modules(graph, "all_reduce") == {"model.layers.*.mlp.shared_experts.down_proj": 75}  # as TensorCast counts


def test_a_local_all_reduce_in_the_dense_mlp_is_refused_by_name(lowered: Callable[..., RankGraph]) -> None:
    graph = lowered("glm-5.1", "dsa_cp", **FULL_SIZE, dense_mlp="allreduce_local")
    assert graph.violations[0].module == "model.layers.0.mlp.gate_proj"
    assert {v.module.split(".")[2] for v in graph.violations} == {"0", "1", "2"}
    assert modules(graph, "all_reduce") == {"model.layers.*.mlp.down_proj": 3}


def test_a_violation_reads_as_one_line(lowered: Callable[..., RankGraph]) -> None:
    text = str(lowered("glm-5.1", "dsa_cp", **FULL_SIZE, dense_mlp="allreduce_local").violations[0])
    assert "\n" not in text
    for word in ("model.layers.0.mlp.gate_proj", "linear", "found", "local-token x shard(0)", "allowed", "Why"):
        assert word in text


ATTN, POST_NORM = "model.layers.*.self_attn", "model.layers.*.post_attention_layernorm"
UNSOUND_PLANS = [
    ("attention on local tokens", {ATTN: 'input = "local-token"'}, "self_attn"),
    ("latents cut by features", {f"{ATTN}.kv_a_proj_with_mqa": 'weight = "shard(0)"'}, "split"),
    ("latent norm of feature shards", {f"{ATTN}.q_a_proj": 'weight = "shard(0)"'}, "q_a_layernorm: rms_norm"),
    ("whole o_proj on head shards", {f"{ATTN}.o_proj": 'weight = "replicated"'}, "o_proj: linear"),
    (
        "norm of partial sums",
        {f"{ATTN}.o_proj": 'output = "partial"', POST_NORM: 'input = "partial"'},
        "post_attention_layernorm wants partial",  # the residual is local already: no way from there
    ),
    ("all heads against a shard of W_UK", {f"{ATTN}.q_b_proj": 'weight = "replicated"'}, "mla_sparse_attention"),
]


@pytest.mark.parametrize(("rows", "named"), [u[1:] for u in UNSOUND_PLANS], ids=[u[0] for u in UNSOUND_PLANS])
def test_an_unsound_plan_stops_with_a_layout_error(
    rows: dict[str, str], named: str, write_plan: Callable[..., str], program_of
) -> None:
    table = "\n".join(f'"{module}" = {{ {row} }}' for module, row in rows.items())
    plan = load_plan(write_plan(f'description = "mine"\nextends = "sp"\n[modules]\n{table}\n'))
    with pytest.raises(LayoutError) as error:
        lower(program_of("glm-5.1-mini", 3), plan, {"tp": 4, "ep": 1}, 16)
    line = str(error.value)
    assert "\n" not in line
    assert "plan mine" in line
    assert "model.layers.0." in line  # the first place where it breaks
    assert named in line
