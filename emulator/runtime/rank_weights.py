"""A rank's part of a weight: views into the host's one copy, or shapes."""

import torch
from torch import Tensor
from torch.distributed.tensor.placement_types import Partial, Shard

from emulator.layout.placement import Layout
from emulator.model.weights import parameter_dtype
from emulator.ops.registry import Owned
from emulator.runtime.mesh import Mesh


def local_shard(weight: Tensor, layout: Layout, mesh: Mesh, rank: int) -> Tensor:
    """This rank's part: a view for a shard, the tensor itself when replicated. A partial weight (the bias of a
    row-parallel linear) is whole on the first rank of the group and zero on the others."""
    for axis, placement in layout.placements:
        index = mesh.index(axis, rank)
        if isinstance(placement, Shard):
            weight = weight.chunk(mesh.sizes[axis], placement.dim)[index]
        elif isinstance(placement, Partial) and index > 0:
            weight = torch.zeros_like(weight)
        elif isinstance(placement, Owned) and index != placement.index:
            weight = weight[:0]
    return weight


def fake_shard(name: str, parameter: Tensor, dtype: torch.dtype, layout: Layout, mesh: Mesh, rank: int) -> Tensor:
    """A tensor of this rank's shape and dtype in the current fake mode. parameter: whole, a meta tensor."""
    local = list(parameter.shape)
    for axis, placement in layout.placements:
        if isinstance(placement, Shard):
            local[placement.dim] //= mesh.sizes[axis]
        elif isinstance(placement, Owned) and mesh.index(axis, rank) != placement.index:
            local[0] = 0
    return torch.empty(local, dtype=parameter_dtype(name, dtype, parameter))
