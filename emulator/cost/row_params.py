"""Measured rows whose parameters are named sizes (M, K, N; B, S1, S2; ep, topk; shape) -> kernels."""

import math
import re
from collections.abc import Callable, Mapping
from typing import Any

from emulator.cost.kernel import Kernel
from emulator.errors import UsageError

Params = Mapping[str, Any]

DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "int8": "int8", "half": "float16",
          "dt_bf16": "bfloat16", "float": "float32", "fp16/bf16": "float16", "bf16/fp16": "bfloat16"}  # fmt: skip


class NoKernel(UsageError):
    """A row that says too little, or nothing that could be priced: the reason."""


def dtype_of(word: Any) -> str:
    """torch's word for a dtype as rows and profilers write it."""
    text = str(word).strip().lower().split(" ")[0]
    return DTYPES.get(text, text)


def number(params: Params, *names: str) -> int:
    """The first of these sizes that the row states; NoKernel when none is a number. "4096+" reads as 4096."""
    for name in names:
        value = params.get(name)
        if isinstance(value, int | float) and not isinstance(value, bool):
            if not math.isfinite(value) or value < 1 or value != int(value):
                raise NoKernel(f"{name} is {value}, which is no size")
            return int(value)
        if isinstance(value, str) and (found := re.match(r"\d+", value)):
            return int(found[0])
    raise NoKernel(f"the row does not state {' or '.join(names)}")


def rows_and_width(shape: Any) -> tuple[int, int]:
    """All dims but the last are rows."""
    if not isinstance(shape, list | tuple) or not shape or not all(isinstance(n, int) for n in shape):
        raise NoKernel(f"no shape: {shape!r}")
    return math.prod(shape[:-1]), shape[-1]


def vector(family: str, name: str = "") -> Callable[[Params], list[Kernel]]:
    def parse(params: Params) -> list[Kernel]:
        rows, width = rows_and_width(params.get("shape"))
        return [Kernel(family, {"rows": rows, "width": width}, dtype_of(params.get("dtype", "bf16")), name)]

    return parse


def rope(params: Params) -> list[Kernel]:
    """[tokens, heads, width]: a row is a token."""
    shape = params.get("shape")
    rows_and_width(shape)
    rows, width = shape[0], math.prod(shape[1:])  # type: ignore[index]
    return [Kernel("rope", {"rows": rows, "width": width}, dtype_of(params.get("dtype", "bf16")))]


def matmul(params: Params) -> list[Kernel]:
    sizes: dict[str, Any] = {"m": number(params, "M"), "k": number(params, "K"), "n": number(params, "N")}
    if "groups" in params:
        rows = (sizes.pop("m"),) * number(params, "groups")
        return [Kernel("grouped_matmul", {"rows": rows, **sizes}, dtype_of(params.get("dtype")))]
    if "batch" in params:
        sizes["batch"] = number(params, "batch")
    if params.get("out") == "fp16":
        sizes["dequant"] = "cube"
    if params.get("weight") == "NZ":
        sizes["blocked"] = True
    return [Kernel("matmul", sizes, dtype_of(params.get("dtype")))]


def sustained(params: Params) -> list[Kernel]:
    """A sustained rate without a shape: that of a large square product."""
    if "M" in params:
        return matmul(params)
    return [Kernel("matmul", {"m": 16384, "k": 16384, "n": 16384}, dtype_of(params.get("dtype")))]


def collective(op: str, size: str) -> Callable[[Params], list[Kernel]]:
    def parse(params: Params) -> list[Kernel]:
        given = number(params, size, "bytes", "bytes_in_per_rank", "bytes_out_per_rank")
        ranks = tuple(range(number(params, "ranks")))
        return [Kernel("collective", {"op": op, "ranks": ranks, "bytes": given}, dtype_of(params.get("dtype", "bf16")))]

    return parse


