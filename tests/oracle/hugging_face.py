"""Hugging Face's own model with random weights, and the run of it that ours is compared with."""

import ast
import copy
import importlib.util
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from emulator.model.config import model_folder


@dataclass(frozen=True)
class Checkpoint:
    """HF's model, eager and in one dtype; folder: what its save_pretrained wrote; config: the config.json it is of."""

    config: dict[str, Any]
    model: nn.Module
    folder: Path


@dataclass(frozen=True)
class Run:
    """inputs, outputs: hidden states [T, D] around each decoder layer; topk: HF's ids [T, K] of each layer that has
    an indexer, None of the others; logits [T, vocab]."""

    inputs: list[Tensor]
    outputs: list[Tensor]
    topk: list[Tensor | None]
    logits: Tensor


def mini_config(name: str, **changes: Any) -> dict[str, Any]:
    """config.json of a model under profiles/models, with changes."""
    return json.loads((model_folder(name) / "config.json").read_text()) | changes


def make_checkpoint(folder: Path, config: dict[str, Any], dtype: torch.dtype, seed: int = 0) -> Checkpoint:
    """HF's model of `config` with random weights, saved to `folder`. In float64, nothing of it is below float64."""
    source = folder / "source"
    source.mkdir(parents=True)
    (source / "config.json").write_text(json.dumps(config))
    hf_config = transformers.AutoConfig.from_pretrained(source)
    [name] = config["architectures"]
    cls = getattr(transformers, name)
    if dtype == torch.float64:
        cls = getattr(widened(sys.modules[cls.__module__]), name)
    model = cls._from_config(hf_config, attn_implementation="eager", experts_implementation="eager")
    model = model.to(dtype).eval()  # after the rotary frequencies were computed, in float32
    randomise(model, seed)
    model.save_pretrained(folder / "saved")
    return Checkpoint(config, model, folder / "saved")


def randomise(model: nn.Module, seed: int) -> None:
    """Random values for everything that a checkpoint holds: HF's ones and zeros (norms, biases, the router's
    correction) would hide a weight that is left out."""
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in model.state_dict().items():
        values = torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
        if name.endswith(("bias", "e_score_correction_bias")):
            values *= 0.2
        elif tensor.dim() == 1:
            values = 1 + 0.2 * values
        elif not name.endswith("embed_tokens.weight"):
            values *= tensor.shape[-1] ** -0.5
        tensor.copy_(values)


def run(model: nn.Module, input_ids: Tensor) -> Run:
    """One forward of HF's model over a single sequence, without a cache."""
    inputs: list[Tensor] = []
    outputs: list[Tensor] = []
    topk: list[Tensor | None] = []
    hooks = []
    for layer in model.model.layers:
        hooks.append(layer.register_forward_pre_hook(lambda _, args: inputs.append(args[0][0])))
        hooks.append(
            layer.register_forward_hook(
                lambda _, args, output: outputs.append((output[0] if isinstance(output, tuple) else output)[0])
            )
        )
        indexer = getattr(layer.self_attn, "indexer", None)
        if indexer is None:  # its place in the list is filled when the layer before it ends
            hooks.append(layer.register_forward_pre_hook(lambda _, args: topk.append(None)))
        else:
            hooks.append(indexer.register_forward_hook(lambda _, args, output: topk.append(output[0])))
    try:
        with torch.no_grad():
            logits = model(input_ids=input_ids.unsqueeze(0), use_cache=False).logits[0]
    finally:
        for hook in hooks:
            hook.remove()
    return Run(inputs, outputs, topk, logits)


class _Widen(ast.NodeTransformer):
    """float32 becomes float64: dtype literals and .float() calls, but not where the rotary frequencies are made."""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        return node if node.name == "compute_default_rope_parameters" else self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        self.generic_visit(node)
        if isinstance(node.value, ast.Name) and node.value.id == "torch" and node.attr in ("float32", "float"):
            node.attr = "float64"
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        if isinstance(node.func, ast.Attribute) and node.func.attr == "float" and not node.args:
            node.func.attr = "double"
        return node


def widened(module: ModuleType) -> ModuleType:
    """The installed modelling module, loaded once more with its float32 islands (norms, router, softmax, indexer)
    widened to float64. `model.double()` alone leaves them, and is 1e-6 away from float64."""
    name = f"{module.__name__}_float64"
    if name in sys.modules:
        return sys.modules[name]
    assert module.__file__ is not None
    spec = importlib.util.spec_from_file_location(name, module.__file__)
    assert spec is not None
    wide = importlib.util.module_from_spec(spec)
    sys.modules[name] = wide  # its decorators look their own module up
    exec(compile(_Widen().visit(ast.parse(Path(module.__file__).read_text())), module.__file__, "exec"), wide.__dict__)
    return wide


def with_latent_norm_eps(model: nn.Module, eps: float) -> nn.Module:
    """A copy of HF's model whose q_a and kv_a norms use `eps`."""
    model = copy.deepcopy(model)
    for layer in model.model.layers:
        layer.self_attn.q_a_layernorm.variance_epsilon = eps
        layer.self_attn.kv_a_layernorm.variance_epsilon = eps
    return model
