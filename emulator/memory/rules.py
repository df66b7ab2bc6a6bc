"""Accounting profiles (profiles/accounting): which of the tensors a rank could hold are counted, and in which dtype."""

from fnmatch import fnmatchcase
from typing import Literal

import torch
from pydantic import BaseModel, ConfigDict, NonNegativeInt, model_validator

from emulator.layout.plan import Plan
from emulator.model.quantisation import FLOAT, Category, Classified, QuantScheme, load_profile
from emulator.ops.registry import LOCAL

Dtype = Literal["float", "float32", "at_least_float32"]


class TypeRule(BaseModel):
    """Modules whose type these rules settle, in place of the scheme: FLOAT, or the scheme's default type."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    match: tuple[str, ...]
    type: Literal["FLOAT", "default"]
    when: Literal["always", "sequence_parallel", "no_sequence_parallel"] = "always"


class DerivedRow(BaseModel):
    """A tensor made from a module's weight once it is loaded. shape: numbers, heads (of the rank's part), or fields of
    config.json. Always in the model's dtype, never quantised."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    name: str
    match: str
    shape: tuple[int | str, ...]
    replaces_weight: bool
    nz: bool = False


class CacheRow(BaseModel):
    """A table that the model holds once. shape: numbers, or fields of config.json."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    name: str
    component: str
    shape: tuple[int | str, ...]
    dtype: Dtype = "float"


class Accounting(BaseModel):
    """An accounting profile's TOML file.

    state: tensors as they are loaded, or as they are after processing. counts: categories that are counted. absent:
    parameters (patterns) that are not held. mtp: whether MTP layers have the scheme's own type for them, or are
    classified like other layers, by its table of modules. dtypes: parameters kept in another dtype than the model's.
    types: the last rule that applies to a module wins; a quant_model_description.json wins over all. fused: linears
    with the same input that are held as one: what does not depend on their outputs exists once. whole_weights: whether
    a plan's whole weights of stored shards have buffers of their own. window_buffers: of layer-sharded weights, buffers
    for whole ones beside one per layer that the plan brings ahead (None: no buffers are counted). never_nz: modules
    that never store NZ blocks.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    description: str
    state: Literal["loaded", "processed"]
    counts: tuple[Category, ...]
    absent: tuple[str, ...] = ()
    mtp: Literal["scheme", "modules"] = "scheme"
    dtypes: dict[str, Dtype] = {}
    types: tuple[TypeRule, ...] = ()
    derived: tuple[DerivedRow, ...] = ()
    caches: tuple[CacheRow, ...] = ()
    fused: tuple[tuple[str, ...], ...] = ()
    whole_weights: bool = False
    window_buffers: NonNegativeInt | None = None
    never_nz: tuple[str, ...] = ()

    @model_validator(mode="after")
    def _consistent(self) -> "Accounting":
        if self.state == "loaded" and (self.derived or self.whole_weights):
            raise ValueError("derived tensors and whole weights are made after the load: state must be processed")
        return self

    def holds(self, parameter: str) -> bool:
        return not any(fnmatchcase(parameter, pattern) for pattern in self.absent)

    def has_own_inputs(self, module: str) -> bool:
        """Whether a module holds what belongs to its input, or the first of the linears it is fused with does."""
        leaf = module.rpartition(".")[2]
        return not any(leaf in group[1:] for group in self.fused)

    def dtype_of(self, parameter: str, model_dtype: torch.dtype) -> torch.dtype:
        """The dtype of a parameter that is not quantised."""
        word = next((w for pattern, w in self.dtypes.items() if fnmatchcase(parameter, pattern)), "float")
        return dtype_for(word, model_dtype)

    def settle(self, types: dict[str, Classified], scheme: QuantScheme, plan: Plan, name: str) -> dict[str, Classified]:
        """The scheme's types with these rules' own choices. name: of the rules."""
        condition = "sequence_parallel" if runs_sequence_parallel(plan) else "no_sequence_parallel"
        settled = dict(types)
        for rule in self.types:
            if rule.when not in ("always", condition):
                continue
            for module in types:
                if any(fnmatchcase(module, pattern) for pattern in rule.match):
                    chosen = FLOAT if rule.type == "FLOAT" else scheme.default
                    settled[module] = Classified(chosen, f"rules {name}: {condition}" if rule.when != "always" else
                                                 f"rules {name}")  # fmt: skip
        return settled


def dtype_for(word: str, model_dtype: torch.dtype) -> torch.dtype:
    if word == "float32":
        return torch.float32
    return torch.promote_types(model_dtype, torch.float32) if word == "at_least_float32" else model_dtype


def runs_sequence_parallel(plan: Plan) -> bool:
    """Whether a plan keeps local tokens between layers: its norms see the rows of one tp rank."""
    wanted = plan.input_of("model.layers.0.input_layernorm")
    return wanted is not None and wanted[1].get("tp") == LOCAL


def load_accounting(name: str) -> Accounting:
    """An accounting profile by name or path. Raises UsageError for an unknown one or a malformed file."""
    return load_profile("accounting", "accounting rules", name, Accounting)
