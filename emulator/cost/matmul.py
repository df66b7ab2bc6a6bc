"""Matrix products on the cube cores: plain, batched, quantised, grouped by expert, and fused chains.

Form: launch + fill + overlap(cube, memory, reload) + tail + turn + misaligned + dequant. Cube and memory overlap in
part: their 1.5-norm generalises better over the public measured rows than their sum or their maximum. fill: starting
the cores that have a tile. reload: every tile loads its own rows of the left and columns of the right operand, wave
after wave, mostly from L2. tail: the last wave of tiles leaves cores idle. turn: operands whose rows are off the
256-byte grid are first laid out in blocks by the vector cores, through memory (the unaligned template of CANN's matmul
tiling). misaligned: rows off the 32-byte grid are read piecemeal. dequant: int32 sums that the vector cores scale
(per-token scales, bfloat16 results) pass through memory.
"""

import math
from collections.abc import Iterable

from emulator.cost.device import Device
from emulator.cost.kernel import Kernel
from emulator.cost.work import ALIGNMENT, MICROSECOND, Term, Unpriceable, Work, launch, lengths, size

TURNED = 256  # bytes: operands with rows off this grid are laid out anew
FRACTAL = 16  # rows of a block of the cube: fewer left rows stream the right operand once, in any layout
LOADED = 128  # bytes that a core loads from L2 per cycle, at best
ACCUMULATOR = 4  # bytes: int32 sums go to the vector cores and back through memory
TILE = (128, 256)  # rows and columns of a result tile on one core (the base block that CANN's matmul tiling prefers)

# bytes of one element: (left operand, right operand, result)
OPERANDS = {
    "bfloat16": (2, 2, 2),
    "float16": (2, 2, 2),
    "float32": (4, 4, 4),
    "int8": (1, 1, 2),  # W8A8: 16-bit result
    "float8_e4m3fn": (1, 1, 2),
    "a16w8": (2, 1, 2),  # weights widened on the way to the cube
}


def cube_peak(kernel: Kernel, device: Device) -> float:
    """Operations per second for a kernel's dtype; 8-bit weights with 16-bit inputs run at the 16-bit peak."""
    dtype = "bfloat16" if kernel.dtype == "a16w8" else kernel.dtype
    if dtype not in device.cube.rates:
        raise Unpriceable(kernel, f"{device.name} states no cube peak for it; it has {', '.join(device.cube.rates)}")
    return device.cube.rates[dtype]


def products(kernel: Kernel, device: Device, parts: Iterable[tuple[float, float, float, float]]) -> Work:
    """The work of products (m, k, n, batch), each operand read and each result written once.

    flops = 2*m*k*n*batch; bytes = (m*k*left + k*n*right + m*n*result)*batch. Optional: blocked, right operands are
    stored in blocks already (FRACTAL_NZ) and not turned; relayout, they always are.
    """
    if kernel.dtype not in OPERANDS:
        raise Unpriceable(kernel, f"no matrix product of this dtype; known are {', '.join(OPERANDS)}")
    left, right, result = OPERANDS[kernel.dtype]
    peak, bandwidth, cores = cube_peak(kernel, device), device.memory.bandwidth, device.cores.cube
    flops = moved = tiles = tiled = loaded = turned = misaligned = dequantised = 0.0
    for m, k, n, batch in parts:
        part_flops = 2 * m * k * n * batch
        part_bytes = (m * k * left + k * n * right + m * n * result) * batch
        part_tiles = math.ceil(m / TILE[0]) * math.ceil(n / TILE[1]) * batch
        flops += part_flops
        moved += part_bytes
        tiles += part_tiles
        if left == 1 and kernel.sizes.get("dequant", "vector") == "vector":
            dequantised += m * n * batch
        tiled += 2 * TILE[0] * TILE[1] * k * part_tiles
        loaded += (min(m, TILE[0]) + min(n, TILE[1])) * k * max(left, right) * part_tiles
        if m > 1 and k * left % TURNED:
            turned += m * k * left * batch
        off = m > FRACTAL and n * right % TURNED and not kernel.sizes.get("blocked")
        if off or kernel.sizes.get("relayout"):
            turned += k * n * right * batch
        if (m > 1 and k * left % ALIGNMENT) or n * right % ALIGNMENT:
            misaligned += part_flops / peak + part_bytes / bandwidth
    idle = math.ceil(tiles / cores) * cores / tiles - 1 if tiles else 0.0  # share of the last wave without a tile
    terms = (
        launch(),
        Term("fill", min(tiles, cores) / cores * MICROSECOND, "launch"),
        Term("cube", flops / peak, "cube", "overlap"),
        Term("memory", moved / bandwidth, "memory", "overlap"),
        Term("reload", loaded * (1 + idle) / (cores * device.cores.clock * LOADED), "memory", "overlap"),
        Term("tail", tiled * idle / peak, "cube"),
        Term("turn", 2 * turned / bandwidth, "memory"),
        Term("misaligned", misaligned, "memory"),
        Term("dequant", dequantised * ACCUMULATOR * 2 / bandwidth, "memory"),
    )
    return Work(flops, moved, terms)


def matmul(kernel: Kernel, device: Device) -> Work:
    """[m, k] x [k, n], `batch` times; W8A8 and A16W8 by dtype. Roofline terms: Williams et al., CACM 52(4), 2009."""
    part = (size(kernel, "m"), size(kernel, "k"), size(kernel, "n"), size(kernel, "batch", 1))
    return products(kernel, device, [part])


def fused_matmuls(kernel: Kernel, device: Device) -> Work:
    """A chain of products in one kernel, such as MlaProlog: sizes parts = ((m, k, n, batch), ...)."""
    parts = kernel.sizes.get("parts")
    if not parts or not all(len(part) == 4 for part in parts):
        raise Unpriceable(kernel, f"size 'parts' must be a list of (m, k, n, batch), not {parts!r}")
    return products(kernel, device, parts)


def grouped_matmul(kernel: Kernel, device: Device) -> Work:
    """rows[e] x k of each local expert e by its own [k, n]; an idle expert's weight is not read.

    The real rows of each expert count, so a skewed router costs what it costs (MegaBlocks, arXiv 2211.15841).
    """
    k, n = size(kernel, "k"), size(kernel, "n")
    return products(kernel, device, [(rows, k, n, 1) for rows in lengths(kernel, "rows") if rows])
