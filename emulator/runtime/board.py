"""The board: shared memory in which every rank posts what it is about to do.

gloo answers a size mismatch with SIGABRT on one rank and silence on another, equal sizes with silent corruption, and a
missing call with a bare timeout. So before each collective a rank posts its call, waits for its group's posts and
compares; the error then names ranks, op and module on every rank, before gloo is entered. It costs memory writes, not
messages. The board also holds what each rank is doing now, for the report after a stall.
"""

import hashlib
import json
import mmap
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

_HEADER = struct.Struct("<QQ")  # count, length
_FLAGS = 64
_STATUS_BYTES = 512
_RING = 16  # calls of one group that a rank may have posted before the others read them
NUM_GROUPS = 128
AXES = ("tp", "ep", "dp", "world")  # group ids 0..3 belong to the emulator's own transitions

DONE, FAILED = "done", "failed"  # a rank's status once its function has ended


class CallMismatch(RuntimeError):
    """Ranks of one group were about to make calls that do not fit. culprits: the ranks in the minority."""

    def __init__(self, message: str, culprits: Sequence[int] = ()):
        super().__init__(message)
        self.culprits = list(culprits)


class PeerFailed(RuntimeError):
    """Another rank failed; this one stops. The report comes from the rank that failed."""


class PeerStalled(RuntimeError):
    """A rank did not come to a collective. culprits: those ranks."""

    def __init__(self, message: str, culprits: Sequence[int] = ()):
        super().__init__(message)
        self.culprits = list(culprits)


class Board:
    """Shared pages: an abort flag, a process id and a status per rank, and per (group, rank) a counter of posted calls
    with a ring of the last ones."""

    def __init__(self, world_size: int, memory: mmap.mmap | None = None):
        self.world_size = world_size
        self.memory = memory if memory is not None else mmap.mmap(-1, self.size_of(world_size))
        self._posted = np.frombuffer(self.memory, dtype=np.uint64, count=NUM_GROUPS * world_size, offset=_FLAGS)
        self._posted = self._posted.reshape(NUM_GROUPS, world_size)
        after = _FLAGS + self._posted.nbytes
        self.pids = np.frombuffer(self.memory, dtype=np.int64, count=world_size, offset=after)
        self._statuses = after + self.pids.nbytes
        self._slots = self._statuses + world_size * _STATUS_BYTES
        self._slot_bytes = _slot_bytes(world_size)
        self._status_count = 0
        self.idle: Callable[[], object] = lambda: None  # called while waiting: other groups' calls must go on

    @staticmethod
    def size_of(world_size: int) -> int:
        per_rank = 8 + _STATUS_BYTES + NUM_GROUPS * (8 + _RING * _slot_bytes(world_size))
        return _FLAGS + world_size * per_rank

    # -- abort and status ---------------------------------------------------------------------------------------------

    def abort(self) -> None:
        """Tells every rank to stop at its next wait."""
        self.memory[0] = 1

    @property
    def aborted(self) -> bool:
        return self.memory[0] == 1

    def reset(self) -> None:
        """Forgets all calls and the abort flag, so that the ranks can start anew. Only while no rank is in a call."""
        self._posted[:] = 0
        self.memory[0] = 0

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
        self, group: int, members: Sequence[int], rank: int, call: Mapping[str, Any], timeout: float
    ) -> list[Mapping[str, Any]]:
        """Posts `call` and returns the posts of all `members`, in order, for the same call number of this group.

        Raises PeerStalled after `timeout` seconds, or at once when a missing member has ended its function; PeerFailed
        when the run is being aborted.
        """
        return self.collect(group, members, rank, self.post(group, rank, call), call, timeout)

    def post(self, group: int, rank: int, call: Mapping[str, Any]) -> int:
        """Announces a call without waiting; returns its number in the group."""
        row = self._posted[group]
        number = int(row[rank]) + 1
        payload = json.dumps(call).encode()
        if len(payload) > self._slot_bytes - _HEADER.size:
            digest = [hashlib.sha256(json.dumps(call.get(side)).encode()).hexdigest() for side in ("inputs", "outputs")]
            payload = json.dumps({**call, "inputs": digest[0], "outputs": digest[1]}).encode()
        offset = self._slot(group, rank, number)
        self.memory[offset + _HEADER.size : offset + _HEADER.size + len(payload)] = payload
        _HEADER.pack_into(self.memory, offset, number, len(payload))
        row[rank] = number  # last: from here on the others may read the post
        return number

    def collect(
        self, group: int, members: Sequence[int], rank: int, number: int, call: Mapping[str, Any], timeout: float
    ) -> list[Mapping[str, Any]]:
        """The posts of all members for call `number`, waiting for them."""
        self._await(group, members, number, call, timeout)
        posts = [self._read(self._slot(group, m, number)) for m in members]
        if all(post == posts[0] for post in posts):
            return [json.loads(posts[0])] * len(members)
        return [json.loads(post) for post in posts]

    def read_post(self, group: int, rank: int, number: int) -> Mapping[str, Any] | None:
        """A post that has been made; None when it has been overwritten since (more than a ring old)."""
        offset = self._slot(group, rank, number)
        post = self._read(offset)
        return json.loads(post) if _HEADER.unpack_from(self.memory, offset)[0] == number else None

    def all_posted(self, group: int, members: Sequence[int], number: int) -> bool:
        return bool((self._posted[group][np.asarray(members)] >= number).all())

    def _await(self, group: int, members: Sequence[int], number: int, call: Mapping[str, Any], timeout: float) -> None:
        row, index = self._posted[group], np.asarray(members)
        deadline, polls = time.monotonic() + timeout, 0
        while (row[index] < number).any():
            if self.aborted:
                raise PeerFailed("another rank failed")
            self.idle()
            missing = [m for m in members if row[m] < number]
            ended = [m for m in missing if self.status(m)[1] == DONE] if polls > 8 else []
            if ended and not self.all_posted(group, ended, number):
                came = [m for m in members if m not in missing]
                tied = 2 * len(ended) == len(members)
                culprits = sorted({*came, *ended}) if tied else came if 2 * len(ended) > len(members) else ended
                raise self._stalled(call, missing, ended, "finished without making this call", culprits)
            if time.monotonic() > deadline:
                raise self._stalled(call, missing, missing, f"did not come within {timeout:g} s")
            polls += 1
            time.sleep(min(2e-3, 2e-5 * 1.5 ** min(polls, 20)))

    def _stalled(
        self,
        call: Mapping[str, Any],
        missing: list[int],
        absent: list[int],
        why: str,
        culprits: list[int] | None = None,
    ) -> PeerStalled:
        doing = "; ".join(f"rank {m} is {self.status(m)[1] or 'starting'}" for m in missing)
        what = f"{call.get('op')} on {call.get('group', 'its group')} in {call.get('module') or call.get('site')}"
        ranks = ", ".join(map(str, absent))
        return PeerStalled(f"{what}: rank {ranks} {why} ({doing})", absent if culprits is None else culprits)

    def _slot(self, group: int, rank: int, number: int) -> int:
        index = (group * self.world_size + rank) * _RING + number % _RING
        return self._slots + index * self._slot_bytes

    def _read(self, offset: int) -> bytes:
        _, length = _HEADER.unpack_from(self.memory, offset)
        start = offset + _HEADER.size
        return bytes(self.memory[start : start + length])


