"""Shapes and dtypes of an Ascend kernel's arguments -> kernels, by its type (MatMulV2, RmsNorm, ...).

For operator benchmarks that list input_shape, and for profilers' tables (kernel_details.csv, op_summary).
"""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from emulator.cost.kernel import Kernel
from emulator.cost.row_params import NoKernel, dtype_of, rows_and_width

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Call:
    """inputs: by position, None where an optional one is absent; outputs: () where they are not known."""

    kind: str
    inputs: tuple[Shape | None, ...]
    dtypes: tuple[str, ...]
    attrs: Mapping[str, Any] = field(default_factory=dict)
    outputs: tuple[Shape | None, ...] = ()

    def shape(self, at: int) -> Shape:
        found = self.given(at)
        if not found:
            raise NoKernel(f"{self.kind}: no shape of input {at}")
        return found

    def given(self, at: int) -> Shape | None:
        return self.inputs[at] if at < len(self.inputs) else None

    def dtype(self, at: int = 0) -> str:
        return self.dtypes[at] if at < len(self.dtypes) and self.dtypes[at] not in ("none", "") else "bfloat16"


def call(kind: str, inputs: Any, dtypes: Any, attrs: Mapping[str, Any], outputs: Any = ()) -> Call:
    def shapes(given: Any) -> tuple[Shape | None, ...]:
        return tuple(None if s is None else tuple(int(n) for n in s) for s in given or ())

    words = tuple("none" if d is None else dtype_of(d) for d in dtypes or ())
    return Call(kind, shapes(inputs), words, attrs, shapes(outputs))


def parse_shapes(text: str) -> list[list[int] | None]:
    """A profiler's shape list: tensors between semicolons, dims between commas, nothing for an absent tensor."""
    found: list[list[int] | None] = []
    for item in text.strip().strip('"').split(";"):
        dims = [d for d in item.split(",") if d.strip()]
        if not all(re.fullmatch(r"\s*\d+\s*", d) for d in dims):
            raise NoKernel(f"not a shape list: {text!r}")
        found.append([int(d) for d in dims] or None)
    return found


def canonical(kind: str) -> str:
    """Type names without case, underscores and version: QuantBatchMatmulV3 and quant_batch_matmul agree."""
    return re.sub(r"v\d+$", "", kind.replace("_", "").lower())


def matmul(c: Call) -> list[Kernel]:
    """[..., m, k] x [k, n] or [n, k] or tiled (NZ): n = elements of the right operand / k. Leading dims are a batch
    where the right operand has them too."""
    left, right = c.shape(0), c.shape(1)
    if len(left) < 2 or len(right) < 2:
        raise NoKernel(f"{c.kind}: {left} x {right} is no matrix product")
    batch = math.prod(left[:-2]) if len(left) == len(right) >= 3 and left[:-2] == right[:-2] else 1
    k = left[-1]
    m = math.prod(left[:-1]) // batch
    n = math.prod(right) // (batch * k) if k else 0
    dtype = c.dtype()
    if dtype != "int8" and c.dtype(1) == "int8":
        dtype = "a16w8"
    sizes: dict[str, Any] = {"m": m, "k": k, "n": n, "batch": batch}
    if len(right) == len(left) + 2:  # NZ: [n / 16, k / 16, 16, 16]
        sizes["blocked"] = True
    if dtype == "int8" and c.attrs.get("output_dtype") == "float16" and not c.given(4):  # 4: per-token scales
        sizes["dequant"] = "cube"
    return [Kernel("matmul", sizes, dtype)]


