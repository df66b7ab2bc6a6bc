"""quant_model_description.json: read, checked against the checkpoint or the parameters, and winning over a scheme."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from emulator.errors import UsageError
from emulator.model.quant_description import checkpoint_names, find_description, read_description

PARAMETERS = {
    "model.embed_tokens.weight": (10, 6),
    "model.layers.0.self_attn.q_a_proj.weight": (4, 6),
    "model.layers.0.self_attn.kv_a_proj_with_mqa.weight": (5, 6),
    "model.layers.0.mlp.gate.weight": (2, 6),
    "model.layers.0.mlp.gate.e_score_correction_bias": (2,),
    "model.layers.0.mlp.experts.gate_up_proj.weight": (2, 6, 6),
    "model.layers.0.mlp.experts.down_proj.weight": (2, 6, 3),
    "model.norm.weight": (6,),
}
MTP = {"model.layers.1.eh_proj.weight": (6, 12)}
ATTENTION = [n.removesuffix(".weight") for n in PARAMETERS if "self_attn" in n]
EXPERTS = [f"model.layers.0.mlp.experts.{e}.{p}_proj" for e in (0, 1) for p in ("gate", "up", "down")]


def _types() -> dict[str, object]:
    """A W8A8_DYNAMIC file of these parameters, with a ModelSlim file's other entries."""
    types: dict[str, object] = {n: "FLOAT" for n in PARAMETERS if ".experts." not in n and "self_attn" not in n}
    del types["model.layers.0.mlp.gate.e_score_correction_bias"]
    for module in ATTENTION + EXPERTS:
        types.update({f"{module}.{leaf}": "W8A8_DYNAMIC" for leaf in ("weight", "weight_scale", "weight_offset")})
    return {
        **types, "model_quant_type": "W8A8_DYNAMIC", "version": "1.0.0", "group_size": 0, "fa_quant_type": "FAKQuant",
        "model.layers.0.self_attn.fa_k.scale": "FAKQuant", "optional": {"quarot": {}},
    }  # fmt: skip


def _tensors() -> dict[str, torch.Tensor]:
    """The checkpoint that fits it."""
    tensors = {n: torch.zeros(s) for n, s in PARAMETERS.items() if ".experts." not in n and "self_attn" not in n}
    shapes = {m: PARAMETERS[f"{m}.weight"] for m in ATTENTION}
    shapes |= {m: (6, 3) if m.endswith("down_proj") else (3, 6) for m in EXPERTS}
    for module, (out, into) in shapes.items():
        tensors[f"{module}.weight"] = torch.zeros(out, into, dtype=torch.int8)
        for leaf in ("weight_scale", "weight_offset"):
            tensors[f"{module}.{leaf}"] = torch.zeros(out, 1, dtype=torch.bfloat16)
    return tensors


def _classify(
    folder: Path, types: dict[str, object], tensors: dict[str, torch.Tensor] | None = None, mtp: bool = False
):
    (folder / "quant_model_description.json").write_text(json.dumps(types))
    if tensors is not None:
        save_file(tensors, folder / "quant_model_weight.safetensors")
    path = find_description(folder)
    assert path is not None
    wanted = {**PARAMETERS, **(MTP if mtp else {})}
    return read_description(path).classify(wanted, MTP if mtp else (), 1)


def test_types_of_modules(tmp_path):
    for tensors in (None, _tensors()):
        found = _classify(tmp_path, _types(), tensors)
        assert {m: c.type for m, c in found.items()} == {
            "model.embed_tokens": "FLOAT", "model.norm": "FLOAT", "model.layers.0.mlp.gate": "FLOAT",
            **{m: "W8A8_DYNAMIC" for m in ATTENTION}, "model.layers.0.mlp.experts.gate_up_proj": "W8A8_DYNAMIC",
            "model.layers.0.mlp.experts.down_proj": "W8A8_DYNAMIC",
        }  # fmt: skip
    assert found["model.norm"].rule == "quant_model_description.json: FLOAT"


def test_mtp_layers_may_be_missing(tmp_path):
    assert _classify(tmp_path, _types(), mtp=True)["model.layers.1.eh_proj"].type == "FLOAT"
    listed = {**_types(), "model.layers.1.eh_proj.weight": "W8A8_DYNAMIC"}
    assert _classify(tmp_path, listed, mtp=True)["model.layers.1.eh_proj"].type == "W8A8_DYNAMIC"
    assert "model.layers.1.eh_proj" not in _classify(tmp_path, listed)  # not asked for


