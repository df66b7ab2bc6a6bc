"""Rows of a performance database in TensorCast's CSV layout -> sizes that kernels can be compared by.

A kernel file has one row per measured call: shapes as `4096,6144;6144,16384` (tensors by `;`, an absent one empty),
data types by `;`, and times in microseconds. Sparse attention and the indexer add columns that start with `Runtime `.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

from emulator.cost.kernel import Kernel

Shape = tuple[int, ...]

# The first that a row has: times within a model run, then times of a single kernel in a benchmark.
DURATIONS = ("Profiling Average Duration(us)", "Average Duration(us)", "Duration(us)")


@dataclass(frozen=True)
class Features:
    """numbers: sizes that neighbours may differ in by one. exact: what must be equal for a row to count as measured,
    not as a neighbour."""

    numbers: Mapping[str, float]
    exact: Any = field(default=None)


def of_kernel(kernel: Kernel) -> Features | None:
    """A kernel's features; None for a family that a database has no rows of."""
    sizes, family = kernel.sizes, kernel.family
    if family == "matmul":
        return Features({"batch": sizes.get("batch", 1), **{n: sizes[n] for n in ("m", "k", "n")}})
    if family == "grouped_matmul":
        rows = sizes["rows"]  # a file does not tell how its rows lay over the experts: taken as even
        even = max(rows, default=0) - min(rows, default=0) <= 1
        return Features({"rows": sum(rows), "experts": len(rows), "k": sizes["k"], "n": sizes["n"]}, even)
    if family in ("sparse_attention", "indexer"):
        names = ("heads", "topk", "qk", "v") if family == "sparse_attention" else ("heads", "topk", "dim")
        return _ragged(sizes["queries"], sizes["keys"], {name: sizes[name] for name in names})
    if family == "collective":
        return _of_collective(sizes)
    if "rows" in sizes and "width" in sizes:
        return Features({"rows": sizes["rows"], "width": sizes["width"]})
    return None


def _ragged(queries: Sequence[int], keys: Sequence[int], rest: dict[str, float]) -> Features:
    """Per-request lengths: equal ones are a hit; neighbours compare tokens, requests and mean keys."""
    pairs = sorted((q, k) for q, k in zip(queries, keys) if q)
    numbers = {"tokens": sum(q for q, _ in pairs), "requests": len(pairs), **rest}
    return Features({**numbers, "keys": sum(k for _, k in pairs) / max(len(pairs), 1)}, tuple(pairs))


def _of_collective(sizes: Mapping[str, Any]) -> Features:
    """message: the shard for all_gather and reduce_scatter, the whole tensor for all_reduce and broadcast, and for an
    all_to_all the whole buffer of a rank, what it keeps included."""
    message, ranks = sizes["bytes"], len(sizes["ranks"])
    if sizes["op"] == "all_to_all":
        message = max(message, sizes["received"]) * ranks / max(ranks - 1, 1)
    return Features({"message": message, "ranks": ranks})


def shapes(text: str) -> list[Shape | None]:
    """Shapes of a list of tensors; None for an absent one. ValueError for what is none."""
    found: list[Shape | None] = []
    for part in text.strip().strip('"').split(";"):
        dims = [d for d in part.replace(" ", "").split(",") if d]
        found.append(tuple(int(d) for d in dims) if dims else None)
    return found


def dtype(text: str) -> str:
    """A data type in torch's words, such as bfloat16 for DT_BF16."""
    name = text.split(";")[0].strip().strip('"').upper().removeprefix("DT_")
    known = {"BF16": "bfloat16", "FLOAT": "float32", "FLOAT16": "float16", "INT8": "int8"}
    return known.get(name, name.lower())


def of_row(family: str, row: Mapping[str, str]) -> Features:
    """The features of a kernel file's row. ValueError, IndexError or KeyError for a row that is not of this family."""
    given = shapes(row["Input Shapes"])
    made = shapes(row["Output Shapes"])
    first, out = _present(given, 0), _present(made, 0)
    reader = _READERS.get(family)
    if reader is not None:
        return reader(given, out, row)
    if family == "rope" and len(first) == 4:  # batch, heads, sequence, dim
        return Features({"rows": first[0] * first[2], "width": first[1] * first[3]})
    if family == "rope":
        return Features({"rows": first[0], "width": prod(first[1:])})
    if family == "scatter":  # variable, indices, updates
        first = _present(given, 2)
    elif family in ("gather", "routing"):
        first = out
    return Features({"rows": prod(first[:-1]), "width": first[-1]})


def _present(tensors: list[Shape | None], index: int) -> Shape:
    found = tensors[index]
    if not found:
        raise ValueError(f"tensor {index} is absent")
    return found


def _matmul(given: list[Shape | None], out: Shape, row: Mapping[str, str]) -> Features:
    """[m, k] x weight (plain or fractal) -> [m, n]; [b, m, k] x [b, k, n] -> b*m*n elements in any order."""
    left, right = _present(given, 0), _present(given, 1)
    if len(left) != 3 or len(right) != 3:
        m = prod(out[:-1])
        return Features({"batch": 1, "m": m, "k": prod(left) // m, "n": prod(out) // m})
    batch, k = right[0], left[-1]
    m = prod(left) // (batch * k)
    return Features({"batch": batch, "m": m, "k": k, "n": prod(out) // (batch * m)})


def _grouped(given: list[Shape | None], out: Shape, row: Mapping[str, str]) -> Features:
    left, right = _present(given, 0), _present(given, 1)
    return Features({"rows": left[0], "experts": right[0], "k": left[1], "n": out[-1]}, True)


def _sparse_attention(given: list[Shape | None], out: Shape, row: Mapping[str, str]) -> Features:
    query = _present(given, 0)
    rope = [s for s in given[1:] if s and s[:-1] == query[:-1] and s[-1] < query[-1]]
    queries, keys = _lengths(row, prod(query[:-2]))
    qk = query[-1] + (rope[-1][-1] if rope else 0)
    return _ragged(queries, keys, {"heads": query[-2], "topk": int(row["Runtime topk"]), "qk": qk, "v": out[-1]})


def _indexer(given: list[Shape | None], out: Shape, row: Mapping[str, str]) -> Features:
    query = _present(given, 0)
    queries, keys = _lengths(row, prod(query[:-2]))
    return _ragged(queries, keys, {"heads": query[-2], "topk": int(row["Runtime topk"]), "dim": query[-1]})


def _lengths(row: Mapping[str, str], tokens: int) -> tuple[list[int], list[int]]:
    """Query and key lengths per request; query lengths may be given as a running sum."""
    queries, keys = (
        [int(float(n)) for n in row[f"Runtime {name}"].strip("[]() ").replace(";", ",").split(",") if n.strip()]
        for name in ("actual_seq_lengths_values", "actual_seq_lengths_kv_values")
    )
    if sum(queries) != tokens and queries and queries[-1] == tokens:
        queries = [b - a for a, b in zip([0, *queries], queries)]
    if sum(queries) != tokens or len(queries) != len(keys):
        raise ValueError(f"query lengths {queries} and key lengths {keys} for {tokens} tokens")
    return queries, keys


_READERS: dict[str, Callable[[list[Shape | None], Shape, Mapping[str, str]], Features]] = {
    "matmul": _matmul, "grouped_matmul": _grouped, "sparse_attention": _sparse_attention, "indexer": _indexer,
}  # fmt: skip
