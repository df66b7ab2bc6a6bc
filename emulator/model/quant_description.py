"""quant_model_description.json: the quantisation type of every tensor of a ModelSlim checkpoint, checked against the
checkpoint's own tensors, or against the model's parameters where only a config.json is there.

Format: a flat object, tensor name -> type, beside scalar metadata (as vllm-ascend's quantization/modelslim_config.py
reads it). A fused module's parts must agree; MTP layers may be missing and are FLOAT then.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open

from emulator import profiles
from emulator.errors import UsageError
from emulator.model.quantisation import FLOAT, Classified, load_type

FILE_NAME = "quant_model_description.json"
_SHOWN = 5  # disagreements in an error

# what a checkpoint may hold of a module; other dotted keys (fa_k.scale, indexer.quant_type) speak of caches
_LEAVES = (
    "weight", "weight_scale", "weight_offset", "input_scale", "input_offset", "quant_bias", "deq_scale", "scale_bias",
)  # fmt: skip
_FUSED = (("gate_proj", "up_proj"), ("q_a_proj", "kv_a_proj_with_mqa"))
_DTYPES = {"I8": "int8", "I32": "int32", "I64": "int64", "F32": "float32", "BF16": "bfloat16"}


@dataclass(frozen=True)
class Stored:
    """A tensor of a checkpoint: shape, and dtype in safetensors' word for it ("" where it is not known)."""

    shape: tuple[int, ...]
    dtype: str = ""


@dataclass(frozen=True)
class Description:
    """A file's tensor entries: name -> type."""

    path: Path
    types: Mapping[str, str]

    def classify(
        self, parameters: Mapping[str, tuple[int, ...]], mtp_parameters: Iterable[str], num_layers: int
    ) -> dict[str, Classified]:
        """Type of each module with weights. parameters: name -> whole shape, of all modules; mtp_parameters: those of
        MTP layers. num_layers: decoder layers of the model.

        Raises UsageError that lists the first tensors on which the file disagrees with the checkpoint in its folder, or
        with the parameters if there is none.
        """
        mtp = set(mtp_parameters)
        weights = {n: s for n, s in parameters.items() if n.endswith(".weight")}
        expected = {part: n for n, s in weights.items() for part in checkpoint_names(n, s)}
        stored = stored_tensors(self.path.parent)
        problems = [*self._missing(expected, mtp, stored, num_layers), *self._unlike_parts(expected)]
        found = {}
        for name, shape in weights.items():
            module = name.removesuffix(".weight")
            given = [self.types[part] for part in checkpoint_names(name, shape) if part in self.types]
            if given:
                found[module] = Classified(given[0], f"{self.path.name}: {given[0]}")
                if stored:
                    problems += self._unlike_stored(name, shape, given[0], stored)
            elif name in mtp:
                found[module] = Classified(FLOAT, f"{self.path.name}: MTP layer not listed, so FLOAT")
        if problems:
            against = "the checkpoint beside it" if stored else "the model's parameters"
            more = f"; and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
            raise UsageError(f"{self.path} disagrees with {against}: {'; '.join(problems[:_SHOWN])}{more}")
        for name in parameters:  # buffers and biases of modules without a weight of their own
            found.setdefault(name.rpartition(".")[0], Classified(FLOAT, f"{self.path.name}: no weight"))
        return found

    def _missing(
        self, expected: Mapping[str, str], mtp: set[str], stored: Mapping[str, Stored], num_layers: int
    ) -> Iterator[str]:
        """Tensors that one side has and the other lacks, and types that nobody knows."""
        known = _known_types()
        for part in (part for part, name in expected.items() if name not in mtp):
            if part not in self.types:
                yield f"{part} is not in the file"
            if stored and part not in stored:
                yield f"{part} is not in the checkpoint"
        modules = {part.removesuffix(".weight") for part in expected}
        for name, type_name in self.types.items():
            module = name.rpartition(".")[0]
            if (_layer_of(name) or 0) >= num_layers and module not in modules:
                continue  # an MTP layer that is not asked for
            if module not in modules or (stored and name not in stored):
                yield f"{name} ({type_name}) is in the file only"
            elif type_name not in known:
                yield f"{name} has type {type_name} (known: {', '.join(sorted(known))})"
        for name in stored:
            module, _, leaf = name.rpartition(".")
            if leaf in _LEAVES[1:] and module in modules and name not in self.types:
                yield f"{name} is in the checkpoint only"

    def _unlike_parts(self, expected: Mapping[str, str]) -> Iterator[str]:
        """Parts of one fused weight, and experts of one layer, that have different types."""
        first: dict[str, str] = {}
        for part, name in expected.items():
            if part not in self.types:
                continue
            base, _, leaf = part.removesuffix(".weight").rpartition(".")
            fused = next((group[0] for group in _FUSED if leaf in group), leaf)
            whole = f"{base}.{fused}" if part == name else name.rpartition(".experts.")[0]
            other = first.setdefault(whole, part)
            if self.types[other] != self.types[part]:
                yield f"{part} is {self.types[part]}, but {other}, with which it is fused, is {self.types[other]}"

    def _unlike_stored(
        self, name: str, shape: tuple[int, ...], type_name: str, stored: Mapping[str, Stored]
    ) -> Iterator[str]:
        """Tensors of the checkpoint whose dtype or shape is not what the type says."""
        if type_name not in _known_types():
            return
        for part in checkpoint_names(name, shape):
            base = part.removesuffix(".weight")
            for leaf, (want, dtype) in _stored_form(name, part, shape, type_name).items():
                found = stored.get(f"{base}.{leaf}")
                if found is None:
                    if leaf != "weight":  # a missing weight has been told
                        yield f"{base}.{leaf}, which {type_name} needs, is not in the checkpoint"
                elif not _same_dtype(found.dtype, dtype) or found.shape != want:
                    yield (
                        f"{base}.{leaf} is {type_name}, so {dtype} {list(want)}, "
                        f"but {found.dtype} {list(found.shape)} in the checkpoint"
                    )


