"""Which kernels a trace record runs as: the tables under profiles/kernels, read and applied.

The form of a table is told at the top of profiles/kernels/ascend.toml. Applying it binds the names of its patterns to
the record's shapes, so that a record whose shapes contradict each other, or its attributes, is found.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from emulator import profiles
from emulator.cost.expression import Expression
from emulator.cost.kernel import Kernel
from emulator.errors import UsageError, first_problem
from emulator.model.quantisation import FLOAT, QuantScheme, load_scheme

Split = Literal["indexer", "attention"]


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class KernelEntry(_Table):
    """One kernel of an op: its sizes are expressions. For the other fields see profiles/kernels/ascend.toml."""

    name: str = ""
    family: str
    sizes: dict[str, str]
    dtype: str | None = None
    weight: str = ""
    types: list[str] | None = None


class OpEntry(_Table):
    """One op of a trace and the kernels it runs as."""

    inputs: list[str]
    outputs: list[str]
    checks: list[str] = []
    defaults: dict[str, str] = {}
    tokens: str = ""
    split: Split | None = None
    kernels: list[KernelEntry]


class KernelFile(_Table):
    """A kernel table's TOML file."""

    description: str
    ops: dict[str, OpEntry]


@dataclass(frozen=True)
class Lengths:
    """rows: token rows, padding included; queries, keys: of every request that has rows here."""

    rows: int
    queries: tuple[int, ...]
    keys: tuple[int, ...]


@dataclass(frozen=True)
class Place:
    """What a record's kernels depend on beyond the record. full, local: lengths of the whole batch of the dp rank, and
    of the rank's own window. splits: the ops priced on local rows at a full-token boundary. run_dtype: of the run:
    values in it are priced as 16 bits (a wider one only serves the check of values). window: [start, end) of the rank's
    real tokens."""

    full: Lengths
    local: Lengths
    splits: frozenset[Split] = frozenset()
    run_dtype: str = "bfloat16"
    window: tuple[int, int] | None = None


class Contradiction(ValueError):
    """A record whose shapes contradict each other, its attributes or the table."""


class _Op:
    """An op's entry, compiled."""

    def __init__(self, entry: OpEntry):
        self.entry = entry
        self.inputs, self.outputs = _patterns(entry.inputs), _patterns(entry.outputs)
        self.checks = [Expression(text) for text in entry.checks]
        self.defaults = {name: Expression(text) for name, text in entry.defaults.items()}
        self.kernels = [(k, {name: Expression(text) for name, text in k.sizes.items()}) for k in entry.kernels]
        self.weights = tuple(dict.fromkeys(k.weight for k in entry.kernels if k.types is not None))


class KernelTable:
    """A kernel table, ready to be applied to a run whose weights have the types of a quantisation scheme."""

    def __init__(self, name: str, file: KernelFile, scheme: QuantScheme):
        self.name, self.file, self.scheme = name, file, scheme
        self._ops = {op: _compiled(name, op, entry) for op, entry in file.ops.items()}
        self._types: dict[tuple[str, str], str] = {}
        self._known: dict[Any, tuple[Kernel, ...]] = {}

    def type_of(self, module: str, weight: str = "") -> str:
        """Quantisation type of the weight of (or below) a module."""
        found = self._types.get((module, weight))
        if found is None:
            path = f"{module}.{weight}" if weight else module
            rules = self.scheme.modules
            found = self._types[module, weight] = next(t for p, t in rules.items() if fnmatchcase(path, p))
        return found

    def kernels(self, record: Mapping[str, Any], place: Place) -> tuple[Kernel, ...]:
        """The kernels of a record that is no collective; () for work done at load time.

        Raises Contradiction for shapes that do not fit, UsageError for an op, or a weight's type, that the table lacks.
        """
        op = self._ops.get(record["op"])
        if op is None:
            raise UsageError(f"kernel table {self.name} has no op {record['op']!r}")
        types = {weight: self.type_of(record["module"], weight) for weight in op.weights}
        local = _is_local(record)
        key = (
            record["op"], local, tuple(types.values()), place,
            tuple([tuple(v["shape"]) for v in record["inputs"]]), tuple([tuple(v["shape"]) for v in record["outputs"]]),
            record["inputs"][0]["dtype"] if record["inputs"] else None,
            tuple([(k, tuple(v) if isinstance(v, list) else v) for k, v in record["attrs"].items() if k != "async"]),
        )  # fmt: skip
        try:
            found = self._known.get(key)
        except TypeError:
            raise Contradiction("shapes and attributes must be numbers and lists of numbers") from None
        if found is None:
            found = self._known[key] = _apply(op, record, place, types, local)
        return found


