"""Weights: deterministic from a seed and the tensor's name, or read from a local HF safetensors checkpoint."""

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from emulator.errors import UsageError
from emulator.model.program import Program
from emulator.model.quantised import Range, quantised_tensors
from emulator.model.rope import inverse_frequencies

Source = Callable[[str, tuple[int, ...]], Tensor]

_INV_FREQ = "model.rotary_emb.inv_freq"
_AT_LEAST_FP32 = ("mlp.gate.weight", "mlp.gate.e_score_correction_bias")  # HF keeps the router in fp32


def weight_groups(
    program: Program, source: Source, dtype: torch.dtype, ranges: Mapping[str, Range] | None = None
) -> Iterator[dict[str, Tensor]]:
    """The Program's parameters in `dtype`, one layer (or top-level module) at a time.

    The router stays in at least float32, and inv_freq in float32, whatever the dtype. Quantised weights are made from
    the source's float ones. ranges: of the inputs of modules with a static activation scale (needs_ranges).
    """
    groups: dict[str, list[str]] = {}
    for name in program.parameters:
        match = re.match(r"model\.layers\.\d+", name)
        groups.setdefault(match[0] if match else name, []).append(name)
    for names in groups.values():
        loaded = {}
        for name in names:
            if name == _INV_FREQ:
                loaded[name] = inverse_frequencies(program.config)[0]
                continue
            module, _, leaf = name.rpartition(".")
            quantised = program.quantised.get(module)
            if quantised is None or leaf == "bias":
                loaded[name] = source(name, tuple(program.parameters[name].shape)).to(parameter_dtype(name, dtype))
            elif leaf == "weight":
                own = [n for n in names if n.startswith(f"{module}.")]
                shapes = {n.rpartition(".")[2]: tuple(program.parameters[n].shape) for n in own}
                made = quantised_tensors(
                    quantised, source(name, quantised.shape), dtype, shapes, (ranges or {}).get(module)
                )
                loaded.update({f"{module}.{made_leaf}": tensor for made_leaf, tensor in made.items()})
        yield loaded


def parameter_dtype(name: str, dtype: torch.dtype, parameter: Tensor | None = None) -> torch.dtype:
    """The dtype in which weight_groups holds a parameter. parameter: its meta tensor, which knows its own dtype if it
    belongs to a quantised weight."""
    own: torch.dtype | None = getattr(parameter, "own_dtype", None)
    if own is not None:
        return own
    if name == _INV_FREQ:
        return torch.float32
    return torch.promote_types(dtype, torch.float32) if name.endswith(_AT_LEAST_FP32) else dtype


def seeded(seed: int) -> Source:
    """Random weights that depend on the seed and the name only, so they are the same on any number of ranks.

    Scales keep activations near 1: linears in_features^-0.5, norms around 1, biases and the router's correction small.
    """

    def make(name: str, shape: tuple[int, ...]) -> Tensor:
        digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        values = torch.randn(shape, generator=generator, dtype=torch.float64)
        if name.endswith("norm.weight") or name.endswith("layernorm.weight"):
            return 1 + 0.1 * values
        if name.endswith(("bias", "e_score_correction_bias")):
            return 0.1 * values
        return values if name.endswith("embed_tokens.weight") else values * shape[-1] ** -0.5

    return make


class Checkpoint:
    """A local HF checkpoint: model.safetensors, or the shards of model.safetensors.index.json.

    Experts are read per expert (mlp.experts.E.gate_proj.weight, ...) or merged (mlp.experts.gate_up_proj). Raises
    UsageError for a tensor that is missing or has another shape.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self._handles: dict[str, Any] = {}  # opening a file parses its whole header
        index = folder / "model.safetensors.index.json"
        if index.exists():
            try:
                self.files = dict(json.loads(index.read_text())["weight_map"])
            except (OSError, ValueError, KeyError, TypeError) as error:
                raise UsageError(f"{index}: not a safetensors index with a weight_map ({error!r})") from None
        elif (folder / "model.safetensors").exists():
            self.files = dict.fromkeys(self._open("model.safetensors").keys(), "model.safetensors")
        else:
            raise UsageError(f"{folder}: no model.safetensors and no model.safetensors.index.json")

    def _open(self, file: str) -> Any:
        try:
            if file not in self._handles:
                self._handles[file] = safe_open(self.folder / file, framework="pt")
            return self._handles[file]
        except (SafetensorError, OSError) as error:
            raise UsageError(f"{self.folder / file}: not a readable safetensors file: {error}") from None

    def _read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        if name not in self.files:
            raise UsageError(f"{self.folder}: checkpoint has no tensor {name} (expected shape {list(shape)})")
        try:
            tensor = self._open(self.files[name]).get_tensor(name)
        except SafetensorError:
            raise UsageError(f"{self.folder / self.files[name]}: index names {name}, the file lacks it") from None
        if tensor.element_size() < 2 or f"{name}_scale_inv" in self.files:
            raise UsageError(f"{self.folder}: {name} is quantised ({tensor.dtype}): only float checkpoints can be read")
        if tuple(tensor.shape) != shape:
            raise UsageError(
                f"{self.folder}: tensor {name} has shape {list(tensor.shape)}, the config asks for {list(shape)}"
            )
        return tensor

    def __call__(self, name: str, shape: tuple[int, ...]) -> Tensor:
        if ".mlp.experts." not in name:
            return self._read(name, shape)
        base, _, which = name.removesuffix(".weight").rpartition(".")
        if f"{base}.{which}" in self.files:
            return self._read(f"{base}.{which}", shape)
        num_experts, rows, columns = shape
        if which == "down_proj":
            return torch.stack(
                [self._read(f"{base}.{e}.down_proj.weight", (rows, columns)) for e in range(num_experts)]
            )
        parts = [
            torch.cat([self._read(f"{base}.{e}.{part}_proj.weight", (rows // 2, columns)) for part in ("gate", "up")])
            for e in range(num_experts)
        ]
        return torch.stack(parts)
