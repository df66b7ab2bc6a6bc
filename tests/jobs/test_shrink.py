"""A failing run becomes a small scenario file that fails in the same way."""

import tomllib

import pytest

from emulator.jobs.job import run
from emulator.jobs.shrink import commands, failure_of_run, shrink, write_scenario
from emulator.scenario import load_scenario


def test_a_value_failure_shrinks_to_its_layer(tmp_path):
    given = {"variants": {"shared_experts": "allreduce_local"}, "static_check": False, "tokens": 16}
    scenario = load_scenario("glm-5.1-mini", given)
    found = shrink(scenario)
    assert found is not None
    assert (found.failure.check, found.failure.op, found.failure.kind) == ("values", "all_reduce", "mixed_tokens")
    small = found.scenario
    # two dense layers come first, so the first MoE layer needs a cut model of one dense and one MoE layer
    assert (small.config().num_hidden_layers, small.parallel.tp) == (2, 2)
    assert small.tokens <= 2
    assert small.model_sizes["hidden_size"] == 144 // 8
    assert [same for what, same in found.tried if what == "layers 1"] == [False]  # dense only: it passes

    path = write_scenario(small, tmp_path / "small.toml")
    assert tomllib.loads(path.read_text())["parallel"] == {"tp": 2}
    again = load_scenario(str(path))
    assert again.model_copy(update={"name": small.name, "description": small.description}) == small
    assert failure_of_run(again) == found.failure
    assert commands(small, path) == [f"emulator run {path}", f"torchrun --nproc-per-node 2 -m emulator run {path}"]


def test_a_refusal_shrinks_too():
    scenario = load_scenario("glm-5.1-mini", {"variants": {"dense_mlp": "allreduce_local"}, "tokens": 64})
    found = shrink(scenario)
    assert found is not None
    assert (found.failure.check, found.failure.op) == ("static check", "linear")
    assert (found.scenario.layers, found.scenario.parallel.tp, found.scenario.tokens) == (1, 2, 1)


@pytest.mark.parametrize("given", [{"tokens": 3, "layers": 1}, {"variants": {"embedding": "blue"}}])
def test_what_does_not_fail_is_not_shrunk(given):
    assert shrink(load_scenario("glm-5.1-mini", given)) is None


def test_sizes_of_the_model_can_be_changed():
    scenario = load_scenario("glm-5.1-mini", {"tokens": 5, "layers": 3, "model_sizes": {"n_routed_experts": 12}})
    assert scenario.config().n_routed_experts == 12
    summary = run(scenario)
    assert summary["verdict"] == "pass"
    gate = next(b for b in summary["boundaries"] if b["module"] == "model.layers.2.mlp.gate" and b["port"] == "output")
    assert gate["shape"][1] == 12
