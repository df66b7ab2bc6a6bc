"""How tensors travel between ranks: one small interface, and gloo behind it. All on dim 0, contiguous tensors."""

from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from emulator.runtime.mesh import Mesh


class Transport(Protocol):
    """Collectives of one rank over its group along a mesh axis. Shapes have been compared before."""

    def all_reduce(self, x: Tensor, axis: str) -> Tensor: ...
    def reduce_scatter(self, x: Tensor, axis: str) -> Tensor: ...
    def all_gather(self, x: Tensor, axis: str) -> Tensor: ...
    def all_to_all(self, x: Tensor, axis: str, send: list[int], receive: list[int]) -> Tensor: ...
    def close(self) -> None: ...


class Gloo:
    """torch.distributed on gloo. Groups with the same ranks share one process group (ep reuses tp where they agree)."""

    def __init__(self, mesh: Mesh, rank: int, *, init_method: str | None, timeout: float):
        self.mesh, self.rank = mesh, rank
        # gloo's own timeout only has to outlast the board's: the board names culprits, gloo cannot
        limit = timedelta(seconds=timeout + 5)
        if not dist.is_initialized():
            dist.init_process_group("gloo", init_method=init_method, rank=rank, world_size=mesh.size, timeout=limit)
        made: dict[tuple[int, ...], dist.ProcessGroup | None] = {tuple(range(mesh.size)): dist.group.WORLD}
        self.groups: dict[str, dist.ProcessGroup | None] = {}
        for axis in ("tp", "ep", "dp"):
            for ranks in mesh.groups(axis):
                if len(ranks) > 1 and tuple(ranks) not in made:
                    made[tuple(ranks)] = dist.new_group(list(ranks), timeout=limit, backend="gloo")
            self.groups[axis] = made.get(tuple(mesh.members(axis, rank)))

    def _size(self, axis: str) -> int:
        return len(self.mesh.members(axis, self.rank))

    def all_reduce(self, x: Tensor, axis: str) -> Tensor:
        output = x.clone()
        dist.all_reduce(output, group=self.groups[axis])
        return output

    def reduce_scatter(self, x: Tensor, axis: str) -> Tensor:
        output = x.new_empty((x.shape[0] // self._size(axis), *x.shape[1:]))
        dist.reduce_scatter_single(output, x.contiguous(), group=self.groups[axis])
        return output

    def all_gather(self, x: Tensor, axis: str) -> Tensor:
        output = x.new_empty((x.shape[0] * self._size(axis), *x.shape[1:]))
        dist.all_gather_single(output, x.contiguous(), group=self.groups[axis])
        return output

    def all_to_all(self, x: Tensor, axis: str, send: list[int], receive: list[int]) -> Tensor:
        output = x.new_empty((sum(receive), *x.shape[1:]))
        dist.all_to_all_single(output, x.contiguous(), receive, send, group=self.groups[axis])
        return output

    def close(self) -> None:
        dist.destroy_process_group()


def gather_objects(value: object, mesh: Mesh, rank: int) -> list | None:
    """Every rank's value on rank 0 (harness traffic of launchers that have no parent process)."""
    found: list | None = [None] * mesh.size if rank == 0 else None
    dist.gather_object(value, found)
    return found


def one_thread() -> None:
    """A rank computes on one thread: 16 ranks on 2 cores would otherwise fight."""
    torch.set_num_threads(1)
