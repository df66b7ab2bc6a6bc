"""Whose rows an op is priced on: the lengths of a rank's own window, and what is split below a full-token boundary.

A trace shows the rows of the graph. Under DSA context parallelism the fused indexer has a full-token boundary, though
its top-k side works on the rank's own queries; its key side and cache update see every token (RFC of DSA context
parallelism in TensorCast, performance model). Those are ops of their own in a trace, and priced on the rows they have.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from emulator.cost.comm import Groups
from emulator.cost.mapping import Lengths, Place, Split
from emulator.layout.placement import Tokens
from emulator.layout.windows import GlobalBatch, local_batch
from emulator.model.batch import Request

Record = Mapping[str, Any]


def applied_splits(records: Sequence[Record], split_attention: bool = False) -> frozenset[Split]:
    """The ops of a step that are priced on local rows at a full-token boundary. DSA context parallelism shows in its
    o_proj, which takes local tokens; without it every rank does the work of all tokens, and nothing is split."""
    local = any(
        r["kind"] == "op" and r["op"] == "linear" and r["module"].endswith("self_attn.o_proj")
        and r["inputs"][0]["layout"].startswith("local-token")
        for r in records
    )  # fmt: skip
    if not local:
        return frozenset()
    return frozenset({"indexer", "attention"} if split_attention else {"indexer"})


def priced_rows(records: Sequence[Record], splits: frozenset[Split]) -> dict[str, dict[str, str]]:
    """For the indexer's top-k side and for attention: layout of the queries at the graph's boundary, and on which rows
    they are priced."""
    found: dict[str, dict[str, str]] = {}
    ops: dict[str, Split] = {
        "dsa_indexer_topk": "indexer", "mla_sparse_attention": "attention", "multihead_latent_attention": "attention"
    }  # fmt: skip
    for record in records:
        which = ops.get(record.get("op", ""))
        if which is not None and which not in found:
            layout = record["inputs"][0]["layout"]
            local = which in splits or layout.startswith("local-token")
            found[which] = {"boundary": layout, "priced": "local tokens" if local else "full tokens"}
    return found


def place_of(step: Record, groups: Groups, rank: int, splits: frozenset[Split], run_dtype: str) -> Place:
    """Lengths of a dp rank's batch and of one of its ranks."""
    requests = tuple(Request(q, context) for q, context in step["requests"] if q)
    real, rows, parts = sum(r.query for r in requests), step["symbols"]["P"], step["symbols"]["tp"]
    batch = GlobalBatch(requests, tuple(range(real)), max(rows, real))
    tokens = Tokens(real, parts, batch.rows, step.get("order", "contiguous"))
    runs = tokens.windows(groups.index("tp", rank))  # of consecutive rows, all equally long
    cut = tokens.parts * len(runs)
    own = [local_batch(batch, parts=cut, index=start // (stop - start)) for start, stop in runs if stop > start]
    kept = [(q, k) for run in own for q, k in zip(run.query_lens, run.kv_lens) if q]
    local = Lengths(tokens.per, tuple(q for q, _ in kept), tuple(k for _, k in kept))
    full = Lengths(batch.rows, batch.query_lens, batch.kv_lens)
    window = tokens.window(groups.index("tp", rank)) if tokens.order == "contiguous" else None
    return Place(full, local, splits, run_dtype, window)