def exchange(family: str) -> Callable[[Params], list[Kernel]]:
    def parse(params: Params) -> list[Kernel]:
        ranks = number(params, "ep")
        sizes: dict[str, Any] = {
            "tokens": number(params, "tokens_per_rank", "tokens_per_rank_derived"),
            "hidden": number(params, "hidden"), "topk": number(params, "topk"),
            "ranks": ranks, "experts": params.get("experts", 256),
        }  # fmt: skip
        if "bytes_per_token" in params:
            sizes["row_bytes"] = number(params, "bytes_per_token")
        mode = "normal" if params.get("mode") == "normal" else ""
        return [Kernel(family, sizes, dtype_of(params.get("dtype", "bf16")), mode)]

    return parse


def requests(params: Params) -> dict[str, Any]:
    """queries and keys of B equal requests; causal as stated, and for several queries over a longer cache."""
    queries = number(params, "Sq", "S1")
    keys = number(params, "kv_len", "S2", "Skv_approx", "Sq", "S1")
    batch = params.get("B") or 1
    return {"queries": (queries,) * batch, "keys": (keys,) * batch, "causal": bool(params.get("causal", True))}


def sparse_attention(params: Params) -> list[Kernel]:
    """heads: 64 where a DeepSeek-V4 row leaves them out (its config.json)."""
    sizes = requests(params) | {
        "heads": params.get("Nq", 64), "topk": number(params, "topk", "max_selected"),
        "qk": number(params, "Dk", "D"), "v": number(params, "Dv", "D"),
    }  # fmt: skip
    impl = next((w for w in ("TileLang", "PyPTO") if w in str(params.get("impl", ""))), "")
    name = impl if "topk" in params else f"V4{impl}"  # V4: a window and compressed entries beside the chosen ones
    return [Kernel("sparse_attention", sizes, dtype_of(params.get("dtype", "bf16")), name)]


def mla_decode(params: Params) -> list[Kernel]:
    latent, rope = number(params, "Dlat"), number(params, "Drope")
    sizes = requests(params) | {"heads": number(params, "Nq"), "qk": latent + rope, "v": latent}
    return [Kernel("dense_attention", sizes, dtype_of(params.get("dtype", "bf16")))]