def expert_rows(c: Call, tokens: int, experts: int) -> tuple[int, ...]:
    """Rows of each expert: the differences of a cumulative group_list; even where only shapes are known."""
    ends = c.attrs.get("group_list")
    if isinstance(ends, list) and len(ends) == experts:
        return tuple(b - a for a, b in zip([0, *ends], ends))
    return tuple(tokens // experts + (e < tokens % experts) for e in range(experts))


def grouped_matmul(c: Call) -> list[Kernel]:
    tokens, k = rows_and_width(c.shape(0))
    weight = c.shape(1)
    if len(weight) < 3:
        raise NoKernel(f"{c.kind}: weight {weight} has no expert dim")
    experts = weight[0]
    n = math.prod(weight[1:]) // k if k else 0
    sizes: dict[str, Any] = {"rows": expert_rows(c, tokens, experts), "k": k, "n": n}
    dtype = c.dtype() if c.dtype(1) == c.dtype() else "a16w8"
    if len(weight) == 5:
        sizes["blocked"] = True
    elif "swiglu" in canonical(c.kind) and dtype == "int8":
        sizes["relayout"] = True  # it takes NZ weights: plain ones are turned first, whatever their width
    return [Kernel("grouped_matmul", sizes, dtype, "swiglu_quant" if "swiglu" in canonical(c.kind) else "")]


def _by_layout(shape: Shape, layout: str) -> tuple[int, int, int]:
    """(requests, tokens, heads) of a 4-dim shape in BSND or BNSD."""
    if len(shape) != 4:
        raise NoKernel(f"expected 4 dims in {layout}, not {shape}")
    b, x, y, _ = shape
    return (b, y, x) if layout == "BNSD" else (b, x, y)


def attention(c: Call) -> list[Kernel]:
    """Absorbed MLA (query, its rope part, latent keys, their rope part), or heads with keys and values of their own."""
    layout = str(c.attrs.get("inputLayout", "BSND"))
    query = c.shape(0)
    latent = len(c.inputs) >= 5 and query[-1] == 512
    batch, tokens, heads = _by_layout(query, layout)
    key = c.shape(2 if latent else 1)
    _, length, kv_heads = _by_layout(key, layout)
    qk = query[-1] + (c.shape(1)[-1] if latent else 0)
    value = c.shape(4 if latent else 2)[-1]
    sizes: dict[str, Any] = {"queries": (tokens,) * batch, "keys": (length,) * batch, "heads": heads, "qk": qk,
                             "v": value, "causal": bool(c.attrs.get("is_causal", False))}  # fmt: skip
    if not latent:
        sizes["kv_heads"] = kv_heads
    return [Kernel("dense_attention", sizes, c.dtype(), "" if latent else "attention")]


def sparse_attention(c: Call) -> list[Kernel]:
    """Query [B, S, N, D] over a cache, ids [B, S, 1, k]; or packed tokens [T, N, D], which all see k keys or more."""
    query = c.shape(0)
    ids = [s for s, d in zip(c.inputs, c.dtypes) if d == "int32" and s and len(s) == len(query)]
    if not ids:
        raise NoKernel(f"{c.kind}: no int32 input with the chosen ids")
    topk = ids[0][-1]
    if len(query) == 4:
        batch, tokens, heads = _by_layout(query, str(c.attrs.get("inputLayout", "BSND")))
        lengths, keys = (tokens,) * batch, (c.shape(1)[1],) * batch
        causal = bool(c.attrs.get("is_causal", True))
    else:
        tokens, heads = query[0], query[1]
        lengths, keys, causal = (tokens,), (topk,), False
    qk = query[-1] + (64 if query[-1] == 512 and len(query) == 3 else 0)  # packed: the rope part is its own input
    sizes = {"queries": lengths, "keys": keys, "causal": causal, "heads": heads, "topk": topk, "qk": qk, "v": 512}
    return [Kernel("sparse_attention", sizes, c.dtype())]


def mla_prolog(c: Call) -> list[Kernel]:
    """x [B, S, H], W_DQ [H, q], W_UQ [q, N*d], W_UK [N, nope, latent], W_DKV [H, latent + rope]."""
    tokens, hidden = rows_and_width(c.shape(0))
    down, up, absorb, kv = (c.shape(at) for at in (1, 2, 3, 4))
    parts = ((tokens, hidden, down[-1], 1), (tokens, down[-1], up[-1], 1), (tokens, absorb[1], absorb[2], absorb[0]),
             (tokens, hidden, kv[-1], 1))  # fmt: skip
    return [Kernel("fused_matmuls", {"parts": parts}, c.dtype())]


def vector(family: str, name: str = "") -> Callable[[Call], list[Kernel]]:
    def parse(c: Call) -> list[Kernel]:
        rows, width = rows_and_width(c.shape(0))
        return [Kernel(family, {"rows": rows, "width": width}, c.dtype(), name)]

    return parse


def swiglu(c: Call) -> list[Kernel]:
    """The halves lie along `dim`; one that is not the last leaves rows that are halved instead."""
    shape = c.shape(0)
    dim = int(c.attrs.get("dim", -1)) % len(shape)
    width = math.prod(shape[dim:])
    kernels = [Kernel("swiglu", {"rows": math.prod(shape[:dim]), "width": width}, c.dtype())]
    if dim < len(shape) - 1 and shape[-1] * 2 % 32:  # halves off the 32-byte grid are cut out by a kernel of their own
        kernels.insert(0, Kernel("copy", {"rows": math.prod(shape[:-1]), "width": shape[-1]}, c.dtype()))
    return kernels


def unpermute(c: Call) -> list[Kernel]:
    """Expert rows [rows, h] (or padded [E, C, h]), source rows [n*k], skips, bias [E, h], weights.

    Reads each expert row used, the skips, and the bias once (it stays on the chip); writes n rows.
    """
    width = c.shape(0)[-1]
    used = math.prod(c.shape(1))
    skips = [s for s in (c.given(2), c.given(3)) if s]
    tokens = skips[0][0] if skips else used
    bias = rows_and_width(c.shape(4))[0] if c.given(4) else 0
    item = {"float32": 4}.get(c.dtype(), 2)
    moved = (used + bias + tokens * (1 + len(skips))) * width * item
    return [Kernel("unpermute", {"rows": used, "width": width, "moved": moved}, c.dtype())]


def init_routing(c: Call) -> list[Kernel]:
    tokens, width = rows_and_width(c.shape(0))
    chosen = c.shape(1)[-1]
    return [Kernel("routing", {"rows": tokens * chosen, "width": width}, c.dtype(), "init")]


def ranged_routing(c: Call) -> list[Kernel]:
    """A routing that writes only the rows of a range of experts: as many as its output has."""
    if not c.outputs or not c.outputs[0]:
        raise NoKernel(f"{c.kind}: the row states neither its output nor the range of experts, so not what is written")
    rows, width = rows_and_width(c.outputs[0])
    return [Kernel("routing", {"rows": rows, "width": width}, c.dtype(), "init")]


def re_routing(c: Call) -> list[Kernel]:
    rows, width = rows_and_width(c.shape(0))
    return [Kernel("routing", {"rows": rows, "width": width}, c.dtype(), "regroup")]


def kv_norm_rope_cache(c: Call) -> list[Kernel]:
    """Rows of [.., width] are normed and rotated, and written to a key and a value cache, which may be int8.

    By head, int8 caches and rotations that several rows share take paths of their own.
    """
    rows, width = rows_and_width(c.shape(0))
    if len(c.inputs) < 12:  # the latent form
        return [Kernel("kv_norm_rope_cache", {"rows": rows, "width": width}, c.dtype())]
    tables = math.prod(c.shape(2)) + math.prod(c.shape(3))
    values = math.prod(c.given(11) or (0,))
    item = {"int8": 1}
    written = rows * width * item.get(c.dtype(5), 2) + values * item.get(c.dtype(6), 2)
    moved = (rows * width + tables + values) * 2 + written
    sizes = {"rows": rows, "width": width, "moved": moved}
    path = "_int8" if "int8" in (c.dtype(5), c.dtype(6)) else ""
    if math.prod(c.shape(2)[:-1]) < rows:
        path += "_shared"
    return [Kernel("kv_norm_rope_cache", sizes, c.dtype(), f"per_head{path}")]


def without(what: str) -> Callable[[Call], list[Kernel]]:
    def parse(c: Call) -> list[Kernel]:
        raise NoKernel(f"{c.kind}: its shapes do not say {what}")

    return parse


LENGTHS = without("how many keys each query sees")
RANKS = without("how many ranks exchange, nor how much")

SHAPED: dict[str, Callable[[Call], list[Kernel]]] = {
    **dict.fromkeys(("matmul", "matmulbench", "batchmatmul", "transposebatchmatmul", "quantbatchmatmul", "quantmatmul",
                     "weightquantbatchmatmul", "gemm"), matmul),
    **dict.fromkeys(("groupedmatmul", "groupedmatmulswigluquant"), grouped_matmul),
    **dict.fromkeys(("mla", "fabench", "fusedinferattentionscore"), attention),
    **dict.fromkeys(("sparseflashattention", "sfa"), sparse_attention),
    "mlaprolog": mla_prolog, "swiglu": swiglu, "dequantswigluquant": vector("swiglu_quant"),
    "rmsnorm": vector("rms_norm"), "addrmsnorm": vector("add_rms_norm"),
    "addrmsnormbias": vector("add_rms_norm"), "layernorm": vector("layer_norm"),
    "addrmsnormdynamicquant": vector("add_rms_norm_quant"),
    "dynamicquant": vector("dynamic_quant"), "ascendquant": vector("static_quant"),
    "interleaverope": vector("rope"), "rope": vector("rope"),
    "rotarypositionembedding": vector("rope"), "kvrmsnormropecache": kv_norm_rope_cache,
    "moegatingtopk": vector("gating_topk"),
    "moegatingtopksoftmax": vector("gating_topk", "softmax"),
    "moeinitrouting": init_routing, "aiinframoeinitrouting": ranged_routing, "moererouting": re_routing,
    **dict.fromkeys(("moefinalizerouting", "moetokenunpermute"), unpermute),
    **dict.fromkeys(("lightningindexer", "ringmla", "ringmlaprefillbf16kernel"), LENGTHS),
    **dict.fromkeys(("moedistributedispatch", "moedistributecombine", "dispatchffncombine"), RANKS),
    "scatterndupdate": vector("scatter"), "gather": vector("gather"),
    "cast": vector("cast"), "transpose": vector("copy"), "slice": vector("copy"),
    "stridedslice": vector("copy"), "pad": vector("copy"), "concat": vector("copy"),
    "add": vector("elementwise"), "mul": vector("elementwise"), "sub": vector("elementwise"),
    "realdiv": vector("elementwise"), "tensormove": vector("copy"),
}  # fmt: skip


def shape_kernels(c: Call) -> list[Kernel]:
    """The kernels of a call; NoKernel for a type that no family covers."""
    kind = canonical(c.kind)
    if kind.startswith("hcom"):
        return RANKS(c)
    if kind not in SHAPED:
        raise NoKernel(f"no op family for {c.kind!r}")
    return SHAPED[kind](c)
