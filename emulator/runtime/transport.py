"""How tensors travel between ranks: one small interface, and process groups behind it. All on dim 0."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import AllgatherOptions

from emulator.runtime.mesh import Mesh


class Transport(Protocol):
    """Collectives of one rank over its group along a mesh axis. Calls have been compared before."""

    def all_reduce(self, x: Tensor, axis: str) -> Tensor: ...
    def reduce_scatter(self, x: Tensor, axis: str) -> Tensor: ...
    def all_gather(self, x: Tensor, axis: str) -> Tensor: ...
    def all_to_all(self, x: Tensor, axis: str, send: list[int], receive: list[int]) -> Tensor: ...
    def broadcast(self, x: Tensor, axis: str, owner: int, shape: Sequence[int]) -> Tensor: ...


class GroupTransport:
    """Plain (unchecked) torch process groups, one per axis; gloo on this project's worlds."""

    def __init__(self, mesh: Mesh, rank: int, groups: Mapping[str, Any]):
        self.mesh, self.rank, self.groups = mesh, rank, groups

    def all_reduce(self, x: Tensor, axis: str) -> Tensor:
        output = x.clone()
        self.groups[axis].allreduce([output], dist.AllreduceOptions()).wait()
        return output

    def reduce_scatter(self, x: Tensor, axis: str) -> Tensor:
        size = len(self.mesh.members(axis, self.rank))
        output = x.new_empty((x.shape[0] // size, *x.shape[1:]))
        self.groups[axis].reduce_scatter_single(output, x.contiguous(), dist.ReduceScatterOptions()).wait()
        return output

    def all_gather(self, x: Tensor, axis: str) -> Tensor:
        size = len(self.mesh.members(axis, self.rank))
        output = x.new_empty((x.shape[0] * size, *x.shape[1:]))
        self.groups[axis].all_gather_single(output, x.contiguous(), AllgatherOptions()).wait()
        return output

    def all_to_all(self, x: Tensor, axis: str, send: list[int], receive: list[int]) -> Tensor:
        output = x.new_empty((sum(receive), *x.shape[1:]))
        options = dist.AllToAllOptions()
        self.groups[axis].all_to_all_single(output, x.contiguous(), receive, send, options).wait()
        return output

    def broadcast(self, x: Tensor, axis: str, owner: int, shape: Sequence[int]) -> Tensor:
        """The owner's x, of that shape; the others' x may be empty."""
        members = self.mesh.members(axis, self.rank)
        output = x.contiguous().clone() if members[owner] == self.rank else x.new_empty(tuple(shape))
        options = dist.BroadcastOptions()
        options.rootRank = owner
        self.groups[axis].broadcast([output], options).wait()
        return output


def gather_objects(value: object, mesh: Mesh, rank: int) -> list | None:
    """Every rank's value on rank 0 (harness traffic of launchers that have no parent process)."""
    found: list | None = [None] * mesh.size if rank == 0 else None
    dist.gather_object(value, found)
    return found
