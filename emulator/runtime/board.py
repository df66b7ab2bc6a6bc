"""The board: shared memory in which every rank posts what it is about to do.

gloo answers a size mismatch with SIGABRT on one rank and silence on another, equal sizes with silent corruption, and a
missing call with a bare timeout. So before each collective a rank posts its call, waits for its group's posts and
compares; the error then names ranks, op and module on every rank, before gloo is entered. It costs memory writes, not
messages. The board also holds what each rank is doing now, for the report after a stall.
"""

import json
import mmap
import os
import struct
import time
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

_HEADER = struct.Struct("<QII")  # sequence, length, crc
_STATUS_BYTES = 512
_AXES = ("tp", "ep", "dp", "world")


class CallMismatch(RuntimeError):
    """Ranks of one group were about to make calls that do not fit."""


class PeerFailed(RuntimeError):
    """Another rank failed; this one stops. The report comes from the rank that failed."""


class PeerStalled(RuntimeError):
    """A rank did not reach a collective within the timeout."""


class Board:
    """Shared pages: an abort flag, a status per rank, and per (rank, axis) a ring of two posted calls."""

    def __init__(self, world_size: int, memory: mmap.mmap | None = None):
        self.world_size = world_size
        self.slot_bytes = 2048 + 24 * world_size
        self.bytes = self.size_of(world_size)
        self.memory = memory if memory is not None else mmap.mmap(-1, self.bytes)
        self._sequence: dict[str, int] = {}
        self._status_count = 0

    @staticmethod
    def size_of(world_size: int) -> int:
        return 64 + world_size * (_STATUS_BYTES + len(_AXES) * 2 * (2048 + 24 * world_size))

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
        self._write(64 + rank * _STATUS_BYTES, self._status_count, text.encode()[: _STATUS_BYTES - _HEADER.size])

    def status(self, rank: int) -> tuple[int, str]:
        """(signs of life so far, what the rank said last)."""
        offset = 64 + rank * _STATUS_BYTES
        count, length, _ = _HEADER.unpack_from(self.memory, offset)
        start = offset + _HEADER.size
        return count, bytes(self.memory[start : start + length]).decode(errors="replace")

    # -- calls --------------------------------------------------------------------------------------------------------

    def agree(
        self, axis: str, members: Sequence[int], rank: int, call: Mapping[str, Any], timeout: float
    ) -> list[dict[str, Any]]:
        """Posts `call` and returns the posts of all `members`, in order, for the same call number on this axis.

        Raises PeerStalled after `timeout` seconds, naming the ranks that did not come and what they do instead;
        PeerFailed when the run is being aborted.
        """
        sequence = self._sequence[axis] = self._sequence.get(axis, 0) + 1
        payload = json.dumps(call).encode()
        if len(payload) > self.slot_bytes - _HEADER.size:
            payload = json.dumps({**call, "module": "...", "splits": zlib.crc32(payload)}).encode()
        self._write(self._slot(axis, rank, sequence), sequence, payload)
        deadline, delay = time.monotonic() + timeout, 0.0
        posts: dict[int, dict[str, Any]] = {}
        while True:
            for member in members:
                if member not in posts and (found := self._read(self._slot(axis, member, sequence), sequence)):
                    posts[member] = json.loads(found)
            if len(posts) == len(members):
                return [posts[m] for m in members]
            if self.aborted:
                raise PeerFailed("another rank failed")
            if time.monotonic() > deadline:
                missing = [m for m in members if m not in posts]
                doing = "; ".join(f"rank {m}: {self.status(m)[1] or 'nothing yet'}" for m in missing)
                raise PeerStalled(
                    f"{call.get('op')} on {axis} in {call.get('module')}: waited {timeout:g} s for "
                    f"rank {', '.join(map(str, missing))} ({doing})"
                )
            if delay < 5e-5:
                os.sched_yield()
                delay += 1e-6
            else:
                delay = min(delay * 1.5, 1e-3)
                time.sleep(delay)

    def _slot(self, axis: str, rank: int, sequence: int) -> int:
        index = (rank * len(_AXES) + _AXES.index(axis)) * 2 + sequence % 2
        return 64 + self.world_size * _STATUS_BYTES + index * self.slot_bytes

    def _write(self, offset: int, sequence: int, payload: bytes) -> None:
        start = offset + _HEADER.size
        self.memory[start : start + len(payload)] = payload
        _HEADER.pack_into(self.memory, offset, sequence, len(payload), zlib.crc32(payload))

    def _read(self, offset: int, sequence: int) -> bytes | None:
        found, length, crc = _HEADER.unpack_from(self.memory, offset)
        if found != sequence:
            return None
        start = offset + _HEADER.size
        payload = bytes(self.memory[start : start + length])
        return payload if zlib.crc32(payload) == crc else None  # torn write: look again


class StoreBoard(Board):
    """The same agreement through a torch.distributed store, for ranks on several hosts: slower, a few round trips."""

    def __init__(self, world_size: int, store: Any):
        super().__init__(world_size)
        self.store = store

    def abort(self) -> None:
        super().abort()
        self.store.set("emulator/abort", b"1")

    def agree(
        self, axis: str, members: Sequence[int], rank: int, call: Mapping[str, Any], timeout: float
    ) -> list[dict[str, Any]]:
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
