"""Vector ops: norms, rope, quantise, SwiGlu, gating, routing, copies.

Form: launch + fill * (share of the vector cores that have a row) + memory, L2 misses and padding on top. The
second term is what it costs to bring the vector cores in: without it fits of norms and quantisation over the public A3
profiler reports of an msmodeling fork miss by 20 to 43 %. padding: rows off the 32-byte grid of a data copy are
padded in the vector cores' buffers, one copy per row.
"""

from dataclasses import dataclass

from emulator.cost.device import Device
from emulator.cost.kernel import Kernel
from emulator.cost.work import ALIGNMENT, MICROSECOND, Term, Unpriceable, Work, item_bytes, launch, size


@dataclass(frozen=True)
class Traffic:
    """Per element of [rows, width]: items moved in the kernel's dtype, bytes of fixed size, and flops; per row: bytes
    of fixed size."""

    items: float
    fixed: float = 0.0
    flops: float = 0.0
    per_row: float = 0.0


TRAFFIC = {
    "rms_norm": Traffic(2, flops=4),  # read x, write y
    "layer_norm": Traffic(2, flops=7),
    "add_rms_norm": Traffic(4, flops=5),  # read x and residual, write y and residual
    "add_rms_norm_quant": Traffic(3, fixed=1, flops=8, per_row=4),  # as above, y in int8 with a scale per row
    "rope": Traffic(2, flops=3),
    "kv_norm_rope_cache": Traffic(2, flops=7),  # read the row, write it to the caches
    "dynamic_quant": Traffic(1, fixed=1, flops=3, per_row=4),  # int8 and one scale per row
    "static_quant": Traffic(1, fixed=1, flops=2),
    "swiglu": Traffic(1.5, flops=3),  # width: of the input (gate and up); writes half of it
    "swiglu_quant": Traffic(1, fixed=0.5, flops=4, per_row=4),  # writes half of it in int8
    "gating_topk": Traffic(1, flops=8),
    "routing": Traffic(2),  # rows: those written
    "unpermute": Traffic(1, flops=2),  # rows: expert rows read; see `sources`
    "scatter": Traffic(2),
    "gather": Traffic(2),
    "cast": Traffic(1, fixed=4),
    "elementwise": Traffic(3, flops=1),  # two inputs, one result
    "copy": Traffic(2),
}


def vector_op(kernel: Kernel, device: Device) -> Work:
    """An op over [rows, width]; bytes = rows*width*(items*item size + fixed) + rows*per_row, as TRAFFIC says.

    Optional size `moved`: bytes it moves, where they are known better than that.
    """
    traffic = TRAFFIC[kernel.family]
    rows, width = size(kernel, "rows"), size(kernel, "width")
    estimate = rows * width * (traffic.items * item_bytes(kernel) + traffic.fixed) + rows * traffic.per_row
    moved = size(kernel, "moved", estimate)
    flops = rows * width * traffic.flops
    peak = device.vector.rates.get("float32")  # 16-bit inputs are widened
    if peak is None:
        raise Unpriceable(kernel, f"{device.name} states no float32 vector peak")
    if not moved:
        return Work(0.0, 0.0)  # nothing to do: returns at once
    missed = max(moved - device.memory.l2, 0.0)
    cores = device.cores.vector
    off = rows > 1 and width * item_bytes(kernel) % ALIGNMENT
    terms = (
        launch(),
        Term("fill", min(rows, cores) / cores * MICROSECOND, "launch"),
        Term("vector", flops / peak, "vector"),
        Term("row", rows / cores * MICROSECOND, "vector"),
        Term("memory", moved / device.memory.bandwidth, "memory"),
        Term("miss", missed / device.memory.bandwidth, "memory"),
        Term("padding", moved / device.memory.bandwidth if off else 0.0, "memory"),
    )
    return Work(flops, moved, terms)
