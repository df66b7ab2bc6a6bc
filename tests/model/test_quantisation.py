"""Schemes and types: what is quantised, and the tensors that a quantised module holds."""

import pytest
import torch

from emulator.errors import UsageError
from emulator.model.quantisation import FLOAT, Classified, QuantType, classify, load_scheme, load_type

LAYER = "model.layers.3"
FLOATS = [
    "model.embed_tokens", "lm_head", "model.norm", f"{LAYER}.input_layernorm", f"{LAYER}.self_attn.q_a_layernorm",
    f"{LAYER}.self_attn.indexer.k_norm", f"{LAYER}.mlp.gate", f"{LAYER}.self_attn.kv_b_proj",
    f"{LAYER}.self_attn.indexer.wk", f"{LAYER}.self_attn.indexer.weights_proj",
]  # fmt: skip
LINEARS = [
    f"{LAYER}.self_attn.q_a_proj", f"{LAYER}.self_attn.q_b_proj", f"{LAYER}.self_attn.o_proj",
    f"{LAYER}.self_attn.indexer.wq_b", f"{LAYER}.mlp.gate_proj", f"{LAYER}.mlp.shared_experts.down_proj",
]  # fmt: skip
EXPERTS = [f"{LAYER}.mlp.experts.gate_up_proj", f"{LAYER}.mlp.experts.down_proj"]


@pytest.mark.parametrize(
    ("scheme", "linear", "experts"),
    [
        ("none", FLOAT, FLOAT),
        ("w8a8", "W8A8", "W8A8_DYNAMIC"),
        ("w8a8_dynamic", "W8A8_DYNAMIC", "W8A8_DYNAMIC"),
        ("w8a8_w4a8_moe", "W8A8_DYNAMIC", "W4A8_DYNAMIC"),
    ],
)
def test_what_each_scheme_quantises(scheme, linear, experts):
    types = classify(load_scheme(scheme), scheme, FLOATS + LINEARS + EXPERTS, mtp=["model.layers.78.eh_proj"])
    assert {types[m].type for m in FLOATS} == {FLOAT}
    assert {types[m].type for m in LINEARS} == {linear}
    assert {types[m].type for m in EXPERTS} == {experts}
    assert types["model.layers.78.eh_proj"] == Classified(FLOAT, f"scheme {scheme}: MTP layers")


def test_the_rule_names_the_pattern():
    types = classify(load_scheme("w8a8"), "w8a8", FLOATS + EXPERTS)
    assert types[f"{LAYER}.mlp.gate"].rule == "scheme w8a8: *.mlp.gate"
    assert types[EXPERTS[0]].rule == "scheme w8a8: *.mlp.experts.*"


def _held(type_name: str, module: str, dims: int, sizes: dict[str, int], when: tuple[str, ...]) -> dict:
    rows = load_type(type_name).rows(module, dims, type_name)
    return {
        row.name: (row.local_shape(sizes, module), row.torch_dtype(torch.float16)) for row in rows if row.held in when
    }


def test_tensors_of_a_static_linear():
    # loaded: weight [out, in], input scale and offset per tensor, the rest per channel; after: [in, out], per input
    loaded = _held("W8A8", LINEARS[0], 2, {"in": 6, "out": 4}, ("loading", "always"))
    half, after = torch.float16, _held("W8A8", LINEARS[0], 2, {"in": 6, "out": 4}, ("after",))
    assert loaded == {
        "weight": ((4, 6), torch.int8), "input_scale": ((1,), half), "input_offset": ((1,), torch.int8),
        "quant_bias": ((4,), torch.int32), "deq_scale": ((4,), torch.float32), "weight_scale": ((4, 1), half),
        "weight_offset": ((4, 1), half),
    }  # fmt: skip
    assert after == {
        "weight": ((6, 4), torch.int8), "aclnn_input_scale": ((6,), half),
        "aclnn_input_scale_reciprocal": ((6,), half), "aclnn_input_offset": ((6,), half),
    }  # fmt: skip


def test_only_the_gate_and_up_projection_keeps_an_fp32_scale():
    sizes = {"experts": 3, "in": 6, "out": 4}
    after = [_held("W8A8_DYNAMIC", module, 3, sizes, ("after",)) for module in EXPERTS]
    assert after[0] == {"weight": ((3, 6, 4), torch.int8), "weight_scale_fp32": ((3, 4), torch.float32)}
    assert after[1] == {"weight": ((3, 6, 4), torch.int8)}


def test_4_bit_weights_are_packed():
    sizes = {"experts": 3, "in": 6, "out": 16}
    assert _held("W4A8_DYNAMIC", EXPERTS[0], 3, sizes, ("loading",))["weight"] == ((3, 8, 6), torch.int8)
    assert _held("W4A8_DYNAMIC", EXPERTS[0], 3, sizes, ("after",))["weight"] == ((3, 6, 2), torch.int32)
    with pytest.raises(UsageError, match=r"experts\.gate_up_proj\.weight: out = 12 is not divisible by 8"):
        _held("W4A8_DYNAMIC", EXPERTS[0], 3, {"experts": 3, "in": 6, "out": 12}, ("after",))


def test_a_type_without_rows_for_a_module_does_not_exist_for_it():
    with pytest.raises(UsageError, match=r"o_proj: type W4A8_DYNAMIC does not exist for linears"):
        load_type("W4A8_DYNAMIC").rows("o_proj", 2, "W4A8_DYNAMIC")
    with pytest.raises(UsageError, match="experts: type W8A8 does not exist for routed experts"):
        load_type("W8A8").rows("experts", 3, "W8A8")
    with pytest.raises(UsageError, match=r"norm: type W8A8 does not exist for vectors"):
        load_type("W8A8").rows("norm", 1, "W8A8")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('[modules]\n"*norm" = "FLOAT"', "the last pattern must be"),
        ('[modules]\n"*" = "W2A2"', "unknown quantisation type 'W2A2'"),
        ("modules = 3", "modules = 3"),
        ("[modules", "not readable as TOML"),
    ],
)
def test_mistakes_in_a_scheme_are_told(tmp_path, text, told):
    path = tmp_path / "mine.toml"
    path.write_text(f'description = "x"\n{text}\n')
    with pytest.raises(UsageError, match=told):
        load_scheme(str(path))


def test_unknown_schemes_are_listed():
    with pytest.raises(UsageError, match=r"unknown quantisation scheme 'w8' \(allowed: none, w8a8, w8a8_dynamic"):
        load_scheme("w8")


def test_a_type_is_checked_when_it_is_read():
    row = {"name": "weight", "shape": ["in"], "category": "checkpoint_weight"}
    with pytest.raises(ValueError, match="size 'experts' unknown"):
        QuantType(description="", linear=({**row, "shape": ["experts"]},))
    with pytest.raises(ValueError, match="replaces 'w', which no loading row is"):
        QuantType(description="", linear=({**row, "held": "after", "replaces": "w"},))
