"""Plans: a table from module name patterns to the layout and weight placement each module wants. Pure data."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, ValidationError
from torch.distributed.tensor.placement_types import Placement

from emulator import profiles
from emulator.errors import UsageError, first_problem
from emulator.layout.placement import Kind, parse_want, parse_weight
from emulator.ops.transition import Order


class Row(BaseModel):
    """One module's line: layout its inputs are brought to, placement of its weights, layout its outputs leave in. use:
    replicated gathers stored weights into whole ones where they are used.

    start: the collective that brings its input (or whole weight) is started before the first op of this module of the
    layer, and waited for where it is needed ("" starts it there). ahead: that many layers earlier; the first layers'
    weights are then there when a step begins, and are brought at its end for the next one."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    input: str | None = None
    weight: str | None = None
    output: str | None = None
    use: Literal["stored", "replicated"] | None = None
    start: str | None = None
    ahead: NonNegativeInt | None = None


class PlanFile(BaseModel):
    """A plan's TOML file. `extends` names a plan whose rows, variants and other fields come first; contract "" is none.
    pad: token rows are padded from the dp rank's own count, or from the largest of all dp ranks. decode: the plan of
    decode steps, in place of this one. needs: structure that a model must have for this plan. order: in which tokens
    are dealt out to the tp ranks."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    description: str
    extends: str | None = None
    contract: str | None = None
    pad: Literal["own", "dp_max"] | None = None
    decode: str | None = None
    needs: Literal["dsa"] | None = None
    order: Order | None = None
    modules: dict[str, Row] = {}
    variants: dict[str, "Variant"] = {}


class Variant(BaseModel):
    """A choice that adds rows to the plan: a default and, per option, its rows."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    default: str
    options: dict[str, dict[str, Row]] = Field(min_length=1)


@dataclass(frozen=True)
class Plan:
    """A resolved plan: rows of the plan, of those it extends, and of the chosen variant options."""

    name: str
    description: str
    contract: str | None
    variants: Mapping[str, str]
    rows: Mapping[str, Row]
    pad: Literal["own", "dp_max"] = "own"
    decode: str | None = None
    needs: Literal["dsa"] | None = None
    order: Order = "contiguous"

    @property
    def pads_to_dp_max(self) -> bool:
        """Whether token rows are padded from the largest count of all dp ranks. Rows that an ep group joins must be
        equally many, so a plan that joins them pads whatever it says."""
        return self.pad == "dp_max" or any(row.input == "group-token" for row in self.rows.values())

    def row(self, module: str) -> Row | None:
        """The row that applies to a module: `*` in a pattern stands for the layer number."""
        return self.rows.get(_pattern_of(module))

    def input_of(self, module: str) -> tuple[Kind, dict[str, Placement]] | None:
        row = self.row(module)
        return parse_want(row.input, f"plan {self.name}, {module}") if row and row.input else None

    def output_of(self, module: str) -> tuple[Kind, dict[str, Placement]] | None:
        row = self.row(module)
        return parse_want(row.output, f"plan {self.name}, {module}") if row and row.output else None

    def gathers_weight(self, module: str) -> bool:
        """Whether the module uses whole weights that it stores as shards."""
        row = self.row(module)
        return row is not None and row.use == "replicated"

    def weight_of(self, module: str) -> dict[str, Placement]:
        row = self.row(module)
        where = f"plan {self.name}, {module}"
        return parse_weight(row.weight, where, layer_of(module) or 0) if row and row.weight else {}

    def start_of(self, module: str) -> tuple[str, int] | None:
        """(pattern of the module before which the module's collective is started, layers ahead)."""
        row = self.row(module)
        return (row.start, row.ahead or 0) if row and row.start else None

    def check_modules(self, modules: Iterable[str]) -> None:
        """Raises UsageError for a row that names no module of the model family."""
        known = {_pattern_of(m) for m in modules} | OPTIONAL_MODULES
        for pattern in self.rows:
            if pattern not in known:
                close = ", ".join(sorted(k for k in known if k.rpartition(".")[2] == pattern.rpartition(".")[2]))
                hint = f"; did you mean {close}?" if close else "; see `emulator plan show tp` for the names"
                raise UsageError(f"plan {self.name}: row {pattern!r} matches no module{hint}")
            start = self.rows[pattern].start
            if start and start not in known:
                raise UsageError(f"plan {self.name}: {pattern} starts before {start!r}, which is no module")


