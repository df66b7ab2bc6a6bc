"""The ledger against observed totals, published element counts, worked arithmetic, and what ranks load."""

from collections import Counter

import pytest
import torch

from emulator.errors import UsageError
from emulator.jobs.job import run
from emulator.layout.lowering import lower
from emulator.layout.plan import load_plan
from emulator.memory.ledger import Ledger
from emulator.model.config import load_config
from emulator.model.program import build_program
from emulator.model.weights import parameter_dtype
from emulator.runtime.mesh import Mesh
from emulator.runtime.rank_weights import local_shard
from emulator.scenario import load_scenario

GIB = 2**30
REPLICATED = {"embedding": "replicated"}

# TensorCast (Ascend/msmodeling 84fec853) on GLM-5.1, W8A8: total bytes of a rank
GLM_W8A8 = [
    (30549626880, "tp", 16, 2, 32, REPLICATED),
    (42659500032, "dsa_cp", 16, 2, 32, REPLICATED),
    (40875282432, "dsa_cp", 16, 2, 32, {}),
    (33514278912, "dsa_cp_engine", 16, 2, 32, {}),  # o_proj stored in tp shards
    (33211502592, "tp", 4, 8, 32, REPLICATED),
    (63524524032, "dsa_cp", 16, 1, 16, {}),
]


@pytest.mark.parametrize(("total", "plan", "tp", "dp", "ep", "variants"), GLM_W8A8)
def test_glm_w8a8_to_the_byte(ledger_of, total, plan, tp, dp, ep, variants):
    ledger = ledger_of("glm-5.1", plan, rules="tensorcast", quant="w8a8", tp=tp, dp=dp, ep=ep, **variants)
    assert ledger.total_bytes == total
    assert ledger.peak_load_bytes == total  # it counts what is loaded


def test_glm_w8a8_by_component(ledger_of):
    # GiB of the same table's first and third column, rounded to four digits
    columns = {
        "routed_experts": (21.0938, 21.0938), "shared_experts": (2.6367, 2.6367), "router_gate": (0.2198, 0.2198),
        "dense_mlp": (0.0396, 0.0396), "q_a_proj": (0.9141, 0.9141), "q_b_proj": (0.1523, 2.4375),
        "kv_a_proj_with_mqa": (0.2571, 0.2571), "kv_b_proj": (0.0667, 2.1328), "o_proj": (0.4570, 7.3125),
        "indexer_wq_b": (0.6094, 0.6094), "indexer_wk_weights_proj": (0.0714, 0.1428), "norms": (0.0022, 0.0022),
        "embed_tokens": (1.7725, 0.1108), "lm_head": (0.1108, 0.1108), "rope_cache": (0.0483, 0.0483),
    }  # fmt: skip
    sides = [
        ledger_of("glm-5.1", "tp", rules="tensorcast", quant="w8a8", tp=16, dp=2, ep=32, **REPLICATED),
        ledger_of("glm-5.1", "dsa_cp", rules="tensorcast", quant="w8a8", tp=16, dp=2, ep=32),
    ]
    for i, ledger in enumerate(sides):
        found = {name: round(size / GIB, 4) for name, size in ledger.by("component").items()}
        assert found == {name: values[i] for name, values in columns.items()}


def test_the_old_rules_quantise_kv_b_and_the_indexer_keys_everywhere(ledger_of):
    def total(rules: str, plan: str, **variants: str) -> int:
        return ledger_of("glm-5.1", plan, rules=rules, quant="w8a8", tp=16, dp=2, ep=32, **variants).total_bytes

    assert total("tensorcast-old", "tp", **REPLICATED) == total("tensorcast", "tp", **REPLICATED) == 30549626880
    # 78 layers of kv_b_proj [64*448, 512], wk [128, 6144] and weights_proj [32, 6144], a byte less per value
    difference = 78 * (64 * 448 * 512 + (128 + 32) * 6144)
    assert total("tensorcast", "dsa_cp") - total("tensorcast-old", "dsa_cp") == difference