def gqa_prefill(params: Params) -> list[Kernel]:
    """T tokens in sequences of avg_seq, the last one shorter."""
    total, each, dim = number(params, "T"), number(params, "avg_seq"), number(params, "D")
    lengths = (each,) * (total // each) + ((total % each,) if total % each else ())
    sizes = {"queries": lengths, "keys": lengths, "causal": params.get("causal", True), "heads": number(params, "Nq"),
             "kv_heads": number(params, "Nkv"), "qk": dim, "v": dim}  # fmt: skip
    return [Kernel("dense_attention", sizes, dtype_of(params.get("dtype", "bf16")), "attention")]


def indexer(composite: bool = False) -> Callable[[Params], list[Kernel]]:
    """heads and width of GLM-5 (32 x 128) where the row names that model; topk 2048 where it states none."""

    def parse(params: Params) -> list[Kernel]:
        glm = "GLM-5" in str(params.get("model", ""))
        impl = str(params.get("impl", ""))
        sizes = requests(params) | {
            "heads": 32 if glm else number(params, "N"), "dim": 128 if glm else number(params, "D"),
            "topk": params.get("topk") or 2048,
        }  # fmt: skip
        name = "composite" if composite else next((w for w in ("TileLang", "PyPTO") if w in impl), "")
        return [Kernel("indexer", sizes, dtype_of(params.get("dtype", "bf16")), name)]

    return parse


def topk(params: Params) -> list[Kernel]:
    sizes = {"rows": number(params, "rows"), "width": number(params, "cols"), "k": number(params, "k")}
    return [Kernel("topk", sizes, "float32")]


def stream(params: Params) -> list[Kernel]:
    return [Kernel("copy", {"rows": 1 << 20, "width": 1, "moved": number(params, "bytes")}, "int8", "stream")]


def send(params: Params) -> list[Kernel]:
    """A copy between two dies of a node, or of two nodes; the host's links are in no profile."""
    way = str(params.get("dir", ""))
    if "CPU" in way or way in ("RH2D", "D2RH", "H2D", "D2H", "RD2H", "H2RD"):
        raise NoKernel(f"{way}: a copy with the host, whose link no device profile states")
    far = params.get("scope") == "inter-node" or "R" in way
    ranks = (0, 16) if far else (0, 2)
    given = number(params, "bytes", "lat_payload_bytes")
    return [
        Kernel(
            "collective",
            {"op": "send", "ranks": ranks, "bytes": given},
            "int8",
            "write" if way in ("D2RD", "NPU-NPU write") else "read",
        )
    ]


def not_stated(why: str) -> Callable[[Params], list[Kernel]]:
    def parse(params: Params) -> list[Kernel]:
        raise NoKernel(why)

    return parse


WHOLE = not_stated("several kernels together, whose sizes the row does not state")
WIDTHS = not_stated("the row states tokens but no widths of the weights")

NAMED: dict[str, Callable[[Params], list[Kernel]]] = {
    "matmul": matmul, "matmul_bench": matmul, "batch_matmul": matmul, "quant_matmul": matmul, "linear": matmul,
    "weight_quant_batch_matmul": matmul, "grouped_matmul": matmul, "gemm_util": sustained,
    "add": vector("elementwise"), "mul": vector("elementwise"),
    "rms_norm": vector("rms_norm"), "add_rms_norm": vector("add_rms_norm"),
    "add_rms_norm_bias": vector("add_rms_norm"), "layer_norm": vector("layer_norm"),
    "add_rms_norm_dynamic_quant": vector("add_rms_norm_quant"),
    "dynamic_quant": vector("dynamic_quant"), "ascend_quant": vector("static_quant"),
    "static_quant": vector("static_quant"), "interleave_rope": rope,
    "rope": rope, "kv_rms_norm_rope_cache": vector("kv_norm_rope_cache"),
    "swiglu": vector("swiglu"), "swi_glu": vector("swiglu"),
    "moe_gating_top_k": vector("gating_topk"), "slice": vector("copy", "by input"),
    "split_qkv_rmsnorm_rope": vector("rms_norm", "SplitQkvRmsnormRope"), "cast": vector("cast"),
    "gather": vector("gather"), "transpose": vector("copy"), "copy": vector("copy"),
    "all_gather": collective("all_gather", "bytes_in_per_rank"),
    "reduce_scatter": collective("reduce_scatter", "bytes_out_per_rank"),
    "all_reduce": collective("all_reduce", "bytes"), "broadcast": collective("broadcast", "bytes"),
    "all_to_all": collective("all_to_all", "bytes"), "alltoall": collective("all_to_all", "bytes"),
    "moe_dispatch": exchange("moe_dispatch"),
    "moe_combine": exchange("moe_combine"),
    "sfa": sparse_attention, "sas_v4": sparse_attention, "sparse_flash_attention": sparse_attention,
    "compressed_flash_attention": sparse_attention, "sparse_compressed_flash_attention": sparse_attention,
    "sliding_window_attention": sparse_attention, "mla_decode": mla_decode, "gqa_prefill": gqa_prefill,
    "lightning_indexer": indexer(), "lightning_indexer_composite": indexer(composite=True),
    "topk": topk, "hbm_stream": stream, "p2p_bulk": send, "ub_p2p": send,
    "mla_prefill_ring": not_stated("a mean over chunks whose context lengths the row does not state"),
    "mla_util": not_stated("a rate without shapes"), "layer_decode": WHOLE, "dsa_attention_block": WHOLE,
    "compressor_c128a": WIDTHS, "compressor_c4a": WIDTHS, "compressor_c4li": WIDTHS, "hc_pre": WIDTHS,
    "indexer_prolog": WIDTHS, "lightning_indexer_prolog": WIDTHS, "v4_mla_prolog": WIDTHS,
}  # fmt: skip
