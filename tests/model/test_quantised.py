"""Quantised modules: which, with what tensors, and what their codes stand for."""

import pytest
import torch

from emulator.errors import UsageError
from emulator.model.config import load_config
from emulator.model.layers import ProgramOptions
from emulator.model.program import Program, build_program
from emulator.model.quantised import QuantisedModule, quantised_tensors
from emulator.model.weights import seeded, weight_groups
from emulator.ops.quantised import dequantised, unpack_int4

F64 = torch.float64
CONFIG = load_config("glm-5.1-mini").with_layers(3)
O_PROJ, GATE_UP = "model.layers.0.self_attn.o_proj", "model.layers.2.mlp.experts.gate_up_proj"
FLOAT = (
    "self_attn.kv_b_proj", "self_attn.indexer.wk", "self_attn.indexer.weights_proj", "mlp.gate", "input_layernorm",
)  # fmt: skip


def program(quant: str) -> Program:
    return build_program(CONFIG, ProgramOptions(quant=quant))


def tensors_of(made: Program, module: str) -> dict[str, tuple]:
    names = [n for n in made.parameters if n.rpartition(".")[0] == module]
    dtypes = {n: getattr(made.parameters[n], "own_dtype", None) for n in names}
    return {n.rpartition(".")[2]: (tuple(made.parameters[n].shape), dtypes[n]) for n in names}


def test_a_module_holds_the_tensors_of_its_type():
    # o_proj [144, 24 x 26], gate_up [48, 240, 144]; None: the run's dtype
    scales = {"weight_scale": ((144, 1), None), "weight_offset": ((144, 1), None)}
    weight = {"weight": ((144, 624), torch.int8)}
    assert tensors_of(program("w8a8_dynamic"), O_PROJ) == {**weight, **scales}
    assert tensors_of(program("w8a8"), O_PROJ) == {
        **weight, **scales, "input_scale": ((1,), None), "input_offset": ((1,), torch.int8),
        "quant_bias": ((144,), torch.int32), "deq_scale": ((144,), torch.float32),
    }  # fmt: skip
    for quant in ("w8a8", "w8a8_dynamic"):
        assert tensors_of(program(quant), GATE_UP)["weight"] == ((48, 240, 144), torch.int8)
    per_channel = ((48, 240, 1), torch.float32)
    assert tensors_of(program("w8a8_w4a8_moe"), GATE_UP) == {
        "weight": ((48, 120, 144), torch.int8), "weight_scale": per_channel, "weight_offset": per_channel,
        "scale_bias": per_channel,
    }  # fmt: skip
    assert program("none").quantised == {}


@pytest.mark.parametrize("quant", ["w8a8", "w8a8_dynamic", "w8a8_w4a8_moe"])
def test_what_the_scheme_excludes_stays_float_and_the_graph_stays_the_same(quant):
    made, plain = program(quant), build_program(CONFIG)
    for module in ("lm_head", "model.embed_tokens", *(f"model.layers.2.{m}" for m in FLOAT)):
        assert module not in made.quantised
        assert tensors_of(made, module) == tensors_of(plain, module)

    def computed(p: Program) -> list[tuple]:
        return [(n.name, n.target, n.meta["module"]) for n in p.graph.nodes if n.op != "get_attr"]

    assert computed(made) == computed(plain)
    linear = next(n for n in made.graph.nodes if n.name == "linear")
    assert len(linear.args) == (9 if quant == "w8a8" else 5)
    assert len(next(n for n in plain.graph.nodes if n.name == "linear").args) == 3


def test_a_scheme_that_quantises_what_only_runs_in_float_is_refused(tmp_path):
    scheme = tmp_path / "mine.toml"
    scheme.write_text('description = "x"\n[modules]\n"*.kv_b_proj" = "W8A8_DYNAMIC"\n"*" = "FLOAT"\n')
    with pytest.raises(UsageError, match=r"layers\.0\.self_attn\.kv_b_proj is W8A8_DYNAMIC .* runs in float only"):
        program(str(scheme))
    with pytest.raises(UsageError, match="unknown quantisation scheme 'w9'"):
        program("w9")


def test_attention_is_a_setting_of_its_own():
    dense = load_config("deepseek-v3-mini").with_layers(2)

    def attends(**options: str) -> list[tuple]:
        made = build_program(dense, ProgramOptions(**options))
        return [n.args[9:] for n in made.graph.nodes if n.name.startswith("multihead_latent_attention")]

    assert attends() == attends(quant="w8a8") == [(), ()]
    assert attends(attention="int8") == attends(attention="int8", quant="w8a8_dynamic") == [(True,), (True,)]
    with pytest.raises(UsageError, match="sparse attention takes float inputs"):
        build_program(CONFIG, ProgramOptions(attention="int8"))


def test_codes_stand_for_the_weight_within_half_a_step():
    weight = torch.randn(6, 10, generator=torch.Generator().manual_seed(0), dtype=F64)
    weight[4] = 0
    for type_name, largest in (("W8A8_DYNAMIC", 127), ("W8A8", 127)):
        made = quantised_tensors(QuantisedModule(type_name, (6, 10)), weight, F64, {}, (-3.0, 5.0))
        step = weight.abs().amax(1, keepdim=True) / largest
        found = dequantised(made["weight"], made["weight_scale"], made["weight_offset"])
        assert ((found - weight).abs() <= step / 2 + 1e-12).all()
        assert made["weight"].abs().amax(1).tolist() == [127, 127, 127, 127, 0, 127]
    # static: 255 steps over -3 .. 5, zero included: -3 has the code -128
    assert float(made["input_scale"]) == 8 / 255
    assert int(made["input_offset"]) == round(-128 + 3 * 255 / 8) == -32
    assert torch.equal(made["quant_bias"], 32 * made["weight"].sum(1, dtype=torch.int32))
    assert torch.allclose(made["deq_scale"].double(), made["weight_scale"].squeeze(1) * 8 / 255, rtol=1e-7)


def test_int4_codes_and_the_parts_of_their_bias():
    weight = torch.randn(2, 6, 40, generator=torch.Generator().manual_seed(0), dtype=F64)
    made = quantised_tensors(QuantisedModule("W4A8_DYNAMIC", (2, 6, 40)), weight, F64, {"scale_bias": (2, 6, 16)})
    codes = unpack_int4(made["weight"])
    assert codes.shape == (2, 6, 40)
    assert codes.abs().amax(2).tolist() == [[7] * 6] * 2
    assert ((codes * made["weight_scale"] - weight).abs() <= made["weight_scale"] / 2 + 1e-6).all()
    assert made["scale_bias"].shape == (2, 6, 16)
    assert torch.allclose(made["scale_bias"].sum(2), 8 * codes.sum(2) * made["weight_scale"].squeeze(2), atol=1e-4)


def test_weights_are_made_once_from_the_seed():
    made = program("w8a8_dynamic")
    groups = [dict(g) for g in weight_groups(made, seeded(3), F64)]
    weights = {k: v for group in groups for k, v in group.items()}
    assert set(weights) == set(made.parameters)
    for name, tensor in weights.items():
        assert tensor.shape == made.parameters[name].shape, name
    plain = {k: v for group in weight_groups(build_program(CONFIG), seeded(3), F64) for k, v in group.items()}
    name = f"{O_PROJ}.weight"
    expected = plain[name].abs().amax(1, keepdim=True) / 127
    assert torch.equal(weights[f"{O_PROJ}.weight_scale"], expected)
    assert torch.equal(weights[name], (plain[name] / expected).round().to(torch.int8))
    assert torch.equal(weights["lm_head.weight"], plain["lm_head.weight"])
