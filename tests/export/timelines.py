"""A run of two ranks and two steps, made by hand: every time in it is a whole number of microseconds.

Step 0: linear (rank 0: 10, rank 1: 16), all_gather of 5 that rank 0 awaits for 6, sparse attention of 3 + 5. Step 1
begins at 29 and is one linear of 4, on both ranks.
"""

from typing import Any

from emulator.cost.device import load_device
from emulator.cost.kernel import Cost, Kernel, Slice, Timeline
from emulator.export.run import Run

US = 1e-6


def tensor(shape: list[int], layout: str = "full-token", dtype: str = "bfloat16") -> dict[str, Any]:
    return {"shape": shape, "dtype": dtype, "layout": layout}


def record(seq: int, op: str, module: str, inputs: list, outputs: list, **more: Any) -> dict[str, Any]:
    given = {
        "kind": "op", "node": f"{op}_{seq}", "op": op, "module": module, "layer": 0, "phase": "prefill",
        "group": None, "inputs": inputs, "outputs": outputs, "attrs": {}, "window": None, "traffic": "payload",
        "bytes": 0, "start": 0.0, "duration": 0.0, "seq": seq,
    }  # fmt: skip
    return given | more


LINEAR = record(
    1, "linear", "model.layers.0.mlp.gate", [tensor([4, 8], "local-token"), tensor([6, 8], "replicated")],
    [tensor([4, 6], "local-token")], window=[0, 4],
)  # fmt: skip
GATHER = record(
    2, "all_gather", "model.layers.0.self_attn", [tensor([4, 6], "local-token")], [tensor([8, 6])],
    group="tp", bytes=48, attrs={"dim": 0},
)  # fmt: skip
ATTENTION = record(3, "mla_sparse_attention", "model.layers.0.self_attn.attn", [tensor([8, 6])], [tensor([8, 2, 3])])

MATMUL = Kernel("matmul", {"m": 4, "k": 8, "n": 6}, name="MatMulV2")
COLLECTIVE = Kernel("collective", {"op": "all_gather", "ranks": (0, 1), "bytes": 48}, name="hcom_allGather_")
ABSORB = Kernel("matmul", {"m": 8, "k": 2, "n": 3, "batch": 2}, name="BatchMatMulV2")
SPARSE = Kernel("sparse_attention", {"queries": (8,), "keys": (8,), "heads": 2, "topk": 4, "qk": 3, "v": 3})


def cost(
    micros: float, bound: str = "memory", source: str = "analytic", flops: float = 0.0, moved: float = 0.0
) -> Cost:
    return Cost(flops, moved, micros * US, bound, source)  # type: ignore[arg-type]


def _step(rank: int, linear: float, wait: float) -> tuple[Slice, ...]:
    first = cost(linear, "cube", "measured", 384.0, 224.0)
    together = 16.0
    absorb, sparse = cost(3, "cube", flops=192.0), cost(5, source="interpolated", flops=1000.0, moved=64.0)
    return (
        Slice(rank, "compute", 0.0, linear * US, 0.0, LINEAR, 0, ((MATMUL, first),)),
        Slice(rank, "comm", together * US, 5 * US, wait * US, GATHER, 1, ((COLLECTIVE, cost(5, "communication")),)),
        Slice(rank, "compute", 21 * US, 8 * US, 0.0, ATTENTION, 2, ((ABSORB, absorb), (SPARSE, sparse))),
    )


def _later(rank: int) -> tuple[Slice, ...]:
    return (Slice(rank, "compute", 0.0, 4 * US, 0.0, LINEAR, 0, ((MATMUL, cost(4, "cube")),)),)


def timelines() -> tuple[Timeline, ...]:
    return (
        Timeline(0, "hand", 29 * US, (_step(0, 10, 6), _step(1, 16, 0)), (((0, 1), (1, 1)),)),
        Timeline(1, "hand", 4 * US, (_later(0), _later(1))),
    )


def header(rank: int) -> dict[str, Any]:
    return {
        "schema": 1, "rank": rank, "scenario": "by hand", "model": "none", "mode": "real", "dtype": "bfloat16",
        "mesh": {"dp": 1, "tp": 2, "ep": 1},
    }  # fmt: skip


def step(number: int) -> dict[str, Any]:
    return {
        "kind": "step", "step": number, "phase": "prefill", "plan": "dsa_cp", "variants": {}, "requests": [[8, 0]],
        "symbols": {"T": 8, "layers": 1}, "seq": 0,
    }  # fmt: skip


def hand_run() -> Run:
    """The run, replayed on a device whose first link level (SIO) joins both ranks."""
    return Run((header(0), header(1)), (step(0), step(1)), timelines(), load_device("910C_752T"))