def test_names_of_merged_experts():
    assert checkpoint_names("a.experts.down_proj.weight", (2, 6, 3)) == [
        "a.experts.0.down_proj.weight", "a.experts.1.down_proj.weight",
    ]  # fmt: skip
    assert checkpoint_names("a.experts.gate_up_proj.weight", (1, 6, 6)) == [
        "a.experts.0.gate_proj.weight", "a.experts.0.up_proj.weight",
    ]  # fmt: skip


Q_A, KV_A = (f"model.layers.0.self_attn.{name}" for name in ("q_a_proj", "kv_a_proj_with_mqa"))


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({f"{Q_A}.weight": None}, f"against: {Q_A}.weight is not in the file"),
        ({"model.layers.0.mlp.w.weight": "FLOAT"}, "against: model.layers.0.mlp.w.weight (FLOAT) is in the file only"),
        (
            {f"{Q_A}.weight": "W2A2", f"{KV_A}.weight": "W2A2"},
            f"against: {Q_A}.weight has type W2A2 (known: FLOAT, W4A8",
        ),
        (
            {f"{KV_A}.weight": "FLOAT"},
            f"{KV_A}.weight is FLOAT, but {Q_A}.weight, with which it is fused, is W8A8_DYNAMIC",
        ),
        (
            {f"{EXPERTS[4]}.weight": "FLOAT"},
            f"{EXPERTS[4]}.weight is FLOAT, but {EXPERTS[0]}.weight, with which it is fused, is W8A8_DYNAMIC",
        ),
    ],
)
def test_disagreement_with_the_parameters(tmp_path, change, told):
    types = {k: v for k, v in {**_types(), **change}.items() if v is not None}
    with pytest.raises(UsageError) as raised:
        _classify(tmp_path, types)
    assert told.removeprefix("against: ") in str(raised.value)
    assert "disagrees with the model's parameters" in str(raised.value)
    if told.startswith("against: "):  # the only disagreement, or the first one
        assert f"the model's parameters: {told.removeprefix('against: ')}" in str(raised.value)


@pytest.mark.parametrize(
    ("types", "tensors", "told"),
    [
        ({}, {f"{Q_A}.weight": torch.zeros(4, 6)}, f"{Q_A}.weight is W8A8_DYNAMIC, so int8 [4, 6], but F32 [4, 6] in"),
        ({}, {f"{Q_A}.weight": torch.zeros(6, 4, dtype=torch.int8)}, "so int8 [4, 6], but I8 [6, 4] in the checkpoint"),
        (
            {},
            {"model.norm.weight": torch.zeros(6, dtype=torch.int8)},
            "model.norm.weight is FLOAT, so float [6], but I8",
        ),
        ({}, {f"{EXPERTS[5]}.weight_scale": None}, f"{EXPERTS[5]}.weight_scale (W8A8_DYNAMIC) is in the file only"),
        ({f"{Q_A}.weight_scale": None}, {}, f"{Q_A}.weight_scale is in the checkpoint only"),
        ({}, {"model.norm.weight": None}, "model.norm.weight is not in the checkpoint"),
    ],
)
def test_disagreement_with_the_checkpoint(tmp_path, types, tensors, told):
    changed = {k: v for k, v in {**_types(), **types}.items() if v is not None}
    stored = {k: v for k, v in {**_tensors(), **tensors}.items() if v is not None}
    with pytest.raises(UsageError) as raised:
        _classify(tmp_path, changed, stored)
    assert "disagrees with the checkpoint beside it: " in str(raised.value)
    assert told in str(raised.value)


def test_the_first_disagreements_are_listed(tmp_path):
    types = {k: v for k, v in _types().items() if "experts" not in k}
    with pytest.raises(UsageError) as raised:
        _classify(tmp_path, types)
    text = str(raised.value)
    assert all(f"{m}.weight is not in the file" in text for m in EXPERTS[:2])
    assert text.count("not in the file") == 5
    assert text.endswith("; and 1 more")


@pytest.mark.parametrize(
    ("text", "told"),
    [("{", "not readable as JSON"), ("[1]", "expected a JSON object"), ('{"version": "1"}', "no entry")],
)
def test_files_that_are_no_description(tmp_path, text, told):
    path = tmp_path / "quant_model_description.json"
    path.write_text(text)
    with pytest.raises(UsageError, match=told):
        read_description(path)
