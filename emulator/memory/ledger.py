"""The weight ledger: every tensor a rank holds once its weights are loaded, its bytes and the rule that put it there.

Shapes come from the Program's parameters, placements from the plan, types from a scheme or a quantisation description,
and what is counted from accounting rules. Nothing is allocated: parameters are meta tensors.
"""

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

import torch

from emulator.errors import UsageError
from emulator.layout.placement import Layout
from emulator.layout.plan import Plan, layer_of, module_pattern
from emulator.memory.components import component_of
from emulator.memory.held import Held, Unit, peak_bytes, stored_bytes
from emulator.memory.parameters import Parameters, local_shape, owner_of, parameters_of, weight_layout
from emulator.memory.rules import Accounting, DerivedRow, dtype_for
from emulator.model.config import ModelConfig
from emulator.model.quant_description import Description
from emulator.model.quantisation import FLOAT, Classified, QuantScheme, TensorRow, classify, load_type
from emulator.ops.registry import Shard
from emulator.runtime.mesh import Mesh


@dataclass(frozen=True)
class Ledger:
    """tensors: what stays; loading: what is freed or replaced while the weights are processed. peak_load_bytes: the
    most that exists at one time, from the start of loading to the end of processing."""

    tensors: tuple[Held, ...]
    loading: tuple[Held, ...]
    peak_load_bytes: int

    @property
    def total_bytes(self) -> int:
        return sum(t.bytes for t in self.tensors)

    def by(self, key: str) -> dict[str, int]:
        """Bytes by component, category or layer, in order of the model."""
        sums: dict[str, int] = defaultdict(int)
        for tensor in self.tensors:
            value = getattr(tensor, key)
            sums["-" if value is None else str(value)] += tensor.bytes
        return dict(sums)


@dataclass(frozen=True)
class Settings:
    """What a ledger is made for. names: of scheme and rules, for people. sizes: whole-number fields of config.json.
    mtp_layers: multi-token-prediction layers to hold. nz: whether weights are rounded up to fractal NZ blocks."""

    config: ModelConfig
    plan: Plan
    mesh: Mesh
    scheme: QuantScheme
    rules: Accounting
    names: tuple[str, str]
    dtype: torch.dtype = torch.bfloat16
    rank: int = 0
    mtp_layers: int = 0
    nz: bool = False
    description: Description | None = None
    sizes: Mapping[str, int] = field(default_factory=dict)


def build_ledger(settings: Settings) -> Ledger:
    """The ledger of one rank. Raises UsageError for a plan that does not divide the weights, a type that does not exist
    for a module, or a description that disagrees with the checkpoint."""
    if not 0 <= settings.rank < settings.mesh.size:
        raise UsageError(f"rank {settings.rank}: the mesh has ranks 0 to {settings.mesh.size - 1}")
    return _Builder(settings).run()


def classified(settings: Settings, parameters: Parameters) -> dict[str, Classified]:
    """Type of each module with weights: by the description, else by the scheme and then the rules."""
    modules = list(dict.fromkeys(name.rpartition(".")[0] for name in parameters.weights))
    mtp = {name.rpartition(".")[0] for name in parameters.mtp}
    if settings.description is not None:
        shapes = {name: tuple(p.shape) for name, p in parameters.weights.items()}
        return settings.description.classify(shapes, parameters.mtp, settings.config.num_hidden_layers)
    scheme_name, rules_name = settings.names
    if settings.rules.mtp == "modules":
        mtp = set()
    types = classify(settings.scheme, scheme_name, [m for m in modules if m not in mtp], mtp)
    return settings.rules.settle(types, settings.scheme, settings.plan, rules_name)


