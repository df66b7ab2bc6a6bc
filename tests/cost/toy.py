"""A toy die with round numbers, for costs worked out by hand."""

from typing import Any

from emulator.cost.device import Device
from emulator.cost.kernel import Cost, Kernel
from emulator.cost.price import price

GIGA = 1e9
US = 1e-6


def toy(**coefficients: dict[str, float]) -> Device:
    """2 cube and 4 vector cores at 1 GHz, 1 Tflop/s in bf16, 2 in int8, 1 GB/s of memory, 1000 bytes of L2."""
    return Device.model_validate(
        {
            "name": "toy",
            "title": "toy",
            "cores": {"cube": 2, "vector": 4, "clock": 1e9, "source": "test"},
            "memory": {"bytes": 10**9, "bandwidth": 1e9, "l2": 1000, "source": "test"},
            "cube": {"rates": {"bfloat16": 1e12, "float16": 1e12, "int8": 2e12}, "source": "test"},
            "vector": {"rates": {"float32": 1e9}, "source": "test"},
            "links": [
                {"name": "near", "dies": 2, "bandwidth": 4e9, "latency": 1e-6, "source": "test"},
                {"name": "node", "dies": 8, "bandwidth": 2e9, "latency": 2e-6, "source": "test"},
                {"name": "far", "dies": 64, "bandwidth": 1e9, "latency": 5e-6, "source": "test"},
            ],
            "coefficients": {key: {"values": values, "source": "test"} for key, values in coefficients.items()},
        }
    )


def cost(family: str, sizes: dict[str, Any], values: dict[str, float], dtype: str = "bfloat16", name: str = "") -> Cost:
    return price(Kernel(family, sizes, dtype, name), toy(**{family: values}))
