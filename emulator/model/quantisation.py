"""Quantisation as data: schemes say which type each module's weights have (profiles/quant), types which tensors a
module of that type holds (profiles/quant_types). Ranks, memory ledger and cost model read the same tables.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Literal, TypeVar

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from emulator import profiles
from emulator.errors import UsageError, first_problem

FLOAT = "FLOAT"  # the type of a weight that is not quantised

Category = Literal[
    "checkpoint_weight", "float_exception", "weight_scale", "weight_offset", "fp32_scale", "activation_scale",
    "quant_bias", "derived", "transposed_layout", "full_layout_copy", "cache",
]  # fmt: skip


class TensorRow(BaseModel):
    """One tensor of a quantised module.

    shape: numbers, or sizes of the rank's own part: in, out, experts, each with an optional divisor (out/2). dtype: a
    torch name, or float for the model's own. held: loading (until the weights are processed), after (made then), or
    always. replaces: the loading tensor that this one takes the place of. nz: may be stored in fractal NZ blocks.
    whole: where a plan uses whole weights of stored shards, the shards are gathered, or repeated, into a whole one.
    match: pattern of the modules that hold it.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    name: str
    shape: tuple[int | str, ...]
    dtype: Literal["float", "int8", "int32", "int64", "float32", "bfloat16"] = "float"
    category: Category
    held: Literal["loading", "always", "after"] = "always"
    replaces: str | None = None
    nz: bool = False
    whole: Literal["gathered", "repeated"] | None = None
    match: str = "*"

    @property
    def per_output(self) -> bool:
        """Whether its shape depends on the module's outputs."""
        return any(isinstance(d, str) and d.startswith("out") for d in self.shape)

    def torch_dtype(self, model_dtype: torch.dtype) -> torch.dtype:
        return model_dtype if self.dtype == "float" else getattr(torch, self.dtype)

    def local_shape(self, sizes: Mapping[str, int], module: str) -> tuple[int, ...]:
        """The shape for the sizes in, out and experts of a rank's part. UsageError where a divisor does not fit."""
        return tuple(d if isinstance(d, int) else self._size(d, sizes, module) for d in self.shape)

    def _size(self, word: str, sizes: Mapping[str, int], module: str) -> int:
        symbol, _, divisor = word.partition("/")
        if sizes[symbol] % int(divisor or 1):
            raise UsageError(f"{module}.{self.name}: {symbol} = {sizes[symbol]} is not divisible by {divisor}")
        return sizes[symbol] // int(divisor or 1)


class QuantType(BaseModel):
    """A type's TOML file. linear: tensors of a linear, weight [out, in]; grouped: of routed experts, weight [experts,
    out, in]. A type without rows for one of them does not exist for it."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    description: str
    linear: tuple[TensorRow, ...] = ()
    grouped: tuple[TensorRow, ...] = ()

    @model_validator(mode="after")
    def _consistent(self) -> "QuantType":
        for kind, rows in (("linear", self.linear), ("grouped", self.grouped)):
            loading = {row.name for row in rows if row.held == "loading"}
            symbols = {"in", "out"} | ({"experts"} if kind == "grouped" else set())
            for row in rows:
                if row.replaces is not None and (row.held != "after" or row.replaces not in loading):
                    raise ValueError(f"{kind} {row.name}: replaces {row.replaces!r}, which no loading row is")
                unknown = [d for d in row.shape if isinstance(d, str) and d.partition("/")[0] not in symbols]
                if unknown:
                    raise ValueError(f"{kind} {row.name}: size {unknown[0]!r} unknown (allowed: {sorted(symbols)})")
        return self

    def rows(self, module: str, dims: int, type_name: str) -> list[TensorRow]:
        """Tensors that a module with a `dims`-dimensional weight holds. UsageError where the type has none for it."""
        of_kind = {2: self.linear, 3: self.grouped}.get(dims, ())
        rows = [row for row in of_kind if fnmatchcase(module, row.match)]
        if not rows:
            kind = {2: "linears", 3: "routed experts"}.get(dims, "vectors")
            raise UsageError(f"{module}: type {type_name} does not exist for {kind}")
        return rows


class QuantScheme(BaseModel):
    """A scheme's TOML file. modules: module name pattern (* is any text) -> type, the first match wins; the last
    pattern is * and names the default type. mtp: type of everything in multi-token-prediction layers."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    description: str
    modules: dict[str, str] = Field(min_length=1)
    mtp: str = FLOAT

    @model_validator(mode="after")
    def _has_default(self) -> "QuantScheme":
        if list(self.modules)[-1] != "*":
            raise ValueError("modules: the last pattern must be *, the default type")
        return self

    @property
    def default(self) -> str:
        return self.modules["*"]


@dataclass(frozen=True)
class Classified:
    """A module's quantisation type, and the rule that gave it."""

    type: str
    rule: str


def classify(scheme: QuantScheme, name: str, modules: Iterable[str], mtp: Iterable[str] = ()) -> dict[str, Classified]:
    """Type of each module with weights, by the scheme's own table. name: of the scheme; mtp: modules of MTP layers."""
    found = {m: Classified(scheme.mtp, f"scheme {name}: MTP layers") for m in mtp}
    for module in modules:
        pattern = next(p for p in scheme.modules if fnmatchcase(module, p))
        found[module] = Classified(scheme.modules[pattern], f"scheme {name}: {pattern}")
    return found


Profile = TypeVar("Profile", bound=BaseModel)


def load_profile(kind: str, noun: str, name: str, form: type[Profile]) -> Profile:
    """A TOML profile of profiles/<kind>, by name or path. Raises UsageError for an unknown one or a malformed file."""
    path = profiles.root() / kind / f"{name}.toml"
    if not path.is_file():
        path = Path(name)
    if path.suffix != ".toml" or not path.is_file():
        raise UsageError(f"unknown {noun} {name!r} (allowed: {', '.join(profiles.names(kind))}, or a TOML file)")
    try:
        return form.model_validate(profiles.load_toml(path))
    except ValidationError as error:
        raise UsageError(f"{noun} {path}: {first_problem(error)}") from None


@cache
def load_scheme(name: str) -> QuantScheme:
    """A scheme of profiles/quant or a user's own file; all its types are read, too."""
    scheme = load_profile("quant", "quantisation scheme", name, QuantScheme)
    for type_name in {*scheme.modules.values(), scheme.mtp} - {FLOAT}:
        load_type(type_name)
    return scheme


@cache
def load_type(name: str) -> QuantType:
    """A type of profiles/quant_types by ModelSlim's name for it, such as W8A8_DYNAMIC."""
    return load_profile("quant_types", "quantisation type", name, QuantType)
