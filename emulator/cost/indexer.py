"""The lightning indexer: scores of all visible keys on the cube, the choice of the top-k on the vector cores."""

import math

import numpy as np
from numpy.typing import NDArray

from emulator.cost.device import Device
from emulator.cost.kernel import Kernel
from emulator.cost.matmul import cube_peak
from emulator.cost.visible import visible_keys, waves
from emulator.cost.work import Term, Work, item_bytes, launch, lengths, size

TASK_ROWS = 4  # query rows of one request that a cube core and its vector cores take on at a time


def topk_cycles(keys: NDArray[np.float64], topk: float) -> NDArray[np.float64]:
    """Vector cycles to pick the top-k of rows of this many scores.

    (1.36*keys + 3.32*k + ceil(max(log2 k - 5, 0)/2 * keys)) / 2: the operator guide of cann-recipes-infer for A3. A row
    of k scores or fewer keeps them all: nothing to pick.
    """
    merges = max(math.log2(topk) - 5, 0) / 2 if topk else 0.0
    return np.where(keys > topk, (1.36 * keys + 3.32 * topk + np.ceil(merges * keys)) / 2, 0.0)


def indexer(kernel: Kernel, device: Device) -> Work:
    """Scores of [heads, dim] queries against the index keys, weighed over heads, and the top-k of each row.

    flops = 2*heads*dim*pairs (DeepSeek-V3.2 report, section 2.1: ReLU scores, one key row for all heads); bytes:
    queries and keys once, and the chosen ids. In time, each task of up to 4 rows reads its request's keys again, in
    waves over the cube cores, and a task's rows are shared by the core's vector cores, which pick from one task's
    scores while the cube computes the next: the longest of scoring, reading and picking counts.
    """
    heads, dim, topk, item = size(kernel, "heads"), size(kernel, "dim"), size(kernel, "topk"), item_bytes(kernel)
    rows = visible_keys(kernel)
    queries, keys = lengths(kernel, "queries"), lengths(kernel, "keys")
    scores, read, cycles = _tasks(rows, queries, topk)
    cores, bandwidth = device.cores.cube, device.memory.bandwidth
    flops_each = 2 * heads * dim
    vector_share = device.cores.vector / cores
    terms = (
        launch(),
        Term("cube", waves(scores, cores) * cores * flops_each / cube_peak(kernel, device), "cube", "scores"),
        Term("memory", waves(read, cores) * cores * dim * item / bandwidth, "memory", "scores"),
        Term("topk", waves(cycles, cores) / vector_share / device.cores.clock, "vector", "scores"),
    )
    moved = (len(rows) * heads * dim + sum(keys) * dim) * item + len(rows) * topk * 4
    return Work(float(rows.sum()) * flops_each, moved, terms)


def _tasks(rows: NDArray[np.int64], queries: tuple[int, ...], topk: float) -> tuple[NDArray[np.float64], ...]:
    """Per task of up to TASK_ROWS query rows of one request: scores computed, keys read, vector cycles."""
    starts: list[int] = []
    at = 0
    for q in queries:
        starts += range(at, at + q, TASK_ROWS)
        at += q
    if not starts:
        empty = np.zeros(0)
        return empty, empty, empty
    cycles = topk_cycles(rows.astype(np.float64), topk)
    return (
        np.add.reduceat(rows, starts).astype(np.float64),
        np.maximum.reduceat(rows, starts).astype(np.float64),
        np.add.reduceat(cycles, starts),
    )


def topk(kernel: Kernel, device: Device) -> Work:
    """The top-k of each of `rows` rows of `width` scores: the indexer's second half alone."""
    rows, width, k = size(kernel, "rows"), size(kernel, "width"), size(kernel, "k")
    cores = device.cores.vector
    cycles = math.ceil(rows / cores) * float(topk_cycles(np.array(float(width)), k))
    moved = rows * (width * item_bytes(kernel) + k * 8)
    terms = (
        launch(),
        Term("topk", cycles / device.cores.clock, "vector"),
        Term("memory", moved / device.memory.bandwidth, "memory"),
    )
    return Work(0.0, moved, terms)