def test_deepseek_v32_w8a8_as_tensorcast_reports_it(ledger_of):
    prefill = ledger_of("deepseek-v3.2", "tp", rules="tensorcast", quant="w8a8", tp=16, ep=16, **REPLICATED)
    assert round(prefill.total_bytes / GIB, 3) == 44.848
    decode = ledger_of(
        "deepseek-v3.2", "tp", rules="tensorcast", quant="w8a8", tp=4, dp=8, ep=32, phase="decode", **REPLICATED
    )
    assert round(decode.total_bytes / GIB, 3) == 28.179


ELEMENTS = [  # vllm-ascend's layouts at tp 4, millions of elements of one attention layer
    ("glm-5.1", "tp", (16.12, 8.39, 1.57, 2.10, 8.39, 0.79, 0.20, 25.17), 62.7, None),
    ("glm-5.1", "dsa_cp_engine", (16.12, 33.55, 6.29, 8.39, 8.39, 0.79, 0.20, 25.17), 98.9, 100.66),
    ("glm-5.1", "dsa_cp", (16.12, 33.55, 6.29, 8.39, 8.39, 0.79, 0.20, 100.66), 174.4, None),
    ("deepseek-v3.2", "tp", (15.14, 9.44, 2.10, 2.10, 12.58, 0.92, 0.46, 29.36), 72.1, None),
    ("deepseek-v3.2", "dsa_cp_engine", (15.14, 37.75, 8.39, 8.39, 12.58, 0.92, 0.46, 29.36), 113.0, 117.44),
    ("deepseek-v3.2", "dsa_cp", (15.14, 37.75, 8.39, 8.39, 12.58, 0.92, 0.46, 117.44), 201.1, None),
]


@pytest.mark.parametrize(("model", "plan", "elements", "total", "pool"), ELEMENTS)
def test_elements_of_an_attention_layer(ledger_of, model, plan, elements, total, pool):
    ledger = ledger_of(model, plan, rules="engine", quant="w8a8_dynamic", tp=4, ep=4, layers=4)
    sizes: Counter[str] = Counter()
    for t in ledger.tensors:
        if (
            t.layer == 3
            and ".self_attn." in t.name
            and t.category in ("checkpoint_weight", "float_exception", "derived")
        ):
            sizes[t.name.removeprefix("model.layers.3.self_attn.")] += torch.Size(t.shape).numel()
    named = (
        sizes["q_a_proj.weight"] + sizes["kv_a_proj_with_mqa.weight"], sizes["q_b_proj.weight"],
        sizes["kv_b_proj.W_UK_T"], sizes["kv_b_proj.W_UV"], sizes["indexer.wq_b.weight"], sizes["indexer.wk.weight"],
        sizes["indexer.weights_proj.weight"], sizes["o_proj.weight"],
    )  # fmt: skip
    assert tuple(round(n / 1e6, 2) for n in named) == elements
    assert round(sum(named) / 1e6, 1) == total
    assert "kv_b_proj.weight" not in sizes  # freed once it is split
    pools = [torch.Size(t.shape).numel() for t in ledger.tensors if t.category == "full_layout_copy"]
    assert [round(n / 1e6, 2) for n in pools] == ([pool] if pool else [])  # one for all layers


def _bytes(ledger: Ledger, name: str) -> dict[str, int]:
    return {t.name.rpartition(f"{name}.")[2]: t.bytes for t in ledger.tensors if f"layers.3.{name}." in t.name}


def test_w8a8_static_o_proj_stored_in_shards(ledger_of):
    # glm-5.1-mini at tp 4: in = 24 heads * 26 / 4 = 156 (624 whole), out = 144
    ledger = ledger_of("glm-5.1-mini", "dsa_cp_engine", rules="engine", quant="w8a8", tp=4, ep=4)
    aclnn = ("aclnn_input_scale", "aclnn_input_scale_reciprocal", "aclnn_input_offset")
    assert _bytes(ledger, "self_attn.o_proj") == {
        "weight": 156 * 144, "input_scale": 2, "input_offset": 1, "quant_bias": 4 * 144, "deq_scale": 4 * 144,
        "weight_scale": 2 * 144, "weight_offset": 2 * 144, **{n: 2 * 156 for n in aclnn},
        **{f"{n}.whole": 2 * 624 for n in aclnn},
    }  # fmt: skip
    (pool,) = [t for t in ledger.tensors if t.layer is None and t.category == "full_layout_copy"]
    assert (pool.shape, pool.bytes, pool.component) == ((624, 144), 624 * 144, "o_proj")


