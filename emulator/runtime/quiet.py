"""Verification traffic between the ranks of a group: it goes below c10d, so that no recorder sees or counts it."""

import pickle
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import AllgatherOptions

from emulator.errors import UsageError
from emulator.runtime.board import compare_calls
from emulator.runtime.checked_group import CheckedGroup
from emulator.runtime.comm_call import caller, group_label


class QuietGroup:
    """A process group (default: all ranks), checked or stock. All its ranks make the same calls on it.

    members: global ranks; rank: this process's; index: its position in members. Without torch.distributed it is a group
    of this process alone. Raises UsageError when this rank is not a member.
    """

    def __init__(self, group: Any = None):
        self.group = dist.group.WORLD if group is None and dist.is_initialized() else group
        if self.group is dist.GroupMember.NON_GROUP_MEMBER:
            raise UsageError("this rank is not a member of the group: only members make this call")
        if self.group is None:
            self.members, self.rank, self.label = [0], 0, "world"
            return
        self.members, self.rank = dist.get_process_group_ranks(self.group), dist.get_rank()
        fallback = "world" if self.size == dist.get_world_size() else "group"
        self.label = group_label(self.group.group_desc, getattr(self.group, "label", fallback))
        devices = self.group._device_types
        self.device = torch.device("cpu") if torch.device("cpu") in devices or not devices else devices[0]
        inner = self.group.inner if isinstance(self.group, CheckedGroup) else self.group
        # called directly, a backend bypasses the operators that a recorder sees
        self._backend: Any = inner._get_backend(self.device)

    @property
    def size(self) -> int:
        return len(self.members)

    @property
    def index(self) -> int:
        return self.members.index(self.rank)

    def meet(self, purpose: str) -> None:
        """Waits until all ranks are here for the same purpose. On a checked group, calls made earlier run first, and a
        rank that makes another call instead, or none, raises CallMismatch or PeerStalled; a stock group waits on."""
        group = self.group
        if not isinstance(group, CheckedGroup):
            return
        while group.queue:  # else its order against what follows would differ between ranks
            group.run_until(group.queue[-1])
        _, site, module, _ = caller()
        post = {"op": purpose, "group": self.label, "site": site, "module": module}
        group.board.set_status(group.global_rank, f"waiting in {purpose} on {self.label} at {site}")
        posts = group.board.agree(group.slot, group.members, group.global_rank, post, group.timeout)
        compare_calls(self.label, group.members, posts, ("op",))
        group.board.set_status(group.global_rank, f"running after {purpose} at {site}")

    def exchange(self, value: Any) -> list[Any]:
        """Every rank's value, in the order of the members. Values may have any size."""
        if self.size == 1:
            return [value]
        payload = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        lengths = [int(n) for n in self._all_gather(torch.tensor([payload.numel()]))]
        padded = torch.zeros(max(lengths), dtype=torch.uint8)
        padded[: payload.numel()] = payload
        return [pickle.loads(p[:n].numpy().tobytes()) for p, n in zip(self._all_gather(padded), lengths)]

    def total(self, x: Tensor) -> Tensor:
        """Sum over the ranks in double precision, on the CPU; x has the same shape on all of them."""
        total = x.detach().to(self.device if self.size > 1 else "cpu", torch.float64, copy=True).contiguous()
        if self.size > 1:
            self._backend.allreduce([total], dist.AllreduceOptions()).wait()
        return total.cpu()

    def _all_gather(self, x: Tensor) -> list[Tensor]:
        x = x.to(self.device)
        parts = [torch.empty_like(x) for _ in self.members]
        self._backend.allgather([parts], [x], AllgatherOptions()).wait()
        return [p.cpu() for p in parts]
