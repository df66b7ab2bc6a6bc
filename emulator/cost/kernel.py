"""What one kernel does on one rank and what it costs: the words that op mapping, pricing, replay and exports share.

Families and their sizes (ints unless said; lengths are tuples with one entry per request):

matmul              m, k, n, batch (default 1); dequant (optional, int8: vector, the default, or cube: float16 results
                    without per-token scales are scaled on the way out of the cube)
                    blocked (optional, of all products: True where weights are stored in NZ blocks)
fused_matmuls       parts (tuple of (m, k, n, batch)): products in one kernel, such as MlaProlog
grouped_matmul      rows (tuple: rows of each local expert), k, n; relayout (optional: True where the kernel first turns
                    its weights into blocks)
sparse_attention    queries, keys, heads, topk, qk (absorbed key width), v (absorbed value width)
dense_attention     queries, keys, heads, qk, v (causal); kv_heads (optional: heads of keys and of values that stand
                    apart; without it all heads share one latent row of width qk per key)
indexer             queries, keys, heads, dim, topk: scores of all visible keys and the choice of the top-k
topk                rows, width, k: the choice alone
rms_norm, add_rms_norm, add_rms_norm_quant, layer_norm, rope, kv_norm_rope_cache, dynamic_quant, static_quant, swiglu,
swiglu_quant, gating_topk, routing, unpermute, scatter, gather, cast, elementwise, copy
                    rows, width (swiglu: of its input); moved (optional: bytes moved, where rows and width do not say)
moe_dispatch, moe_combine (fused with their exchange)
                    tokens, hidden, topk, experts, ranks (int: ranks in the exchange); row_bytes (optional: of one row
                    on the wire)
collective          op (str: all_reduce, reduce_scatter, all_gather, all_to_all, broadcast, send), ranks (tuple: global
                    ranks of the group), bytes (what one rank contributes: its shard for all_gather, the shard it ends
                    with for reduce_scatter, its whole tensor for all_reduce, broadcast and send, all it sends to
                    others for all_to_all), received (all_to_all: what it receives from others)

Attention and indexer: causal (optional, default True); False: every query sees all keys of its request.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Bound = Literal["cube", "vector", "memory", "communication", "launch"]
Source = Literal["measured", "interpolated", "analytic"]


@dataclass(frozen=True)
class Kernel:
    """One kernel. dtype: of its inputs, in torch's words (int8: W8A8; a16w8: 16-bit inputs, 8-bit weights). name: its
    Ascend kernel type, such as MatMulV2; "" where none is known."""

    family: str
    sizes: Mapping[str, Any]
    dtype: str = "bfloat16"
    name: str = ""


@dataclass(frozen=True)
class Cost:
    """flops: multiply and add count as two. bytes: moved from and to memory, or sent over links. seconds: on one die,
    without waiting. bound: what the time is spent on. source: how it was found."""

    flops: float
    bytes: float
    seconds: float
    bound: Bound
    source: Source = "analytic"


@dataclass(frozen=True)
class Slice:
    """One trace record on the timeline of a rank. stream: compute or comm. start: when it begins to work or to move
    data, seconds from the start of the step; wait: how long it stood ready before that, for the other ranks of its
    group (part of no slice). kernels: what the record was priced as. index: position in its rank's step."""

    rank: int
    stream: Literal["compute", "comm"]
    start: float
    seconds: float
    wait: float
    record: Mapping[str, Any] = field(repr=False)
    index: int
    kernels: tuple[tuple[Kernel, Cost], ...] = ()

    @property
    def end(self) -> float:
        return self.start + self.seconds


@dataclass(frozen=True)
class Timeline:
    """A replayed step. slices: by rank, in order of their start. seconds: of the step, the end of the last slice.
    meetings: per collective call, its slices as (rank, position in slices[rank]), in rank order."""

    step: int
    device: str
    seconds: float
    slices: tuple[tuple[Slice, ...], ...]
    meetings: tuple[tuple[tuple[int, int], ...], ...] = ()