def test_fused_linears_share_what_belongs_to_their_input(ledger_of):
    ledger = ledger_of("glm-5.1-mini", "dsa_cp", rules="engine", quant="w8a8", tp=4, ep=4)
    assert {"input_scale", "aclnn_input_offset"} <= set(_bytes(ledger, "self_attn.q_a_proj"))
    assert set(_bytes(ledger, "self_attn.kv_a_proj_with_mqa")) == {
        "weight", "weight_scale", "weight_offset", "quant_bias", "deq_scale",
    }  # fmt: skip


def test_w8a8_dynamic_column_parallel_q_b_proj(ledger_of):
    # out = 24 heads * 28 / 4 = 168, in = 56
    ledger = ledger_of("glm-5.1-mini", "tp", rules="engine", quant="w8a8_dynamic", tp=4, ep=4)
    assert _bytes(ledger, "self_attn.q_b_proj") == {
        "weight": 168 * 56, "weight_scale": 336, "weight_offset": 336, "weight_scale_fp32": 672,
    }  # fmt: skip
    assert ledger.by("component")["q_b_proj"] == 5 * (168 * 56 + 336 + 336 + 672)


def test_w4a8_experts(ledger_of):
    # 48 / 4 = 12 experts; gate_up out 240, in 144; down out 144, in 120; 4-bit weights, int64 scales, the rest fp32
    ledger = ledger_of("glm-5.1-mini", "dsa_cp", rules="engine", quant="w8a8_w4a8_moe", tp=4, ep=4)
    assert _bytes(ledger, "mlp.experts.gate_up_proj") == {
        "weight": 12 * 240 * 144 // 2, "weight_scale": 12 * 240 * 8, "weight_offset": 12 * 240 * 4,
        "scale_bias": 12 * 240 * 4,
    }  # fmt: skip
    assert ledger.by("component")["routed_experts"] == 3 * 12 * (
        240 * 144 // 2 + 144 * 120 // 2 + (240 + 144) * (8 + 4 + 4)
    )
    # before processing: scales and biases in fp32, 16 parts of the bias for down_proj
    freed = {t.name.rpartition("layers.3.mlp.experts.")[2]: t.bytes for t in ledger.loading if ".3.mlp.exp" in t.name}
    assert freed["down_proj.scale_bias"] == 12 * 144 * 16 * 4
    assert freed["gate_up_proj.weight_scale"] == 12 * 240 * 4


def test_float_o_proj_is_gathered_from_a_transposed_copy(ledger_of):
    ledger = ledger_of("glm-5.1-mini", "dsa_cp_engine", rules="engine", quant="none", tp=4, ep=4)
    categories = ledger.by("category")
    assert categories["transposed_layout"] == 5 * 156 * 144 * 2  # a copy in each of 5 layers
    assert categories["full_layout_copy"] == 624 * 144 * 2  # one buffer


def test_the_peak_has_kv_b_proj_beside_its_derived_tensors(ledger_of):
    # without quantisation nothing else is processed: one layer's W_UK_T and W_UV stand beside all that is loaded
    ledger = ledger_of("glm-5.1-mini", "dsa_cp", rules="engine", quant="none", tp=4, ep=4)
    derived = 24 * (20 + 26) * 44 * 2
    assert ledger.peak_load_bytes - ledger.total_bytes == derived
    assert sum(t.bytes for t in ledger.loading) == 5 * derived
    assert {t.replaces for t in ledger.tensors if t.category == "derived" and t.layer == 0} == {
        "model.layers.0.self_attn.kv_b_proj.weight"
    }