def load_kernels(name: str = "ascend", quant: str = "none") -> KernelTable:
    """A kernel table, and a quantisation scheme, by name or path. Raises UsageError for an unknown or malformed one."""
    path = profiles.find("kernels", name)
    try:
        file = KernelFile.model_validate(profiles.load_toml(path))
    except ValidationError as error:
        raise UsageError(f"kernel table {path}: {first_problem(error)}") from None
    return KernelTable(path.stem, file, load_scheme(quant))


def is_quantised(type_name: str) -> bool:
    return type_name != FLOAT


def priced_dtype(dtype: str, run_dtype: str) -> str:
    """The dtype that a value is priced in: that of the run stands for 16 bits, any other for itself."""
    return "bfloat16" if dtype == run_dtype and dtype in ("float64", "float32") else dtype


def _compiled(table: str, op: str, entry: OpEntry) -> _Op:
    try:
        compiled = _Op(entry)
    except UsageError as error:
        raise UsageError(f"kernel table {table}, op {op}: {error}") from None
    names = {d.lstrip("*") for _, dims in (*compiled.inputs, *compiled.outputs) for d in dims}
    if entry.split and entry.tokens not in names:
        raise UsageError(f"kernel table {table}, op {op}: `tokens` must name a dimension, not {entry.tokens!r}")
    return compiled


def _patterns(texts: list[str]) -> list[tuple[bool, list[str]]]:
    """(may be missing, dimensions) of each tensor."""
    return [(text.startswith("?"), text.lstrip("?").split()) for text in texts]


def _is_local(record: Mapping[str, Any]) -> bool:
    return bool(record["inputs"]) and record["inputs"][0]["layout"].startswith("local-token")


def _apply(op: _Op, record: Mapping[str, Any], place: Place, types: dict[str, str], local: bool) -> tuple[Kernel, ...]:
    bound: dict[str, Any] = {}
    _bind(op.inputs, record["inputs"], "input", bound)
    _bind(op.outputs, record["outputs"], "output", bound)
    values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in record["attrs"].items()}
    values.update({name: _product(dims) for name, dims in bound.items()})
    values["num_inputs"] = len(record["inputs"])
    for name, default in op.defaults.items():
        if name not in values:
            values[name] = default(values)
    for check in op.checks:
        if not check(values):
            told = ", ".join(f"{n} {values[n]}" for n in sorted(check.names))
            raise Contradiction(f"{check.text} does not hold ({told})")
    lengths = place.local if local else place.full
    if op.entry.tokens:
        if values[op.entry.tokens] < sum(lengths.queries):
            raise Contradiction(
                f"{values[op.entry.tokens]} {'local' if local else 'full'} rows for requests of {sum(lengths.queries)}"
            )
        if op.entry.split in place.splits and not local:
            lengths = place.local
            values[op.entry.tokens] = lengths.rows
    values["queries"], values["keys"] = lengths.queries, lengths.keys
    for weight, type_name in types.items():
        if not any(type_name in (k.types or ()) for k in op.entry.kernels if k.weight == weight):
            raise UsageError(f"the kernel table has no kernel for weights of type {type_name}")
    kernels = []
    for entry, sizes in op.kernels:
        if entry.types is not None and types[entry.weight] not in entry.types:
            continue
        dtype = entry.dtype or priced_dtype(record["inputs"][0]["dtype"], place.run_dtype)
        kernels.append(Kernel(entry.family, {k: size(values) for k, size in sizes.items()}, dtype, entry.name))
    return tuple(kernels)


def _bind(patterns: list[tuple[bool, list[str]]], tensors: list[dict[str, Any]], what: str, bound: dict) -> None:
    needed = sum(not optional for optional, _ in patterns)
    if not needed <= len(tensors) <= len(patterns):
        raise Contradiction(f"{len(tensors)} {what} tensors, expected {needed} to {len(patterns)}")
    for i, (tensor, (_, dims)) in enumerate(zip(tensors, patterns)):
        shape, where = tensor["shape"], f"{what} {i} is {tensor['shape']}, expected [{', '.join(dims)}]"
        stars = sum(d.startswith("*") for d in dims)
        extra = len(shape) - len(dims) + stars
        if extra < 0 or (not stars and extra):
            raise Contradiction(where)
        at = 0
        for dim in dims:
            taken = extra if dim.startswith("*") else 1
            value = tuple(shape[at : at + taken])
            at += taken
            if dim.isdigit():
                if value != (int(dim),):
                    raise Contradiction(where)
            elif bound.setdefault(dim.lstrip("*"), value) != value:
                raise Contradiction(f"{where} with {dim} = {' x '.join(map(str, bound[dim.lstrip('*')]))}")


def _product(dims: tuple[int, ...]) -> int:
    result = 1
    for dim in dims:
        result *= dim
    return result
