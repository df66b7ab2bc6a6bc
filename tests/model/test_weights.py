"""Weights: a function of seed and name, or read from a checkpoint, with one clear line for every mistake."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from emulator.errors import UsageError
from emulator.model.config import parse_config
from emulator.model.program import Program, build_program
from emulator.model.weights import Checkpoint, seeded, weight_groups

NORM, LINEAR = "model.layers.0.input_layernorm.weight", "model.layers.0.self_attn.q_a_proj.weight"


@pytest.fixture
def program(tiny: dict[str, Any]) -> Program:
    return build_program(parse_config(tiny, "test"))


# --- seeded ----------------------------------------------------------------------------------------------------------


def test_seeded_weights_depend_on_seed_and_name_only() -> None:
    first = seeded(3)(LINEAR, (4, 5))
    other_names = seeded(3)
    other_names(NORM, (7,))  # an earlier call and the global generator must not matter
    torch.manual_seed(99)
    assert torch.equal(other_names(LINEAR, (4, 5)), first)
    assert not torch.equal(seeded(4)(LINEAR, (4, 5)), first)
    assert not torch.equal(seeded(3)(LINEAR.replace("layers.0", "layers.1"), (4, 5)), first)


def test_seeded_weights_leave_the_global_generator_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    seeded(0)(LINEAR, (4, 5))
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize(
    ("name", "shape", "mean", "deviation"),
    [
        (LINEAR, (300, 400), 0.0, 400**-0.5),  # in_features^-0.5
        (NORM, (100_000,), 1.0, 0.1),
        ("model.layers.0.self_attn.indexer.k_norm.weight", (100_000,), 1.0, 0.1),
        ("model.layers.0.self_attn.indexer.k_norm.bias", (100_000,), 0.0, 0.1),
        ("model.layers.3.mlp.gate.e_score_correction_bias", (100_000,), 0.0, 0.1),
        ("model.embed_tokens.weight", (300, 400), 0.0, 1.0),
        ("model.layers.3.mlp.experts.down_proj.weight", (10, 100, 100), 0.0, 0.1),
    ],
)
def test_scales_keep_activations_near_one(name: str, shape: tuple[int, ...], mean: float, deviation: float) -> None:
    values = seeded(0)(name, shape)
    assert values.dtype == torch.float64
    assert float(values.mean()) == pytest.approx(mean, abs=0.01 * max(deviation, 0.1))
    assert float(values.std()) == pytest.approx(deviation, rel=0.02)


def test_groups_hold_every_parameter_once_and_keep_the_router_wide(program: Program) -> None:
    groups = list(weight_groups(program, seeded(0), torch.bfloat16))
    names = [name for group in groups for name in group]
    assert sorted(names) == sorted(program.parameters)
    weights = {name: tensor for group in groups for name, tensor in group.items()}
    assert all(tuple(weights[n].shape) == tuple(p.shape) for n, p in program.parameters.items())
    wide = {name for name, tensor in weights.items() if tensor.dtype == torch.float32}
    gate = "model.layers.1.mlp.gate"
    assert wide == {f"{gate}.weight", f"{gate}.e_score_correction_bias", "model.rotary_emb.inv_freq"}
    # one layer at a time: a layer's weights are never split over two groups
    layers = [{n.split(".")[2] for n in g if n.startswith("model.layers.")} for g in groups]
    assert sorted(x for found in layers for x in found) == ["0", "1"]


def test_inverse_frequencies_are_float32_in_every_dtype(program: Program) -> None:
    for dtype in (torch.float64, torch.bfloat16):
        weights = {k: v for group in weight_groups(program, seeded(0), dtype) for k, v in group.items()}
        inv_freq = weights["model.rotary_emb.inv_freq"]
        assert inv_freq.dtype == torch.float32
        assert inv_freq.tolist() == [1.0]  # theta^0, the only pair of a rope dim of 2


# --- checkpoints -----------------------------------------------------------------------------------------------------


def one_line(error: pytest.ExceptionInfo[UsageError]) -> str:
    text = str(error.value)
    assert "\n" not in text
    return text


def test_a_tensor_is_read_as_it_is(save_checkpoint: Callable[..., Path], numbered: Callable[..., Tensor]) -> None:
    source = Checkpoint(save_checkpoint({LINEAR: numbered(2, 3)}))
    assert torch.equal(source(LINEAR, (2, 3)), numbered(2, 3))


def test_a_missing_tensor(save_checkpoint: Callable[..., Path], numbered: Callable[..., Tensor]) -> None:
    source = Checkpoint(save_checkpoint({LINEAR: numbered(2, 3)}))
    with pytest.raises(UsageError, match=NORM) as error:
        source(NORM, (7,))
    assert "[7]" in one_line(error)


def test_a_misshaped_tensor(save_checkpoint: Callable[..., Path], numbered: Callable[..., Tensor]) -> None:
    source = Checkpoint(save_checkpoint({LINEAR: numbered(3, 2)}))
    with pytest.raises(UsageError, match=LINEAR) as error:
        source(LINEAR, (2, 3))
    assert "[3, 2]" in one_line(error)
    assert "[2, 3]" in one_line(error)


def test_a_folder_without_weights(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"model\.safetensors") as error:
        Checkpoint(tmp_path)
    assert str(tmp_path) in one_line(error)


@pytest.mark.parametrize("length", [0, 4, 60, 200])
def test_a_truncated_file(length: int, save_checkpoint: Callable[..., Path], numbered: Callable[..., Tensor]) -> None:
    folder = save_checkpoint({LINEAR: numbered(20, 30)})
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[:length])
    with pytest.raises(UsageError, match=r"model\.safetensors") as error:
        Checkpoint(folder)(LINEAR, (20, 30))
    one_line(error)


def test_shards_of_an_index(tmp_path: Path, numbered: Callable[..., Tensor]) -> None:
    save_file({LINEAR: numbered(2, 3)}, tmp_path / "a.safetensors")
    save_file({NORM: numbered(4, start=50)}, tmp_path / "b.safetensors")
    index = {"weight_map": {LINEAR: "a.safetensors", NORM: "b.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    source = Checkpoint(tmp_path)
    assert torch.equal(source(LINEAR, (2, 3)), numbered(2, 3))
    assert torch.equal(source(NORM, (4,)), numbered(4, start=50))


INDEXES = [
    ("shard that is not there", json.dumps({"weight_map": {LINEAR: "gone.safetensors"}}), "gone.safetensors"),
    ("tensor that its shard lacks", json.dumps({"weight_map": {LINEAR: "a.safetensors"}}), LINEAR),
    ("no JSON", '{"weight_map": {', "index.json"),
    ("no weight map", "{}", "weight_map"),
]


@pytest.mark.parametrize(("text", "named"), [i[1:] for i in INDEXES], ids=[i[0] for i in INDEXES])
def test_a_broken_index(tmp_path: Path, text: str, named: str, numbered: Callable[..., Tensor]) -> None:
    save_file({NORM: numbered(4)}, tmp_path / "a.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(UsageError) as error:
        Checkpoint(tmp_path)(LINEAR, (2, 3))
    assert named in one_line(error)


EXPERTS = "model.layers.1.mlp.experts"


def test_experts_kept_apart_or_merged_are_the_same(
    save_checkpoint: Callable[..., Path], numbered: Callable[..., Tensor]
) -> None:
    # expert e: gate [2, 3], up [2, 3], down [3, 2]; merged rows are gate then up
    gate, up, down = numbered(4, 2, 3), numbered(4, 2, 3, start=100), numbered(4, 3, 2, start=200)
    apart: dict[str, Tensor] = {}
    for e in range(4):
        parts = {"gate_proj": gate[e], "up_proj": up[e], "down_proj": down[e]}
        apart |= {f"{EXPERTS}.{e}.{part}.weight": t for part, t in parts.items()}
    merged = {f"{EXPERTS}.gate_up_proj": torch.cat((gate, up), 1), f"{EXPERTS}.down_proj": down}
    for tensors, name in ((apart, "apart"), (merged, "merged")):
        source = Checkpoint(save_checkpoint(tensors, name))
        assert torch.equal(source(f"{EXPERTS}.gate_up_proj.weight", (4, 4, 3)), torch.cat((gate, up), 1))
        assert torch.equal(source(f"{EXPERTS}.down_proj.weight", (4, 3, 2)), down)


def test_a_missing_expert_is_named(save_checkpoint: Callable[..., Path], numbered: Callable[..., Tensor]) -> None:
    kept = {f"{EXPERTS}.{e}.{p}_proj.weight": numbered(2, 3) for e in (0, 1, 3) for p in ("gate", "up")}
    source = Checkpoint(save_checkpoint(kept))
    with pytest.raises(UsageError, match=r"experts\.2\.gate_proj\.weight") as error:
        source(f"{EXPERTS}.gate_up_proj.weight", (4, 4, 3))
    one_line(error)


def test_a_whole_model_round_trips(program: Program, save_checkpoint: Callable[..., Path]) -> None:
    made = {k: v for group in weight_groups(program, seeded(1), torch.float64) for k, v in group.items()}
    stored = {k.removesuffix(".weight") if ".experts." in k else k: v for k, v in made.items()}
    source = Checkpoint(save_checkpoint(stored))
    read = {k: v for group in weight_groups(program, source, torch.float64) for k, v in group.items()}
    assert read.keys() == made.keys()
    assert all(torch.equal(read[k], made[k]) for k in made)