# modules that only some layers or models have: a cut model may lack them, and the row is right all the same. The first
# are those of a multi-token-prediction layer
OPTIONAL_MODULES = frozenset(
    f"model.layers.*.{name}"
    for name in (
        *("embed_tokens", "enorm", "hnorm", "eh_proj", "shared_head.norm", "shared_head.head"),
        *(f"mlp.{m}" for m in ("gate_proj", "up_proj", "down_proj", "gate", "topk", "experts", "shared_experts")),
        *(f"mlp.experts.{m}" for m in ("dispatch", "gate_up_proj", "down_proj", "combine")),
        *(f"mlp.shared_experts.{m}" for m in ("gate_proj", "up_proj", "down_proj")),
        *(
            f"self_attn.{m}"
            for m in ("indexer", "indexer.wk", "indexer.wq_b", "indexer.k_norm", "indexer.weights_proj")
        ),
    )
)


@cache
def _pattern_of(module: str) -> str:
    return re.sub(r"\.\d+(?=\.|$)", ".*", module)


def module_pattern(module: str) -> str:
    """A module's name with `*` for its layer number."""
    return _pattern_of(module)


def layer_of(module: str) -> int | None:
    """Layer number in a qualified module name."""
    return next((int(part) for part in module.split(".") if part.isdigit()), None)


def _read(name: str) -> tuple[Path, PlanFile]:
    path: Path = profiles.find("plans", name)
    try:
        return path.resolve(), PlanFile.model_validate(profiles.load_toml(path))
    except ValidationError as error:
        raise UsageError(f"plan {path}: {first_problem(error)}") from None


def load_plan(name: str, variants: Mapping[str, str] | None = None) -> Plan:
    """Reads a plan by name or path and applies the variants' options.

    Raises UsageError for an unknown plan, variant or option, or a malformed file.
    """
    chosen = dict(variants or {})
    path, file = _read(name)
    stem = path.stem
    chain, seen = [file], {path}
    while chain[0].extends:
        parent_path, parent = _read(chain[0].extends)
        if parent_path in seen:
            raise UsageError(f"plan {stem}: extends itself through {parent_path.stem}")
        seen.add(parent_path)
        chain.insert(0, parent)

    offered: dict[str, Variant] = {}
    rows: dict[str, Row] = {}
    for layer in chain:
        offered.update(layer.variants)
        _merge(rows, layer.modules)
    for key in chosen:
        if key not in offered:
            raise UsageError(f"plan {stem}: unknown variant {key!r} (allowed: {', '.join(offered) or 'none'})")
    settled = {}
    for key, variant in offered.items():
        option = chosen.get(key, variant.default)
        if option not in variant.options:
            raise UsageError(f"plan {stem}: variant {key}={option!r} unknown (allowed: {', '.join(variant.options)})")
        settled[key] = option
        _merge(rows, variant.options[option])
    for pattern, row in rows.items():  # every word is read now, so that a typo is found before any run
        where = f"plan {stem}, {pattern}"
        for word in filter(None, (row.input, row.output)):
            parse_want(word, where)
        if row.weight:
            parse_weight(row.weight, where)
    contract = next((f.contract for f in reversed(chain) if f.contract is not None), None) or None
    pad: Literal["own", "dp_max"] = next((f.pad for f in reversed(chain) if f.pad is not None), "own")
    decode = next((f.decode for f in reversed(chain) if f.decode is not None), None) or None
    needs: Literal["dsa"] | None = next((f.needs for f in reversed(chain) if f.needs is not None), None)
    order: Order = next((f.order for f in reversed(chain) if f.order is not None), "contiguous")
    return Plan(stem, file.description, contract, settled, rows, pad, decode, needs, order)


def plan_for(name: str, variants: Mapping[str, str] | None, phase: str) -> Plan:
    """The plan of a step: phase is part of the decision. A decode step runs under the plan's `decode` plan, if it names
    one, with those of the variants that both offer. Raises UsageError as load_plan does."""
    plan = load_plan(name, variants)
    if phase != "decode" or plan.decode is None:
        return plan
    offered = load_plan(plan.decode).variants
    return load_plan(plan.decode, {k: v for k, v in (variants or {}).items() if k in offered})


def _merge(rows: dict[str, Row], added: Mapping[str, Row]) -> None:
    """Later rows override earlier ones field by field."""
    for pattern, row in added.items():
        fields = {**(rows[pattern].model_dump() if pattern in rows else {}), **row.model_dump(exclude_unset=True)}
        rows[pattern] = Row(**fields)