def _slot_bytes(world_size: int) -> int:
    """Room for one call: its names and shapes, and a tensor to and from each rank. A multiple of 8."""
    return 4096 + 192 * world_size


class StoreBoard(Board):
    """The same agreement through a torch.distributed store, for ranks on several hosts: slower, a few round trips."""

    def __init__(self, world_size: int, store: Any):
        super().__init__(world_size)
        self.store = store
        self._numbers: dict[int, int] = {}

    def abort(self) -> None:
        super().abort()
        self.store.set("emulator/abort", b"1")

    def post(self, group: int, rank: int, call: Mapping[str, Any]) -> int:
        number = self._numbers[group] = self._numbers.get(group, 0) + 1
        self.store.set(f"emulator/{group}/{number}/{rank}", json.dumps(call))
        return number

    def collect(
        self, group: int, members: Sequence[int], rank: int, number: int, call: Mapping[str, Any], timeout: float
    ) -> list[Mapping[str, Any]]:
        missing = list(members)
        deadline = time.monotonic() + timeout
        while missing:
            missing = [m for m in missing if not self.store.check([f"emulator/{group}/{number}/{m}"])]
            self.idle()
            if missing and self.store.check(["emulator/abort"]):
                raise PeerFailed("another rank failed")
            if missing and time.monotonic() > deadline:
                raise self._stalled(call, missing, missing, f"did not come within {timeout:g} s")
        return [json.loads(self.store.get(f"emulator/{group}/{number}/{m}")) for m in members]


def compare_calls(
    group: str, members: Sequence[int], calls: Sequence[Mapping[str, Any]], fields: Sequence[str]
) -> None:
    """Raises CallMismatch on the first field that differs, naming each rank's call; the culprits are the minority."""
    for name in fields:
        values = [json.dumps(c.get(name)) for c in calls]
        counts = {v: values.count(v) for v in values}
        if len(counts) > 1:
            usual = max(counts, key=counts.__getitem__)
            tied = list(counts.values()).count(counts[usual]) > 1
            culprits = [m for m, v in zip(members, values) if tied or v != usual]

            told = [
                f"rank {m}: {c.get('op')} with {name} {v} in {c.get('module') or c.get('site')}"
                for m, c, v in zip(members, calls, values)
            ]
            raise CallMismatch(f"ranks of {group} disagree on {name}: {'; '.join(told)}", culprits)


def compare_pairs(
    group: str, members: Sequence[int], sends: Sequence[Sequence], receives: Sequence[Sequence], site: str
) -> None:
    """Raises CallMismatch unless what every rank sends to every other is what that one expects. sends[i][j] goes from
    the i-th to the j-th rank, which expects receives[j][i]. All ranks see the whole table, so all of them raise."""
    for i, sender in enumerate(members):
        for j, receiver in enumerate(members):
            if sends[i][j] != receives[j][i]:
                raise CallMismatch(
                    f"all_to_all on {group} at {site}: rank {sender} sends {sends[i][j]} to rank {receiver}, "
                    f"which expects {receives[j][i]}",
                    sorted({sender, receiver}),
                )
