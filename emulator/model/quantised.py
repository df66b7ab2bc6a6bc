"""Quantised modules: a linear's, or routed experts', weight replaced by the tensors of its type, and those tensors made
from a float weight. Formulas: ModelSlim's checkpoints, as vllm-ascend reads them (quantization/methods).
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from emulator.errors import UsageError
from emulator.model.mtp import MTPLayer
from emulator.model.quantisation import FLOAT, classify, load_scheme, load_type
from emulator.ops.quantised import CODE_MAX, pack_int4

Range = tuple[float, float]  # the smallest and the largest value that a linear's input had


@dataclass(frozen=True)
class QuantisedModule:
    """type: of profiles/quant_types. shape: of the float weight that its codes are made from."""

    type: str
    shape: tuple[int, ...]


def quantise_modules(root: nn.Module, scheme_name: str) -> dict[str, QuantisedModule]:
    """Replaces the weights of every module that the scheme quantises, in place. Returns them by module name.

    Raises UsageError for a scheme that quantises a module which only runs in float, or a type without a kernel here.
    """
    scheme = load_scheme(scheme_name)
    modules = {name: m for name, m in root.named_modules() if "weight" in m._parameters}
    made = {}
    layers = [f"{name}." for name, module in root.named_modules() if isinstance(module, MTPLayer)]
    mtp = [name for name in modules if name.startswith(tuple(layers))]
    for name, chosen in classify(scheme, scheme_name, [m for m in modules if m not in mtp], mtp).items():
        if chosen.type == FLOAT:
            continue
        module = modules[name]
        if not getattr(module, "quantisable", False):
            raise UsageError(f"{name} is {chosen.type} ({chosen.rule}), but runs in float only")
        made[name] = QuantisedModule(chosen.type, tuple(module.get_parameter("weight").shape))
        _replace(module, name, chosen.type)
    return made


def _replace(module: nn.Module, name: str, type_name: str) -> None:
    """Parameters of the type's tensors as a checkpoint holds them. Each knows its sizes' words (out, in, experts), so
    that it is placed like the weight, and its own dtype if it is not the run's."""
    if type_name not in _MAKERS:
        raise UsageError(f"{name} is {type_name}, which no kernel here runs (kernels: {', '.join(_MAKERS)})")
    weight = module.get_parameter("weight")
    sizes = {"out": weight.shape[-2], "in": weight.shape[-1], "experts": weight.shape[0]}
    for row in load_type(type_name).rows(name, weight.dim(), type_name):
        if row.held == "after":
            continue
        tensor = torch.empty(row.local_shape(sizes, name), device="meta", dtype=row.torch_dtype(torch.float32))
        parameter = nn.Parameter(tensor, requires_grad=False)
        parameter.symbols = tuple(str(d).partition("/")[0] for d in row.shape)  # type: ignore[attr-defined]
        parameter.own_dtype = None if row.dtype == "float" else tensor.dtype  # type: ignore[attr-defined]
        if row.name == "weight":
            parameter.shard_unit = getattr(weight, "shard_unit", 1)  # type: ignore[attr-defined]
        module.register_parameter(row.name, parameter)


def needs_ranges(quantised: Mapping[str, QuantisedModule]) -> list[str]:
    """Modules whose activations have a static scale."""
    return [name for name, module in quantised.items() if module.type == "W8A8"]


def quantised_tensors(
    module: QuantisedModule, weight: Tensor, dtype: torch.dtype, shapes: Mapping[str, tuple[int, ...]],
    inputs: Range | None = None,
) -> dict[str, Tensor]:  # fmt: skip
    """The tensors of a module, by last name, from its float weight [..., O, I]. dtype: of the scales that are in the
    run's dtype; shapes: of all its tensors; inputs: of a module with a static activation scale."""
    return _MAKERS[module.type](weight, dtype, shapes, inputs)


def _codes(weight: Tensor, scale: Tensor, largest: int) -> Tensor:
    return (weight.double() / scale.double()).round().clamp(-largest, largest).to(torch.int8)


def _channel_scale(weight: Tensor, largest: int, dtype: torch.dtype) -> Tensor:
    """[..., O, 1]: the largest absolute value of each output channel has the largest code."""
    reach = weight.double().abs().amax(-1, keepdim=True)
    return torch.where(reach > 0, reach / largest, 1.0).to(dtype)


def _w8a8_dynamic(
    weight: Tensor, dtype: torch.dtype, shapes: Mapping[str, tuple[int, ...]], inputs: Range | None
) -> dict[str, Tensor]:
    scale = _channel_scale(weight, CODE_MAX, dtype)
    return {
        "weight": _codes(weight, scale, CODE_MAX), "weight_scale": scale,
        "weight_offset": torch.zeros_like(scale),  # symmetric
    }  # fmt: skip


def _w8a8(
    weight: Tensor, dtype: torch.dtype, shapes: Mapping[str, tuple[int, ...]], inputs: Range | None
) -> dict[str, Tensor]:
    assert inputs is not None, "a static activation scale needs the range of the inputs"
    made = _w8a8_dynamic(weight, dtype, shapes, inputs)
    low, high = min(inputs[0], 0.0), max(inputs[1], 0.0)
    scale = torch.tensor([(high - low) / (2 * CODE_MAX + 1) or 1.0], dtype=torch.float64).to(dtype)
    offset = int(torch.tensor(-CODE_MAX - 1 - low / float(scale)).round().clamp(-CODE_MAX - 1, CODE_MAX))
    sums = made["weight"].sum(-1, dtype=torch.int32)
    return {
        **made, "input_scale": scale, "input_offset": torch.tensor([offset], dtype=torch.int8),
        "quant_bias": -offset * sums,
        "deq_scale": (scale.double() * made["weight_scale"].double().squeeze(-1)).to(torch.float32),
    }  # fmt: skip


def _w4a8_dynamic(
    weight: Tensor, dtype: torch.dtype, shapes: Mapping[str, tuple[int, ...]], inputs: Range | None
) -> dict[str, Tensor]:
    """scale_bias in as many parts of the in-features as its last size says."""
    largest = 7
    scale = _channel_scale(weight, largest, torch.float32)
    codes = _codes(weight, scale, largest)
    parts = [part.sum(-1) for part in codes.double().tensor_split(shapes["scale_bias"][-1], -1)]
    return {
        "weight": pack_int4(codes), "weight_scale": scale, "weight_offset": torch.zeros_like(scale),
        "scale_bias": (8 * torch.stack(parts, -1) * scale.double()).to(torch.float32),
    }  # fmt: skip


_MAKERS = {"W8A8": _w8a8, "W8A8_DYNAMIC": _w8a8_dynamic, "W4A8_DYNAMIC": _w4a8_dynamic}
