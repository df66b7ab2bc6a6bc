"""What a rank holds while it runs: bytes of activations and communication buffers from the time a value appears until
its last use, and the peak.

Views and in-place results are no new memory. Weights, caches and the batch are there before the step and are counted
apart; scratch memory inside a kernel is not seen.
"""

import operator
from collections import Counter
from typing import Any

import torch
from torch import Tensor, fx

from emulator.layout.plan import module_pattern
from emulator.ops.foreign import function_name
from emulator.ops.registry import op_name
from emulator.ops.transition import COLLECTIVES
from emulator.runtime.comm_call import num_bytes

_VIEWS = (torch.unflatten, torch.flatten, torch.split, torch.chunk, operator.getitem)
_SAME_DATA = ("wait", "regroup", "cache_write")
_SHOWN = 12  # largest values in a report
Unit = tuple[fx.Node, int]  # an output of a node that took memory of its own


class LiveMemory:
    """Follows one rank's step. Tell it every computed node, and every node whose value is dropped."""

    def __init__(self) -> None:
        self._units: dict[fx.Node, set[Unit]] = {}
        self._bytes: dict[Unit, int] = {}
        self._holders = Counter[Unit]()
        self._values: dict[Unit, tuple[list[int], str]] = {}
        self.now = 0
        self.peak = 0
        self._peak_node: fx.Node | None = None
        self._at_peak: list[Unit] = []
        self._of_modules: dict[str, int] = {}

    def appeared(self, node: fx.Node, value: Any) -> None:
        """A node has its value, and its operands are still there."""
        if node.op in ("placeholder", "get_attr"):
            return
        units = self._units_of(node, value)
        self._units[node] = units
        for unit in units:
            self._holders[unit] += 1
        pattern = module_pattern(node.meta["module"])
        self._of_modules[pattern] = max(self._of_modules.get(pattern, 0), self.now)
        if self.now > self.peak:
            self.peak, self._peak_node, self._at_peak = self.now, node, list(self._bytes)

    def _units_of(self, node: fx.Node, value: Any) -> set[Unit]:
        if node.target is operator.getitem and isinstance(node.args[0], fx.Node):
            given = self._units.get(node.args[0], set())
            own = {unit for unit in given if unit == (node.args[0], node.args[1])}
            return own or given
        if node.target in _VIEWS or op_name(node.target) in _SAME_DATA:
            source = node.args[0]
            return set(self._units.get(source, set())) if isinstance(source, fx.Node) else set()
        outputs = value if isinstance(value, (tuple, list)) else (value,)
        units = set()
        for index, output in enumerate(outputs):
            if isinstance(output, Tensor):
                unit = (node, index)
                self._bytes[unit] = num_bytes(output)
                self._values[unit] = list(output.shape), str(output.dtype).removeprefix("torch.")
                self.now += self._bytes[unit]
                units.add(unit)
        return units

    def dropped(self, node: fx.Node) -> None:
        for unit in self._units.pop(node, ()):
            self._holders[unit] -= 1
            if not self._holders[unit]:
                self.now -= self._bytes.pop(unit)

    def report(self) -> dict[str, Any]:
        """{peak_bytes, node, op, module, by_category {activation, communication: bytes at the peak}, live [{node,
        module, shape, dtype, bytes, category}] (the largest then), modules {pattern: peak bytes while it ran}}."""
        live = []
        for node, index in self._at_peak:
            shape, dtype = self._values[node, index]
            live.append({
                "node": node.name, "module": node.meta["module"], "shape": shape, "dtype": dtype,
                "bytes": _size(shape, dtype), "category": _category(node),
            })  # fmt: skip
        by_category = Counter[str]()
        for entry in live:
            by_category[entry["category"]] += entry["bytes"]
        node = self._peak_node
        return {
            "peak_bytes": self.peak,
            "node": node.name if node else None,
            "op": function_name(node) if node else None,
            "module": node.meta["module"] if node else None,
            "by_category": dict(by_category),
            "live": sorted(live, key=lambda e: -e["bytes"])[:_SHOWN],
            "modules": self._of_modules,
        }


def _size(shape: list[int], dtype: str) -> int:
    return torch.Size(shape).numel() * getattr(torch, dtype).itemsize


def _category(node: fx.Node) -> str:
    return "communication" if op_name(node.target) in COLLECTIVES else "activation"