def _stored_form(
    name: str, part: str, shape: tuple[int, ...], type_name: str
) -> dict[str, tuple[tuple[int, ...], str]]:
    """Tensors of a type in a checkpoint: last name -> (shape, dtype). name, shape: of the whole weight; part: its own
    name in the checkpoint, one expert's where the whole is that of all experts."""
    if part != name:
        halves = 2 if name.endswith(".gate_up_proj.weight") else 1
        shape = (1, shape[1] // halves, shape[2])
    if type_name == FLOAT:
        return {"weight": (shape[1:] if part != name else shape, "float")}
    sizes = {"experts": shape[0], "out": shape[-2], "in": shape[-1]}
    module = name.removesuffix(".weight")
    rows = load_type(type_name).rows(module, len(shape), type_name)
    shapes = {row.name: (row.local_shape(sizes, module), row.dtype) for row in rows if row.held != "after"}
    return {leaf: (found[1:] if part != name else found, dtype) for leaf, (found, dtype) in shapes.items()}


def _known_types() -> set[str]:
    return {FLOAT, *profiles.names("quant_types")}


def _same_dtype(found: str, wanted: str) -> bool:
    return found in ("F64", "F32", "F16", "BF16") if wanted == "float" else _DTYPES.get(found) == wanted


def _layer_of(name: str) -> int | None:
    """The decoder layer in a tensor's name."""
    match = re.match(r"model\.layers\.(\d+)\.", name)
    return int(match[1]) if match else None


def checkpoint_names(name: str, shape: tuple[int, ...]) -> list[str]:
    """A weight's names in a checkpoint: of each expert for merged experts [E, 2I, D] and [E, D, I], else its own."""
    if len(shape) != 3:
        return [name]
    base, _, which = name.removesuffix(".weight").rpartition(".")
    parts = ("gate_proj", "up_proj") if which == "gate_up_proj" else (which,)
    return [f"{base}.{expert}.{part}.weight" for expert in range(shape[0]) for part in parts]


def stored_tensors(folder: Path) -> dict[str, Stored]:
    """Names, shapes and dtypes of all tensors in a folder's safetensors files, from their headers."""
    found: dict[str, Stored] = {}
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(path, framework="pt") as handle:
                for name in handle.keys():  # noqa: SIM118  (the handle is no mapping)
                    part = handle.get_slice(name)
                    found[name] = Stored(tuple(part.get_shape()), part.get_dtype())
        except (SafetensorError, OSError) as error:
            raise UsageError(f"{path}: not a readable safetensors file: {error}") from None
    return found


def find_description(folder: Path) -> Path | None:
    """The description beside a model's config.json, if there is one."""
    path = folder / FILE_NAME
    return path if path.is_file() else None


def read_description(path: Path) -> Description:
    """Reads a description. UsageError when it is not a JSON object with a type for at least one weight."""
    try:
        data = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UsageError(f"{path}: not readable as JSON: {error}") from None
    if not isinstance(data, dict):
        raise UsageError(f"{path}: expected a JSON object, found {type(data).__name__}")
    types = {}
    for key, value in data.items():
        name = key.replace(".weight_packed", ".weight")
        if isinstance(value, str) and name.rpartition(".")[2] in _LEAVES:
            types[name] = value
    if not any(name.endswith(".weight") for name in types):
        raise UsageError(f"{path}: no entry of the form <module>.weight: <type>")
    return Description(path, types)
