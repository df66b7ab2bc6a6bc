"""The tensors of one kernel, as a profiler of the device would list them.

An op may run as several kernels, which see other tensors than the op: their own shapes follow from their sizes.
SparseFlashAttention and LightningIndexer: inputs in the order of CANN's operator documentation, tokens packed.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from emulator.cost.kernel import Kernel, Slice
from emulator.cost.mapping import priced_dtype

Tensors = Sequence[Mapping[str, Any]]


def kernel_tensors(piece: Slice, kernel: Kernel | None, run_dtype: str) -> tuple[Tensors, Tensors]:
    """(inputs, outputs), each {shape, dtype}: of a matmul, whose weight is [k, n], of attention and its indexer, of the
    row-wise kernels of an op that runs as several, and of rope, which turns a part of each row; else those of the op.

    run_dtype: of the emulation, which may be wider than what is priced; dtypes are those that the kernel is priced in.
    """
    inputs, outputs = piece.record["inputs"], piece.record["outputs"]
    if kernel is None:
        return inputs, outputs
    out = priced_dtype(outputs[0]["dtype"], run_dtype)
    s, dtype = kernel.sizes, kernel.dtype
    if kernel.family == "matmul":
        batch = [s["batch"]] if s.get("batch", 1) > 1 else []
        m, k, n = s["m"], s["k"], s["n"]
        return _tensors(dtype, [*batch, m, k], [*batch, k, n]), _tensors(out, [*batch, m, n])
    if kernel.family == "sparse_attention":
        tokens, keys, heads, latent = sum(s["queries"]), sum(s["keys"]), s["heads"], s["v"]
        query, key, rope = [tokens, heads, latent], [keys, 1, latent], s["qk"] - s["v"]
        ids = _tensors("int32", [tokens, 1, s["topk"]])
        ropes = _tensors(dtype, [tokens, heads, rope], [keys, 1, rope])
        return [*_tensors(dtype, query, key, key), *ids, *ropes], _tensors(out, query)
    if kernel.family == "indexer":
        tokens, keys, heads = sum(s["queries"]), sum(s["keys"]), s["heads"]
        scored = _tensors(dtype, [tokens, heads, s["dim"]], [keys, 1, s["dim"]], [tokens, heads])
        return scored, _tensors("int32", [tokens, 1, s["topk"]])
    if (len(piece.kernels) > 1 or kernel.family == "rope") and "rows" in s and "width" in s:
        rows = _tensors(dtype, [s["rows"], s["width"]])
        return rows, rows
    return _priced(inputs, run_dtype), _priced(outputs, run_dtype)


def _tensors(dtype: str, *shapes: list[int]) -> Tensors:
    return [{"shape": shape, "dtype": dtype} for shape in shapes]


def _priced(tensors: Tensors, run_dtype: str) -> Tensors:
    return [{"shape": t["shape"], "dtype": priced_dtype(t["dtype"], run_dtype)} for t in tensors]
