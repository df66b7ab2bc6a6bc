"""Which keys each query sees under a causal mask: of e new tokens over L keys, row g sees L - (e - 1 - g)."""

import numpy as np
from numpy.typing import NDArray

from emulator.cost.kernel import Kernel
from emulator.cost.work import Unpriceable, lengths


def visible_keys(kernel: Kernel) -> NDArray[np.int64]:
    """Keys visible to each query row of all requests, in order. Not causal (size causal False): all keys.

    A request with more queries than keys sees, in its first rows, no key: 0. Unpriceable when the lists differ in
    length.
    """
    queries, keys = lengths(kernel, "queries"), lengths(kernel, "keys")
    if len(queries) != len(keys):
        raise Unpriceable(kernel, f"{len(queries)} query lengths but {len(keys)} key lengths")
    rows = []
    for q, total in zip(queries, keys):
        if kernel.sizes.get("causal", True):
            rows.append(np.maximum(np.arange(total - q + 1, total + 1, dtype=np.int64), 0))
        else:
            rows.append(np.full(q, total, dtype=np.int64))
    return np.concatenate(rows) if rows else np.zeros(0, dtype=np.int64)


def waves(work: NDArray[np.float64], cores: int) -> float:
    """Tasks dealt to cores in order, a wave at a time; each wave lasts as long as its largest task."""
    full = -(-len(work) // cores) * cores
    padded = np.zeros(full)
    padded[: len(work)] = work
    return float(padded.reshape(-1, cores).max(axis=1).sum()) if full else 0.0