class _Builder:
    def __init__(self, settings: Settings):
        self.s = settings
        self.parameters = parameters_of(settings.config, settings.mtp_layers)
        settings.plan.check_modules(self.parameters.modules)
        self.types = classified(settings, self.parameters)
        self.quantised = any(t.type != FLOAT for t in self.types.values())
        self.shared: set[tuple[str, tuple[int, ...], torch.dtype]] = set()  # whole-weight buffers that layers share

    def run(self) -> Ledger:
        caches = list(self._caches())
        units = [Unit(always=tuple(caches))]
        derived: list[Unit] = []
        for name, parameter in self.parameters.weights.items():
            if not self.s.rules.holds(name):
                continue
            unit = self._unit(name, parameter)
            row = next((r for r in self._derived_rows(name)), None)
            if row is not None and self.s.rules.state == "processed":
                made, freed = self._derive(name, parameter, unit)
                derived.append(made)
                unit = freed
            units.append(unit)
        units = [self._counted(unit) for unit in (*units, *derived)]
        if self.s.rules.state == "loaded":
            loaded = tuple(t for u in units for t in u.at_load)
            return Ledger(loaded, (), sum(t.bytes for t in loaded))
        stays = tuple(t for u in units for t in (*u.always, *u.made))
        gone = tuple(t for u in units for t in u.loading)
        return Ledger(stays, gone, peak_bytes(units))

    def _counted(self, unit: Unit) -> Unit:
        """The unit's tensors that the rules count."""
        parts = (unit.always, unit.loading, unit.made)
        return Unit(*(tuple(t for t in part if t.category in self.s.rules.counts) for part in parts))

    def _layout(self, name: str, parameter: torch.Tensor) -> Layout:
        return weight_layout(name, parameter, self.s.plan, self.s.mesh.sizes)

    def _unit(self, name: str, parameter: torch.Tensor) -> Unit:
        """The tensors of one parameter: itself, or what its quantisation type makes of it."""
        module, _, leaf = name.rpartition(".")
        layout, chosen = self._layout(name, parameter), self.types[module]
        local = local_shape(tuple(parameter.shape), layout, self.s.mesh, self.s.rank)
        if chosen.type == FLOAT or leaf != "weight":
            return self._float(name, tuple(parameter.shape), local, layout, chosen)
        rows = load_type(chosen.type).rows(module, parameter.dim(), chosen.type)
        if not self.s.rules.has_own_inputs(module):
            rows = [row for row in rows if row.per_output]
        whole = tuple(parameter.shape)
        beside = whole if owner_of(layout) is not None else local  # only the weight itself is layer-sharded
        symbols = ("out", "in") if parameter.dim() == 2 else ("experts", "out", "in")
        split = {symbols[p.dim]: axis for axis, p in layout.placements if isinstance(p, Shard)}
        parts: dict[str, list[Held]] = {"loading": [], "always": [], "after": []}
        for row in rows:
            is_weight, dtype = row.name == "weight", row.torch_dtype(self.s.dtype)
            shape = row.local_shape(_sizes(local if is_weight else beside), module)
            placement = _placement(row, split) if owner_of(layout) is None or not is_weight else str(layout)
            rule = f"{chosen.rule} -> {chosen.type} {row.name}"
            held = self._held(f"{module}.{row.name}", shape, dtype, row.category, rule, placement, nz=row.nz,
                              replaces=f"{module}.{row.replaces}" if row.replaces else None)  # fmt: skip
            parts[row.held].append(held)
            if is_weight and row.held == ("loading" if self.s.rules.state == "loaded" else "after"):
                parts["always"] += self._window(held, row.local_shape(_sizes(whole), module), layout)
            if row.whole is not None:
                parts["after"] += self._whole(held, row.whole, [str(d).partition("/")[0] for d in row.shape], split)
        return Unit(tuple(parts["always"]), tuple(parts["loading"]), tuple(parts["after"]))

    def _float(
        self, name: str, whole: tuple[int, ...], local: tuple[int, ...], layout: Layout, chosen: Classified
    ) -> Unit:
        dtype = self.s.rules.dtype_of(name, self.s.dtype)
        category = "float_exception" if self.quantised else "checkpoint_weight"
        matrix = len(local) > 1 and name.endswith(".weight")
        held = self._held(name, local, dtype, category, chosen.rule, str(layout), nz=matrix)
        made: list[Held] = []
        if matrix:
            dims = [str(d) for d in range(len(local))]
            split = {str(p.dim): axis for axis, p in layout.placements if isinstance(p, Shard)}
            made = self._whole(held, "gathered", dims, split)
        return Unit((held, *self._window(held, whole, layout)), (), tuple(made))

    def _window(self, held: Held, whole: tuple[int, ...], layout: Layout) -> list[Held]:
        """Buffers that layer-sharded weights are received in, shared by the layers: one per layer that the plan brings
        ahead, and what the rules add."""
        pattern, leaf = module_pattern(held.module), held.name.rpartition(".")[2]
        key = (f"{pattern}.{leaf}", whole, getattr(torch, held.dtype))
        if owner_of(layout) is None or self.s.rules.window_buffers is None or key in self.shared:
            return []
        self.shared.add(key)
        _, ahead = self.s.plan.start_of(held.module) or ("", 0)
        rule = f"plan {self.s.plan.name}: {pattern} is layer-sharded, brought {ahead} layers ahead"
        return [
            self._held(f"{key[0]}.whole{i}", whole, key[2], "full_layout_copy", rule, "replicated")
            for i in range(ahead + self.s.rules.window_buffers)
        ]

    def _whole(self, held: Held, how: str, dims: list[str], split: Mapping[str, str]) -> list[Held]:
        """Buffers of a stored shard that the plan uses whole: gathered ones are shared by the layers, and a shard that
        is not cut along dim 0 is sent from a transposed copy; repeated ones belong to the layer."""
        cut = next((i for i, d in enumerate(dims) if d in split), None)
        if cut is None or not self.s.rules.whole_weights or not self.s.plan.gathers_weight(held.module):
            return []
        axis = split[dims[cut]]
        whole = tuple(d * self.s.mesh.sizes[axis] if i == cut else d for i, d in enumerate(held.shape))
        rule = f"plan {self.s.plan.name}: {module_pattern(held.module)} uses whole weights of stored shards"
        dtype, leaf = getattr(torch, held.dtype), held.name.rpartition(".")[2]
        if how == "repeated":
            return [self._held(f"{held.name}.whole", whole, dtype, "full_layout_copy", rule, "replicated")]
        made = []
        if cut != 0:
            moved = (held.shape[cut], *held.shape[:cut], *held.shape[cut + 1 :])
            made.append(
                self._held(f"{held.name}.to_gather", moved, dtype, "transposed_layout", rule, f"{axis}:shard(0)")
            )
        key = (f"{module_pattern(held.module)}.{leaf}", whole, dtype)
        if key not in self.shared:
            self.shared.add(key)
            name = f"{key[0]}.whole"
            made.append(self._held(name, whole, dtype, "full_layout_copy", f"{rule}, one buffer", "replicated"))
        return made

    def _derived_rows(self, name: str) -> Iterator[DerivedRow]:
        module, _, leaf = name.rpartition(".")
        if leaf == "weight":
            yield from (r for r in self.s.rules.derived if fnmatchcase(module, r.match))

    def _derive(self, name: str, parameter: torch.Tensor, unit: Unit) -> tuple[Unit, Unit]:
        """(unit of the tensors made from a weight, the weight's own unit without what they replace)."""
        module = name.rpartition(".")[0]
        if self.types[module].type != FLOAT:
            raise UsageError(f"{module} is {self.types[module].type} ({self.types[module].rule}), but must be FLOAT")
        layout = self._layout(name, parameter)
        local = local_shape(tuple(parameter.shape), layout, self.s.mesh, self.s.rank)
        sizes = {**self.s.sizes, **_numbers(self.s.config), "heads": local[0] // getattr(parameter, "shard_unit", 1)}
        made = []
        for row in self._derived_rows(name):
            shape = _shape(row.shape, sizes, row.name)
            rule = f"rules {self.s.names[1]}: {row.name} derived from {name}"
            made.append(
                self._held(f"{module}.{row.name}", shape, self.s.dtype, "derived", rule, str(layout), nz=row.nz,
                           replaces=name if row.replaces_weight else None, component=row.name)
            )  # fmt: skip
        if any(row.replaces_weight for row in self._derived_rows(name)):
            return Unit(loading=unit.always, made=tuple(made)), Unit(made=unit.made)
        return Unit(made=tuple(made)), unit

    def _caches(self) -> Iterator[Held]:
        sizes = {**self.s.sizes, **_numbers(self.s.config)}
        for row in self.s.rules.caches:
            shape = _shape(row.shape, sizes, f"{row.component}.{row.name}")
            rule = f"rules {self.s.names[1]}: {row.component}"
            name, dtype = f"{row.component}.{row.name}", dtype_for(row.dtype, self.s.dtype)
            yield self._held(name, shape, dtype, "cache", rule, "replicated", component=row.component)

    def _held(
        self, name: str, shape: tuple[int, ...], dtype: torch.dtype, category: str, rule: str, placement: str, *,
        nz: bool = False, replaces: str | None = None, component: str | None = None,
    ) -> Held:  # fmt: skip
        module = re.sub(r"\.(whole\d*|to_gather)$", "", name).rpartition(".")[0]
        layer = layer_of(module)
        if layer is not None and layer >= self.s.config.num_hidden_layers:
            component = "mtp"
        blocks = nz and self.s.nz and not any(fnmatchcase(module, p) for p in self.s.rules.never_nz)
        return Held(
            name, module, component or component_of(module), layer, shape, str(dtype).removeprefix("torch."),
            stored_bytes(shape, dtype, nz=blocks), placement, category, rule, replaces,
        )  # fmt: skip


def _sizes(shape: tuple[int, ...]) -> dict[str, int]:
    """The words of a quantised weight [out, in] or [experts, out, in]."""
    return {"out": shape[-2], "in": shape[-1], "experts": shape[0]}


def _placement(row: TensorRow, split: Mapping[str, str]) -> str:
    words = [
        f"{split[symbol]}:shard({i})"
        for i, d in enumerate(row.shape)
        if isinstance(d, str) and (symbol := d.partition("/")[0]) in split
    ]
    return ", ".join(words) or "replicated"


def _numbers(config: ModelConfig) -> dict[str, int]:
    return {k: v for k, v in config.model_dump().items() if isinstance(v, int)}


def _shape(words: tuple[int | str, ...], sizes: Mapping[str, int], what: str) -> tuple[int, ...]:
    missing = [w for w in words if isinstance(w, str) and w not in sizes]
    if missing:
        raise UsageError(f"{what}: config.json has no whole number {missing[0]!r}")
    return tuple(w if isinstance(w, int) else sizes[w] for w in words)
