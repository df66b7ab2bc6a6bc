"""Attention over a cache of latent rows: sparse (top-k per token) and dense."""

import math

import numpy as np
from numpy.typing import NDArray

from emulator.cost.device import Device
from emulator.cost.kernel import Kernel
from emulator.cost.matmul import cube_peak
from emulator.cost.visible import visible_keys, waves
from emulator.cost.work import Term, Work, item_bytes, launch, lengths, size

BLOCK = 128  # keys that a causal row is rounded up to: blocks are computed whole
TASK_ROWS = 256  # rows (query token, head) that share one pass over the keys on a core


def sparse_attention(kernel: Kernel, device: Device) -> Work:
    """Absorbed sparse attention (SparseFlashAttention): each query token reads its own top-k latent rows.

    One task per (request, token), dealt in waves to the cube cores. A token that sees v keys uses min(v, topk) of
    them: flops = 2*heads*min(v, topk)*(qk + v_width), gathered bytes = min(v, topk)*qk*item. A wave lasts as long as
    the slower of its cube work and its gather, at one core's share of peak and of HBM.
    Absorbed widths (576/512): DeepSeek-V2, arXiv 2405.04434, section 2.1.2.
    """
    heads, topk = size(kernel, "heads"), size(kernel, "topk")
    qk, width, item = size(kernel, "qk"), size(kernel, "v"), item_bytes(kernel)
    chosen = np.minimum(visible_keys(kernel), topk)
    cores = device.cores.cube
    entries = waves(chosen, cores) * cores  # entries as if every core had been as busy as the busiest of its wave
    flops_each, bytes_each = 2 * heads * (qk + width), qk * item
    total = float(chosen.sum())
    out = len(chosen) * heads * (qk + width) * item
    terms = (
        launch(),
        Term("cube", entries * flops_each / cube_peak(kernel, device), "cube", "wave"),
        Term("gather", entries * bytes_each / device.memory.bandwidth, "memory", "wave"),
    )
    return Work(total * flops_each, total * bytes_each + out, terms)


def dense_attention(kernel: Kernel, device: Device) -> Work:
    """Causal attention over whole requests: flops = 2*heads*(qk + v)*pairs, pairs = sum of visible keys.

    kv_heads absent: all heads share one latent row per key of width qk, which also holds the values (absorbed MLA);
    given: that many key and value heads. bytes: every query, key, value and result once (FlashAttention-2, arXiv
    2307.08691: no score matrix in memory). In time, causal rows count whole blocks of keys, and each task of up to 256
    (token, head) rows reads its request's keys again; long requests are split, so the cores share all of it evenly.
    """
    heads, qk, width, item = size(kernel, "heads"), size(kernel, "qk"), size(kernel, "v"), item_bytes(kernel)
    rows = visible_keys(kernel)
    queries, keys = lengths(kernel, "queries"), lengths(kernel, "keys")
    kv_heads = size(kernel, "kv_heads", 1)
    row_width = qk if kernel.sizes.get("kv_heads") is None else qk + width
    flops = 2 * heads * (qk + width) * float(rows.sum())
    moved = (len(rows) * heads * (qk + width) + sum(keys) * kv_heads * row_width) * item
    limit = np.repeat(keys, queries) if len(rows) else rows
    computed = float(np.minimum(-(-rows // BLOCK) * BLOCK, limit).sum())
    peak, bandwidth = cube_peak(kernel, device), device.memory.bandwidth
    read = float(_passes(rows, queries, heads / kv_heads).sum()) * kv_heads
    terms = (
        launch(),
        Term("cube", computed * 2 * heads * (qk + width) / peak, "cube", "wave"),
        Term("gather", read * row_width * item / bandwidth, "memory", "wave"),
    )
    return Work(flops, moved, terms)


def _passes(rows: NDArray[np.int64], queries: tuple[int, ...], heads: float) -> NDArray[np.float64]:
    """Keys read by each task of one key head, which takes TASK_ROWS rows of (token, head) of a request."""
    tokens = max(int(TASK_ROWS // heads), 1)
    starts: list[int] = []
    at = 0
    for q in queries:
        starts += range(at, at + q, tokens)
        at += q
    if not starts:
        return np.zeros(0)
    read = np.maximum.reduceat(rows, starts).astype(np.float64)
    return np.repeat(read, math.ceil(heads / TASK_ROWS))