@pytest.mark.parametrize("model", ["glm-5.1-mini", "deepseek-v3.2-mini"])
@pytest.mark.parametrize(
    ("plan", "phase", "dtype"),
    [
        ("tp", "prefill", torch.float64), ("sp", "prefill", torch.bfloat16), ("dsa_cp", "prefill", torch.float64),
        ("dsa_cp_engine", "prefill", torch.float32), ("dsa_cp_engine_c", "prefill", torch.bfloat16),
        ("dsa_cp", "decode", torch.float64),
    ],
)  # fmt: skip
def test_the_emulator_rules_are_what_a_rank_loads(ledger_of, model, plan, phase, dtype):
    bias = {"attention_bias": True}
    mesh = Mesh(tp=4, dp=2, ep=8)
    ledger = ledger_of(
        model, plan, rules="emulator", quant="none", tp=4, dp=2, ep=8, phase=phase, dtype=dtype, rank=5,
        config=bias,
    )  # fmt: skip
    program = build_program(load_config(model).model_copy(update=bias))
    name = "decode" if phase == "decode" else plan
    layouts = {
        n.target: n.meta["layout"]
        for n in lower(program, load_plan(name), mesh.sizes, 13).graph.nodes
        if n.op == "get_attr"
    }
    held = {}
    for weight, layout in layouts.items():
        whole = torch.empty(program.parameters[weight].shape, dtype=parameter_dtype(weight, dtype))
        part = local_shard(whole, layout, mesh, 5)
        held[weight] = (tuple(part.shape), str(part.dtype), part.numel() * part.element_size(), str(layout))
    found = {t.name: (t.shape, f"torch.{t.dtype}", t.bytes, t.placement) for t in ledger.tensors}
    assert found == held


@pytest.mark.parametrize(("plan", "tp", "embedding"), [("tp", 4, "row"), ("dsa_cp", 2, "replicated")])
def test_the_emulator_rules_with_an_mtp_layer_are_the_bytes_that_ranks_hold(ledger_of, plan, tp, embedding):
    given = {"plan": plan, "parallel": {"tp": tp}, "tokens": 3, "mtp": True, "layers": 3, "dtype": "float32"}
    summary = run(load_scenario("glm-5.1-mini", {**given, "variants": {"embedding": embedding}}))
    ledger = ledger_of(
        "glm-5.1-mini", plan, rules="emulator", quant="none", tp=tp, ep=tp, mtp=1, layers=3, dtype=torch.float32,
        embedding=embedding,
    )  # fmt: skip
    assert ledger.by("component")["mtp"] > 0
    assert {r["memory"]["weight_bytes"] for r in summary["per_rank"]} == {ledger.total_bytes}


def test_nz_costs_nothing_where_shapes_are_whole_blocks(ledger_of):
    for model in ("glm-5.1", "deepseek-v3.2"):
        plain, rounded = (
            ledger_of(model, "dsa_cp", rules="engine", quant="w8a8_dynamic", tp=16, ep=16, nz=nz, layers=4)
            for nz in (False, True)
        )
        assert plain.total_bytes == rounded.total_bytes
    # wq_b [in 56, out 16 * 36 = 576] -> [64, 576]; W_UK_T [24, 20, 44] bf16 -> [24, 32, 48]; embedding and scales stay
    plain, rounded = (
        ledger_of("glm-5.1-mini", "dsa_cp", rules="engine", quant="w8a8_dynamic", tp=4, ep=4, nz=nz)
        for nz in (False, True)
    )
    by = plain.by("component"), rounded.by("component")
    assert by[1]["indexer_wq_b"] - by[0]["indexer_wq_b"] == 5 * 8 * 576
    assert by[1]["W_UK_T"] - by[0]["W_UK_T"] == 5 * 24 * (32 * 48 - 20 * 44) * 2
    assert by[0]["embed_tokens"] == 78 * 144 * 2  # 78 rows are no whole blocks
    for same in ("embed_tokens", "lm_head", "norms", "rope_cache", "W_UV"):
        assert by[0][same] == by[1][same]


