"""How far quantised products may be from float ones, and the ranges of static scales."""

import pytest
import torch

from emulator.jobs.prepare import prepare
from emulator.layout.lowering import lower
from emulator.layout.plan import load_plan
from emulator.model.batch import own_caches
from emulator.model.config import load_config
from emulator.model.layers import ProgramOptions
from emulator.model.program import build_program
from emulator.ops.linear import any_linear, linear_in_shards
from emulator.runtime.threads import single_thread
from emulator.scenario import load_scenario
from emulator.verify.quantised import dequantised_weights, input_ranges, product_error, quantisation_error, row_parallel

F64 = torch.float64


def operands(rows: int = 9) -> tuple:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(rows, 24, generator=generator, dtype=F64)
    weight = torch.randint(-127, 128, (8, 24), generator=generator).to(torch.int8)
    return x, weight, None, torch.full((8, 1), 0.01, dtype=F64), torch.zeros(8, 1, dtype=F64)


def test_the_bound_is_that_of_the_rounding_of_codes():
    # all inputs half a step off: x = 1 + 0.5 / 127 is the code 127 or 128 of scale 1 / 127
    x = torch.full((1, 24), 0.5 / 127, dtype=F64)
    x[0, 0] = 1.0  # the largest; its code is exact
    args = (x, torch.full((8, 24), 127, dtype=torch.int8), None, *operands()[3:])
    value = any_linear(*args)
    # 23 codes are off by half a step of the same sign (0.5 rounds to 0), so the error is 23/24 of the bound
    assert product_error("linear", args, value) == pytest.approx(23 / 24, rel=1e-6)
    assert product_error("linear", (x, torch.ones(8, 24, dtype=F64), None), value) is None


def test_a_wrong_product_leaves_the_bound():
    args = operands()
    right = any_linear(*args)
    assert product_error("linear", args, right) < 1
    for wrong in (right * 1.05, right.roll(1, 1), right / args[3].t()):
        assert product_error("linear", args, wrong) > 1
    shards = linear_in_shards(4, *args)
    assert product_error("linear", args, shards, 4) < 1


def test_a_bias_and_clipped_values_are_no_error():
    x, weight, _, scale, offset = operands()
    bias = torch.arange(8, dtype=F64)
    args = (x, weight, bias, scale, offset)
    assert product_error("linear", args, any_linear(*args)) < 1
    tight = (torch.tensor([0.002], dtype=F64), torch.tensor([0], dtype=torch.int8), torch.zeros(8, dtype=torch.int32),
             (0.002 * scale.squeeze(1)).float())  # fmt: skip
    clipped = (x, weight, None, scale, offset, *tight)
    value = any_linear(*clipped)
    assert product_error("linear", clipped, value) <= 1
    assert float((value - x @ (weight * scale).t()).abs().max()) > 24 * 0.001 * 1.27  # far beyond half a step


def test_row_parallel_linears_of_plans():
    config = load_config("glm-5.1-mini").with_layers(3)

    def sharded(plan: str, quant: str) -> set[str]:
        program = build_program(config, ProgramOptions(quant=quant))
        graph = lower(program, load_plan(plan), {"tp": 4, "ep": 4}, 13)
        modules = {n.name: n.meta["module"] for n in program.graph.nodes}
        found = row_parallel(graph)
        assert set(found.values()) <= {4}
        return {modules[n].removeprefix("model.layers.") for n in found}

    dense = {"0.mlp.down_proj", "1.mlp.down_proj"}
    assert sharded("tp", "w8a8_dynamic") == dense | {f"{i}.self_attn.o_proj" for i in range(3)}
    assert sharded("dsa_cp", "w8a8_dynamic") == dense
    assert sharded("dsa_cp_engine", "w8a8_dynamic") == dense  # o_proj is stored in shards, but used whole
    assert sharded("tp", "w8a8") == set()  # one scale for the whole tensor: no shard has its own
    assert sharded("tp", "none") == set()


def test_ranges_are_those_of_the_inputs_and_the_float_run_is_near():
    with single_thread():
        part = prepare(load_scenario("glm-5.1-mini", {"quant": "w8a8_dynamic", "layers": 3, "tokens": 9}))
    program, weights = part.program, part.weights
    plain = build_program(program.config, ProgramOptions())
    meant = dequantised_weights(program, weights)
    assert {n: w.shape for n, w in meant.items()} == {n: p.shape for n, p in plain.parameters.items()}
    name = "model.layers.1.self_attn.kv_a_proj_with_mqa"
    codes, scale = weights[f"{name}.weight"], weights[f"{name}.weight_scale"]
    assert torch.equal(meant[f"{name}.weight"], codes.double() * scale)
    inputs = own_caches(part.batch)
    ranges = input_ranges(plain, meant, inputs, [name, "lm_head"])
    assert set(ranges) == {name, "lm_head"}
    assert all(low < -1 < 1 < high for low, high in ranges.values())  # normed rows of 144 values
    both = own_caches(part.batch), own_caches(part.batch)
    error = quantisation_error(program, weights, both, row_parallel(part.rank_graph))
    assert error == part.quantisation
    assert error.products == 3 * 5 + 3 * 3 + 2
    assert 0.05 < error.worst < 1
    assert 1e-4 < error.logits < 0.2


def test_tolerances_below_float64_are_those_of_one_code():
    def made(quant: str) -> tuple[float, float]:
        """Tolerance of q_a_proj's output, and the largest effect of the least weighty code in the row of most scale."""
        with single_thread():
            given = {"quant": quant, "dtype": "float32", "layers": 2, "tokens": 9}
            part = prepare(load_scenario("glm-5.1-mini", given))
        weights = dequantised_weights(part.program, part.weights)["model.layers.0.self_attn.q_a_proj.weight"]
        x = part.reference["rms_norm"]  # of input_layernorm
        step = float(x.abs().max()) / 127
        return part.tolerance.absolute["linear"], step * float(weights.abs().max(0).values.min())

    tolerance, effect = made("w8a8_dynamic")
    assert effect < tolerance < 100 * effect
    assert made("none")[0] < effect / 100
