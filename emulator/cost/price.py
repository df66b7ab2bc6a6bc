"""Kernel + device -> cost."""

from collections.abc import Callable

from emulator.cost.attention import dense_attention, sparse_attention
from emulator.cost.collective import collective, exchange
from emulator.cost.device import Coefficients, Device
from emulator.cost.indexer import indexer, topk
from emulator.cost.kernel import Cost, Kernel
from emulator.cost.matmul import fused_matmuls, grouped_matmul, matmul
from emulator.cost.vector import TRAFFIC, vector_op
from emulator.cost.work import Unpriceable, Work, seconds

FAMILIES: dict[str, Callable[[Kernel, Device], Work]] = {
    "matmul": matmul,
    "grouped_matmul": grouped_matmul,
    "fused_matmuls": fused_matmuls,
    "sparse_attention": sparse_attention,
    "dense_attention": dense_attention,
    "indexer": indexer,
    "topk": topk,
    "moe_dispatch": exchange,
    "moe_combine": exchange,
    "collective": collective,
    **dict.fromkeys(TRAFFIC, vector_op),
}

BENCHMARK = "@benchmark"
BITS = {"bfloat16": "16bit", "float16": "16bit", "float8_e4m3fn": "int8"}  # run alike

EXCHANGES = ("moe_dispatch", "moe_combine")
LOW_LATENCY_TOKENS = 512  # per rank; engines dispatch larger batches with the normal kernels (vllm-ascend's MC2 limit)


def keys(kernel: Kernel, *, benchmark: bool = False) -> list[str]:
    """Names under which a profile may hold a kernel's coefficients, the most specific first.

    benchmark: those of kernels run alone and repeated, where the profile tells them from kernels inside a model.
    """
    bits = BITS.get(kernel.dtype, kernel.dtype)
    kind = "vector" if kernel.family in TRAFFIC else f"matmul.{bits}"
    found = [f"{kernel.family}.{kernel.name}.{bits}", f"{kernel.family}.{kernel.name}"] if kernel.name else []
    tokens = kernel.sizes.get("tokens", 0)
    if kernel.family in EXCHANGES and isinstance(tokens, int | float) and tokens > LOW_LATENCY_TOKENS:
        found.append(f"{kernel.family}.normal")
    found += [f"{kernel.family}.{bits}", kernel.family]
    if kernel.family in TRAFFIC or kernel.family in ("grouped_matmul", "fused_matmuls"):
        found.append(kind)
    names = list(dict.fromkeys(found))
    return [name + suffix for name in names for suffix in ((BENCHMARK, "") if benchmark else ("",))]


def coefficients(kernel: Kernel, device: Device, *, benchmark: bool = False) -> tuple[str, Coefficients]:
    """The coefficients that hold for a kernel and their name in the profile; Unpriceable when there are none."""
    for key in keys(kernel, benchmark=benchmark):
        if key in device.coefficients:
            return key, device.coefficients[key]
    raise Unpriceable(kernel, f"{device.name} has no coefficients for {kernel.family}")


def work(kernel: Kernel, device: Device) -> Work:
    """The ideal work of a kernel: flops, bytes and terms at the device's peaks."""
    if kernel.family not in FAMILIES:
        raise Unpriceable(kernel, f"unknown family {kernel.family!r}")
    return FAMILIES[kernel.family](kernel, device)


def price(kernel: Kernel, device: Device, *, benchmark: bool = False) -> Cost:
    """What a kernel costs on a device, from the form of its family and the device's coefficients.

    benchmark: run alone and repeated rather than inside a model's step.

    Raises Unpriceable for an unknown family, a missing size, or a dtype the device has no peak for.
    """
    done = work(kernel, device)
    _, factors = coefficients(kernel, device, benchmark=benchmark)
    taken, bound = seconds(done, factors.values)
    return Cost(flops=done.flops, bytes=done.bytes, seconds=taken, bound=bound)
