"""The board: shared memory in which every rank posts what it is about to do.

gloo answers a size mismatch with SIGABRT on one rank and silence on another, equal sizes with silent corruption, and a
missing call with a bare timeout. So before each collective a rank posts its call, waits for its group's posts and
compares; the error then names ranks, op and module on every rank, before gloo is entered. It costs memory writes, not
messages. The board also holds what each rank is doing now, for the report after a stall.
"""

import json
import mmap
import struct
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

_HEADER = struct.Struct("<QQ")  # count, length
_FLAGS = 64
_STATUS_BYTES = 512
_AXES = ("tp", "ep", "dp", "world")


class CallMismatch(RuntimeError):
    """Ranks of one group were about to make calls that do not fit."""


class PeerFailed(RuntimeError):
    """Another rank failed; this one stops. The report comes from the rank that failed."""


class PeerStalled(RuntimeError):
    """A rank did not reach a collective within the timeout."""


class Board:
    """Shared pages: an abort flag, a status per rank, and per (rank, axis) a counter of posted calls and a ring of the
    last two. A rank can be one call ahead of its group, not two: the second needs everyone's first."""

    def __init__(self, world_size: int, memory: mmap.mmap | None = None):
        self.world_size = world_size
        self.memory = memory if memory is not None else mmap.mmap(-1, self.size_of(world_size))
        self._posted = np.frombuffer(self.memory, dtype=np.uint64, count=len(_AXES) * world_size, offset=_FLAGS)
        self._posted = self._posted.reshape(len(_AXES), world_size)
        self._statuses = _FLAGS + self._posted.nbytes
        self._slots = self._statuses + world_size * _STATUS_BYTES
        self._slot_bytes = _slot_bytes(world_size)
        self._status_count = 0

    @staticmethod
    def size_of(world_size: int) -> int:
        per_rank = _STATUS_BYTES + len(_AXES) * (8 + 2 * _slot_bytes(world_size))
        return _FLAGS + world_size * per_rank

    # -- abort and status ---------------------------------------------------------------------------------------------

    def abort(self) -> None:
        """Tells every rank to stop at its next wait."""
        self.memory[0] = 1

    @property
    def aborted(self) -> bool:
        return self.memory[0] == 1

    def set_status(self, rank: int, text: str) -> None:
        """What `rank` does now; each call also counts as a sign of life."""
        self._status_count += 1
        payload = text.encode()[: _STATUS_BYTES - _HEADER.size]
        offset = self._statuses + rank * _STATUS_BYTES
        self.memory[offset + _HEADER.size : offset + _HEADER.size + len(payload)] = payload
        _HEADER.pack_into(self.memory, offset, self._status_count, len(payload))

    def status(self, rank: int) -> tuple[int, str]:
        """(signs of life so far, what the rank said last)."""
        offset = self._statuses + rank * _STATUS_BYTES
        count, length = _HEADER.unpack_from(self.memory, offset)
        start = offset + _HEADER.size
        return count, bytes(self.memory[start : start + length]).decode(errors="replace")

    # -- calls --------------------------------------------------------------------------------------------------------

    def agree(
        self, axis: str, members: Sequence[int], rank: int, call: Mapping[str, Any], timeout: float
    ) -> list[Mapping[str, Any]]:
        """Posts `call` and returns the posts of all `members`, in order, for the same call number on this axis.

        Raises PeerStalled after `timeout` seconds, naming the ranks that did not come and what they do instead;
        PeerFailed when the run is being aborted.
        """
        row = self._posted[_AXES.index(axis)]
        sequence = int(row[rank]) + 1
        payload = json.dumps(call).encode()
        if len(payload) > self._slot_bytes - _HEADER.size:
            raise ValueError(f"call description of {len(payload)} bytes does not fit the board: {call}")
        offset = self._slot(axis, rank, sequence)
        self.memory[offset + _HEADER.size : offset + _HEADER.size + len(payload)] = payload
        _HEADER.pack_into(self.memory, offset, sequence, len(payload))
        row[rank] = sequence  # last: from here on the others may read the post
        self._await(row, members, sequence, call, timeout)
        posts = [self._read(self._slot(axis, m, sequence)) for m in members]
        if all(post == payload for post in posts):
            return [call] * len(members)
        return [json.loads(post) for post in posts]

    def _await(
        self, row: np.ndarray, members: Sequence[int], sequence: int, call: Mapping[str, Any], timeout: float
    ) -> None:
        group = np.asarray(members)
        deadline, polls = time.monotonic() + timeout, 0
        while (row[group] < sequence).any():
            if self.aborted:
                raise PeerFailed("another rank failed")
            if time.monotonic() > deadline:
                missing = [m for m in members if row[m] < sequence]
                doing = "; ".join(f"rank {m}: {self.status(m)[1] or 'nothing yet'}" for m in missing)
                raise PeerStalled(
                    f"{call.get('op')} in {call.get('module')}: waited {timeout:g} s for "
                    f"rank {', '.join(map(str, missing))} ({doing})"
                )
            polls += 1
            time.sleep(min(2e-3, 2e-5 * 1.5**polls))

    def _slot(self, axis: str, rank: int, sequence: int) -> int:
        index = (rank * len(_AXES) + _AXES.index(axis)) * 2 + sequence % 2
        return self._slots + index * self._slot_bytes

    def _read(self, offset: int) -> bytes:
        _, length = _HEADER.unpack_from(self.memory, offset)
        start = offset + _HEADER.size
        return bytes(self.memory[start : start + length])


def _slot_bytes(world_size: int) -> int:
    """Room for one call: its names and shape, and a split list of one number a rank. A multiple of 8."""
    return 2048 + 24 * world_size


class StoreBoard(Board):
    """The same agreement through a torch.distributed store, for ranks on several hosts: slower, a few round trips."""

    def __init__(self, world_size: int, store: Any):
        super().__init__(world_size)
        self.store = store
        self._sequence: dict[str, int] = {}

    def abort(self) -> None:
        super().abort()
        self.store.set("emulator/abort", b"1")

    def agree(
        self, axis: str, members: Sequence[int], rank: int, call: Mapping[str, Any], timeout: float
    ) -> list[Mapping[str, Any]]:
        sequence = self._sequence[axis] = self._sequence.get(axis, 0) + 1
        self.store.set(f"emulator/{axis}/{sequence}/{rank}", json.dumps(call))
        missing = list(members)
        deadline = time.monotonic() + timeout
        while missing:
            missing = [m for m in missing if not self.store.check([f"emulator/{axis}/{sequence}/{m}"])]
            if missing and self.store.check(["emulator/abort"]):
                raise PeerFailed("another rank failed")
            if missing and time.monotonic() > deadline:
                raise PeerStalled(
                    f"{call.get('op')} on {axis} in {call.get('module')}: waited {timeout:g} s for "
                    f"rank {', '.join(map(str, missing))}"
                )
        return [json.loads(self.store.get(f"emulator/{axis}/{sequence}/{m}")) for m in members]


def compare_calls(axis: str, members: Sequence[int], calls: Sequence[Mapping[str, Any]], fields: Sequence[str]) -> None:
    """Raises CallMismatch, naming each rank's value of the first field on which the calls differ."""
    for name in fields:
        values = [json.dumps(c.get(name)) for c in calls]
        if len(set(values)) > 1:
            found = "; ".join(
                f"rank {m}: {c.get('op')} {name}={v} in {c.get('module')}" for m, c, v in zip(members, calls, values)
            )
            raise CallMismatch(f"ranks of {axis} disagree on {name}: {found}")
