"""region_begin, copy_region, region_end: one decoder layer that stands for several equal ones, and where its copies go.

    carried = region_begin([...], layer, repeat)    values that change from layer to layer, as the first layer gets them
    ...                                             nodes of `layer`
    state = region_end([...])                       what the next layer gets for `carried`, then what leaves the region
    state = copy_region(state, layer + 1)           repeat - 1 of them: the same nodes once more, for another layer
    ...

The markers are layout-transparent: every value leaves them in the layout in which it came. They change no value and
stand for no work; emulator.passes.repetition replaces them by the nodes they stand for before anything runs.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.tensor.placement_types import Placement

from emulator.ops.registry import LIBRARY, Op


def _same_values(values: list[Tensor], *numbers: int) -> list[Tensor]:
    return [value.clone() for value in values]  # torch.library: an output is never an operand


def _same_shapes(values: list[Tensor], *numbers: int) -> list[Tensor]:
    return [torch.empty_like(value) for value in values]


def _transparent(values: Sequence[Placement]) -> tuple[Placement, ...]:
    """Rule of every marker: the placements of its operands, in order."""
    return tuple(values)


def _marker(schema: str) -> Op:
    name = schema.split("(")[0]
    LIBRARY.define(schema)
    LIBRARY.impl(name, _same_values, "CPU")
    torch.library.register_fake(f"emulator::{name}", _same_shapes, lib=LIBRARY)
    arguments = tuple(a.name for a in getattr(torch.ops.emulator, name).default._schema.arguments)
    return Op(name, _transparent, arguments)


# Apart from OPS: no lowering makes a marker and no rank executes one.
MARKERS = {
    op.name: op
    for op in (
        _marker("region_begin(Tensor[] carried, int layer, int repeat) -> Tensor[]"),
        _marker("region_end(Tensor[] values) -> Tensor[]"),
        _marker("copy_region(Tensor[] state, int layer) -> Tensor[]"),
    )
}
