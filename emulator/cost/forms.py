"""Which coefficients a calibration fits for an op family, and where it starts from."""

from emulator.cost.kernel import Kernel
from emulator.cost.price import BITS
from emulator.cost.rows import Setting
from emulator.cost.vector import TRAFFIC

PRODUCTS = ("matmul", "grouped_matmul", "fused_matmuls")

FORMS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(PRODUCTS, ("launch", "fill", "cube", "memory", "reload", "tail", "turn", "misaligned", "dequant")),
    "sparse_attention": ("launch", "cube", "gather"),
    "dense_attention": ("launch", "cube", "gather"),
    "indexer": ("launch", "cube", "memory", "topk"),
    "topk": ("launch", "topk"),
    "collective": ("launch", "wide", "switch", "wire", "wire_reduce", "latency"),
    "moe_dispatch": ("launch", "latency", "wire", "spread"),
    "moe_combine": ("launch", "latency", "wire", "spread"),
    **dict.fromkeys((*TRAFFIC, "vector"), ("launch", "fill", "row", "vector", "memory", "miss", "padding")),
}

# Starting values: launch-like terms in us, others multiples of the ideal time. A fit is pulled towards them, so that
# a term which few rows tell apart stays physical; secondary terms start small.
START = {
    "launch": 6.0, "fill": 4.0, "cube": 1.2, "memory": 1.3, "reload": 1.4, "tail": 0.3, "turn": 1.0, "misaligned": 1.0,
    "dequant": 0.4, "gather": 1.7, "topk": 1.5, "wire": 1.0, "wire_reduce": 1.2, "wide": 5.0, "switch": 3.0,
    "latency": 1.0, "spread": 0.1, "row": 0.01, "vector": 0.3, "miss": 0.3, "padding": 0.3,
}  # fmt: skip

# Launches, us. Inside a model a kernel finds neither its code nor its operands in the caches, repeated alone it does:
# the smallest products of public operator benchmarks take 2 to 3 us, the smallest inside a model 8 us and more.
PRODUCT_LAUNCH = 8.0
BENCHMARK_LAUNCH = 2.0
ATTENTION_LAUNCH = 20.0  # these kernels plan their tiles on every core first
LATE = ("sparse_attention", "dense_attention", "indexer")


def start(key: str, term: str, setting: Setting = "model") -> float:
    """Where the fit of a coefficient begins when the device has no value of its own. setting: of most of the rows."""
    family = key.split("@")[0].split(".")[0]
    if term != "launch":
        return START[term]
    if family in LATE:
        return ATTENTION_LAUNCH
    if family in PRODUCTS:
        return BENCHMARK_LAUNCH if setting == "benchmark" else PRODUCT_LAUNCH
    if family in (*TRAFFIC, "vector") and setting == "benchmark":
        return BENCHMARK_LAUNCH
    return START[term]


def fit_key(kernel: Kernel) -> str:
    """Name under which a kernel's coefficients are fitted: family, variant if it has one, dtype for products."""
    key = f"{kernel.family}.{kernel.name}" if kernel.name else kernel.family
    return f"{key}.{BITS.get(kernel.dtype, kernel.dtype)}" if kernel.family in PRODUCTS else key


def form(key: str) -> tuple[str, ...]:
    """The terms fitted for the coefficients of this name."""
    return FORMS[key.split("@")[0].split(".")[0]]
