"""Parallel linear layers for hand-written rank code: flags and layouts in emulator.runtime.parallel_linear."""

from emulator.runtime.parallel_linear import ColumnParallelLinear, RowParallelLinear

__all__ = ["ColumnParallelLinear", "RowParallelLinear"]
