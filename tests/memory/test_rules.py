"""Accounting rules: conditions on the plan, mistakes in a profile, and dtypes of exceptions."""

import pytest
import torch

from emulator.errors import UsageError
from emulator.layout.plan import load_plan
from emulator.memory.rules import load_accounting, runs_sequence_parallel
from emulator.model.quantisation import Classified, classify, load_scheme

MODULES = ["model.layers.0.self_attn.kv_b_proj", "model.layers.0.self_attn.indexer.wk", "model.layers.0.mlp.gate"]


def test_sequence_parallelism_is_read_from_the_plan():
    found = {
        name: runs_sequence_parallel(load_plan(name)) for name in ("tp", "decode", "sp", "dsa_cp", "dsa_cp_engine")
    }
    assert found == {"tp": False, "decode": False, "sp": True, "dsa_cp": True, "dsa_cp_engine": True}
    assert not runs_sequence_parallel(load_plan("dsa_cp_engine_c"))  # hidden states full between layers


def test_tensorcast_settles_types_by_plan():
    scheme = load_scheme("w8a8")
    types = classify(scheme, "w8a8", MODULES)
    assert [types[m].type for m in MODULES] == ["FLOAT", "FLOAT", "FLOAT"]
    settled = load_accounting("tensorcast").settle(types, scheme, load_plan("tp"), "tensorcast")
    assert [settled[m].type for m in MODULES] == ["W8A8", "W8A8", "FLOAT"]
    assert settled[MODULES[0]] == Classified("W8A8", "rules tensorcast: no_sequence_parallel")
    kept = load_accounting("tensorcast").settle(types, scheme, load_plan("dsa_cp"), "tensorcast")
    assert kept == types
    old = load_accounting("tensorcast-old").settle(types, scheme, load_plan("dsa_cp"), "tensorcast-old")
    assert [old[m].type for m in MODULES] == ["W8A8", "W8A8", "FLOAT"]


def test_without_quantisation_the_default_type_is_float():
    scheme = load_scheme("none")
    settled = load_accounting("tensorcast").settle(classify(scheme, "none", MODULES), scheme, load_plan("tp"), "x")
    assert {c.type for c in settled.values()} == {"FLOAT"}


def test_dtypes_of_exceptions():
    bias = "model.layers.3.mlp.gate.e_score_correction_bias"
    assert load_accounting("engine").dtype_of(bias, torch.bfloat16) == torch.float32
    assert load_accounting("engine").dtype_of("model.layers.3.mlp.gate.weight", torch.bfloat16) == torch.bfloat16
    ranks = load_accounting("emulator")
    assert ranks.dtype_of("model.layers.3.mlp.gate.weight", torch.bfloat16) == torch.float32
    assert ranks.dtype_of(bias, torch.float64) == torch.float64
    assert ranks.dtype_of("model.rotary_emb.inv_freq", torch.float64) == torch.float32


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('state = "loaded"\nwhole_weights = true', "state must be processed"),
        ('state = "early"', r"state = 'early'"),
        ('state = "loaded"\nrounding = 2', "rounding: unknown field"),
    ],
)
def test_mistakes_in_a_profile_are_told(tmp_path, text, told):
    path = tmp_path / "mine.toml"
    path.write_text(f'description = "x"\ncounts = ["cache"]\n{text}\n')
    with pytest.raises(UsageError, match=told):
        load_accounting(str(path))


def test_unknown_rules_are_listed():
    with pytest.raises(UsageError, match=r"unknown accounting rules 'engin' \(allowed: emulator, engine, tensorcast"):
        load_accounting("engin")


def test_a_table_needs_its_size_in_the_config(ledger_of, tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(
        'description = "x"\nstate = "loaded"\ncounts = ["cache"]\n'
        '[[caches]]\nname = "cos"\ncomponent = "rope_cache"\nshape = ["max_positions", 2]\n'
    )
    with pytest.raises(UsageError, match=r"rope_cache\.cos: config\.json has no whole number 'max_positions'"):
        ledger_of("glm-5.1-mini", "tp", rules=str(path), quant="none", tp=4, ep=4)