def test_an_mtp_layer_holds_a_decoder_layer_embedding_projection_norms_and_head(ledger_of):
    without, held = (
        ledger_of("glm-5.1", "dsa_cp", rules="engine", quant="w8a8", tp=16, dp=2, ep=32, mtp=n, layers=4)
        for n in (0, 1)
    )
    hidden, vocab = 6144, 154880
    attention = (
        2048 * hidden + 64 * 256 * 2048 + 576 * hidden + 64 * 448 * 512 + 64 * 256 * hidden  # q_a q_b kv_a W_U* o
        + 32 * 128 * 2048 + (128 + 32) * hidden  # indexer
    )  # fmt: skip
    experts = 256 // 32 * 3 * 2048 * hidden + 3 * 2048 * hidden + 256 * hidden
    norms = 2 * hidden + 2048 + 512 + 2 * 128  # of a decoder layer
    own = 2 * (vocab // 16) * hidden + 2 * hidden * hidden + 3 * hidden  # embedding and head in shards; eh_proj; norms
    expected = 2 * (attention + experts + norms + own) + 4 * 256  # all FLOAT; the correction bias in fp32
    assert held.by("component")["mtp"] == held.total_bytes - without.total_bytes == expected
    assert held.by("layer")["4"] == expected
    # TensorCast quantises the block like the others
    quantised = ledger_of("glm-5.1", "dsa_cp", rules="tensorcast", quant="w8a8", tp=16, dp=2, ep=32, mtp=1, layers=4)
    kept = 64 * 448 * 512 + (128 + 32) * hidden + 256 * hidden + norms + own - 2 * hidden * hidden
    assert quantised.by("component")["mtp"] == expected - (attention + experts + norms + own - kept)


def test_every_tensor_says_where_it_comes_from(ledger_of):
    ledger = ledger_of("glm-5.1-mini", "dsa_cp_engine", rules="engine", quant="w8a8", tp=4, ep=4)
    names = [t.name for t in ledger.tensors]
    assert len(names) == len(set(names))
    (weight,) = [t for t in ledger.tensors if t.name == "model.layers.3.self_attn.q_b_proj.weight"]
    assert (weight.shape, weight.placement, weight.replaces) == ((56, 672), "replicated", weight.name)
    assert weight.rule == "scheme w8a8: * -> W8A8 weight"
    assert sum(ledger.by("component").values()) == sum(ledger.by("category").values()) == ledger.total_bytes
    assert ledger.by("layer")["-"] + sum(ledger.by("layer")[str(i)] for i in range(5)) == ledger.total_bytes


def test_mistakes_are_told(ledger_of):
    with pytest.raises(
        UsageError, match=r"tp 16 does not divide 24 heads of model\.layers\.0\.self_attn\.q_b_proj\.weight"
    ):
        ledger_of("glm-5.1-mini", "tp", rules="engine", quant="none", tp=16, ep=16, embedding="replicated")
    with pytest.raises(UsageError, match="rank 8: the mesh has ranks 0 to 7"):
        ledger_of("glm-5.1-mini", "tp", rules="engine", quant="none", tp=4, dp=2, ep=8, rank=8)


def test_layer_sharded_weights_are_on_their_owner_and_in_the_window(ledger_of):
    # 5 layers on 4 ranks: layers 0 and 4 on rank 0; q_b_proj [672, 56], o_proj [144, 624]
    whole = 672 * 56 + 144 * 624
    for quant, size in (("none", 8), ("w8a8", 1)):
        for rank, owned in enumerate((2, 1, 1, 1)):
            ledger = ledger_of(
                "glm-5.1-mini", "dsa_cp_engine_a", rules="emulator", quant=quant, tp=4, ep=4, dtype=torch.float64,
                rank=rank,
            )  # fmt: skip
            held = [t for t in ledger.tensors if t.name.endswith(("q_b_proj.weight", "o_proj.weight"))]
            assert sum(t.bytes for t in held) == owned * whole * size
            assert {t.layer: t.placement for t in held} == {i: f"tp:owner({i % 4})" for i in range(5)}
            # the layers of which a rank has none are brought one layer ahead: the first is there from the start
            assert ledger.by("category")["full_layout_copy"] == whole * size
            scales = [t for t in ledger.tensors if t.name.endswith("o_proj.deq_scale")]
            assert [t.bytes for t in scales] == ([144 * 4] * 5 if quant == "w8a8" else [])
    # an engine's window has two buffers, and each layer still only one owner
    engine = ledger_of("glm-5.1-mini", "dsa_cp_engine_a", rules="engine", quant="w8a8", tp=4, ep=4, rank=1)
    assert engine.by("category")["full_layout_copy"] == 2 * whole
    held = [t for t in engine.tensors if t.name.endswith(("q_b_proj.weight", "o_proj.weight"))]
    assert sum(t.bytes for t in held) == whole
