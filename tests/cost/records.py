"""Small traces and costs for the tests of pricing and replay."""

from collections.abc import Sequence
from typing import Any

from emulator.cost.kernel import Cost, Kernel


def tensor(shape: Sequence[int], layout: str = "full-token", dtype: str = "bfloat16") -> dict[str, Any]:
    return {"shape": list(shape), "dtype": dtype, "layout": layout}


def op(
    name: str, inputs: Sequence[dict], outputs: Sequence[dict], *, module: str = "model.layers.0.x", layer: int = 0,
    group: str | None = None, attrs: dict | None = None, traffic: str = "payload", node: str = "", seq: int = 0,
) -> dict[str, Any]:  # fmt: skip
    """An op record; values are local where their layout says so."""
    return {
        "kind": "op", "op": name, "node": node or name, "module": module, "layer": layer, "phase": "prefill",
        "group": group, "inputs": list(inputs), "outputs": list(outputs), "attrs": attrs or {}, "traffic": traffic,
        "bytes": 0, "window": None, "start": 0.0, "duration": 0.0, "seq": seq,
    }  # fmt: skip


def linear(
    rows: int, k: int, n: int, module: str = "model.layers.0.self_attn.q_b_proj", layout: str = "full-token"
) -> dict:
    return op("linear", [tensor([rows, k], layout), tensor([n, k], "replicated")], [tensor([rows, n], layout)],
              module=module)  # fmt: skip


def all_reduce(rows: int, width: int, module: str = "model.layers.0.self_attn.o_proj", **more: Any) -> dict:
    return op("all_reduce", [tensor([rows, width], "partial")], [tensor([rows, width])], module=module, group="tp",
              **more)  # fmt: skip


def trace(
    rank: int, records: Sequence[dict], *, tp: int = 2, requests: Sequence[Sequence[int]] = ((4, 0),)
) -> tuple[dict, list[dict]]:
    """One rank's trace of one step; records get their sequence numbers."""
    tokens = sum(q for q, _ in requests)
    padded = -(-tokens // tp) * tp
    step = {
        "kind": "step", "step": 0, "phase": "prefill", "plan": "hand-made", "variants": {}, "seq": 0,
        "symbols": {"P": padded, "n": padded // tp, "T": tokens, "tp": tp}, "requests": [list(r) for r in requests],
    }  # fmt: skip
    numbered = [{**r, "seq": i} for i, r in enumerate(records, 1)]
    header = {"rank": rank, "mesh": {"dp": 1, "tp": tp, "ep": 1}, "dtype": "bfloat16", "scenario": "hand-made"}
    return {**header, "model": "none", "mode": "shape"}, [step, *numbered]


def counted(kernel: Kernel, device: object) -> Cost:
    """A stand-in for pricing: rows and bytes as seconds. matmul m; collective bytes; vector families rows."""
    sizes = kernel.sizes
    if kernel.family == "collective":
        return Cost(0.0, sizes["bytes"], float(sizes["bytes"]), "communication")
    seconds = float(sizes.get("m", sizes.get("rows", 0)) if "queries" not in sizes else sum(sizes["queries"]))
    return Cost(2.0 * seconds, 1.0, seconds, "memory")
