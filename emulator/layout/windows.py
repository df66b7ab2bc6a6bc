"""The token windows of ranks on a real batch: each rank's rows, per-request lengths, positions and slots, from the
global batch alone, and the invariants they keep.

Symbols: T rows after the runner's padding, P parts (tp size), per = ceil(T / P), padded = per * P; rank r owns rows
[r*per, (r+1)*per). Rules: vLLM-Ascend's metadata builder for DSA context parallelism (sfa_cp) and its token cutters.
All values are tuples of ints, so no two batches or draft steps share storage.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from emulator.errors import UsageError
from emulator.layout.placement import Tokens
from emulator.model.batch import Request

NO_SLOT = NO_POSITION = NO_REQUEST = -1  # what pad rows carry


@dataclass(frozen=True)
class GlobalBatch:
    """The packed batch (TND) of one dp rank, the same on all its tp ranks.

    requests: own the real rows, in order. slots: cache slot of every real row. rows: T >= real, the runner's padding to
    graph size, tp multiple or dp maximum included. graph_pads: query rows of the graph-pad requests, which follow the
    real requests, have kv length 0 and own some or all of the T - real pad rows.
    """

    requests: tuple[Request, ...]
    slots: tuple[int, ...]
    rows: int
    graph_pads: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for i, request in enumerate(self.requests):
            if request.query < 0 or request.context < 0:
                raise UsageError(f"request {i}: query {request.query}, context {request.context}: must be >= 0")
        if len(self.slots) != self.real:
            raise UsageError(f"{len(self.slots)} slots for {self.real} real rows: must be equal")
        if any(n < 0 for n in self.graph_pads) or self.real + sum(self.graph_pads) > self.rows:
            pads = f"graph-pad requests of {list(self.graph_pads)}" if self.graph_pads else "no graph-pad request"
            raise UsageError(f"{self.real} real rows and {pads} do not fit in {self.rows} rows")

    @property
    def real(self) -> int:
        return sum(r.query for r in self.requests)

    @property
    def query_lens(self) -> tuple[int, ...]:
        """Rows of every request, graph-pad requests last."""
        return (*(r.query for r in self.requests), *self.graph_pads)

    @property
    def kv_lens(self) -> tuple[int, ...]:
        """Context + query of every request; 0 of a graph-pad request."""
        return (*(r.context + r.query for r in self.requests), *(0 for _ in self.graph_pads))


class Window(NamedTuple):
    """Rows [start, end_with_pad) of the global batch; [start, end) is real. end = min(end_with_pad, real) as the engine
    writes it, so end < start is possible on a rank with padding only: size buffers by end_with_pad."""

    start: int
    end: int
    end_with_pad: int


@dataclass(frozen=True)
class LocalBatch:
    """One rank's part of a GlobalBatch.

    query_lens, kv_lens: per request of the whole batch, 0 where the rank has no row of it. A right-aligned causal mask
    over them is exact. positions, slots, row_requests: [per]; -1 on pad rows, except that a row of a graph-pad request
    names its request.
    """

    window: Window
    query_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]
    positions: tuple[int, ...]
    slots: tuple[int, ...]
    row_requests: tuple[int, ...]

    @property
    def real(self) -> int:
        return max(self.window.end - self.window.start, 0)

    @property
    def query_ends(self) -> tuple[int, ...]:
        """The engine's query entries: running sum over all requests, no leading 0. The last may be below `per`; rows
        behind it belong to no request and what a kernel leaves there is undefined."""
        return tuple(accumulate(self.query_lens))


def local_batch(batch: GlobalBatch, *, parts: int, index: int) -> LocalBatch:
    """Rank `index`'s part.

    Request with rows [s, e) and kv length L on window [start, stop): a = max(s, start), b = min(e, stop), n = b - a.
    Query length max(n, 0); key length 0 if n <= 0, else max(L - (e - b), 0): the request's rows on later ranks are
    taken off so that right alignment stays exact. Without the bound a cut graph-pad request (L = 0) goes negative.
    """
    assert 0 <= index < parts, f"rank index {index} of {parts}"
    per = Tokens(batch.rows, parts).per
    start, stop = index * per, (index + 1) * per
    query_lens: list[int] = []
    kv_lens: list[int] = []
    positions: list[int] = []
    row_requests: list[int] = []
    s = 0
    for request, (query, kv) in enumerate(zip(batch.query_lens, batch.kv_lens)):
        e = s + query
        a, b = max(s, start), min(e, stop)
        n = max(b - a, 0)
        query_lens.append(n)
        kv_lens.append(max(kv - (e - b), 0) if n else 0)
        row_requests += [request] * n
        positions += [kv - (e - row) if kv else NO_POSITION for row in range(a, b)]
        s = e
    tail = per - len(row_requests)
    return LocalBatch(
        window=Window(start, min(stop, batch.real), stop),
        query_lens=tuple(query_lens),
        kv_lens=tuple(kv_lens),
        positions=(*positions, *[NO_POSITION] * tail),
        slots=tuple(batch.slots[row] if row < batch.real else NO_SLOT for row in range(start, stop)),
        row_requests=(*row_requests, *[NO_REQUEST] * tail),
    )


def local_batches(batch: GlobalBatch, *, parts: int) -> list[LocalBatch]:
    """The parts of all ranks, in rank order."""
    return [local_batch(batch, parts=parts, index=index) for index in range(parts)]


def visible_keys(batch: GlobalBatch | LocalBatch) -> tuple[int, ...]:
    """How many keys every real row sees: [real]. Row j of a request with n rows and L keys sees L - (n - 1 - j)."""
    visible = [kv - (n - 1 - j) for n, kv in zip(batch.query_lens, batch.kv_lens) for j in range(n)]
    return tuple(visible[: batch.real])


def check_invariants(batch: GlobalBatch, ranks: Sequence[LocalBatch]) -> list[str]:
    """What is wrong with the ranks' parts of a batch, one line each; empty if nothing.

    Every real row belongs to exactly one rank, with the global position, slot and number of visible keys; no length is
    negative, and a key length is 0 exactly where the rank has no row of the request or the request no key; every
    request row belongs to a rank; pad rows have no slot; two real rows never share one.
    """
    found = []
    tokens = Tokens(batch.rows, len(ranks))
    if len(set(batch.slots)) < batch.real or min(batch.slots, default=0) < 0:
        found.append("slots of real rows are not distinct and >= 0")
    owners = [0] * batch.real
    visible = visible_keys(batch)
    edge = 0
    for index, local in enumerate(ranks):
        problems = [*_window_problems(batch, local, edge, tokens.per), *_length_problems(batch, local)]
        if not problems:  # rows can be compared only where they line up
            problems = _row_problems(batch, local, visible)
        found += [f"rank {index}: {problem}" for problem in problems]
        edge = local.window.end_with_pad
        for row in range(max(local.window.start, 0), min(local.window.end, batch.real)):
            owners[row] += 1
    if edge != tokens.padded:
        found.append(f"windows end at {edge}, not at {tokens.padded}")
    found += [f"row {row} belongs to {count} ranks" for row, count in enumerate(owners) if count != 1]
    for request, total in enumerate(batch.query_lens):
        held = sum(local.query_lens[request] for local in ranks if request < len(local.query_lens))
        if held != total:
            found.append(f"request {request}: ranks hold {held} of {total} query rows")
    return found


def _window_problems(batch: GlobalBatch, local: LocalBatch, edge: int, per: int) -> list[str]:
    found = []
    wanted = (edge, min(edge + per, batch.real), edge + per)
    if local.window != wanted:
        found.append(f"window {tuple(local.window)} must be {wanted}")
    counts = {name: len(getattr(local, name)) for name in ("positions", "slots", "row_requests")}
    return found + [f"{count} {name} for {per} rows" for name, count in counts.items() if count != per]


def _length_problems(batch: GlobalBatch, local: LocalBatch) -> list[str]:
    num_requests = len(batch.query_lens)
    if len(local.query_lens) != num_requests or len(local.kv_lens) != num_requests:
        return [f"{len(local.query_lens)} query and {len(local.kv_lens)} key lengths for {num_requests} requests"]
    found = []
    for request, (n, key, kv) in enumerate(zip(local.query_lens, local.kv_lens, batch.kv_lens)):
        if n < 0 or key < 0:
            found.append(f"request {request}: negative length, query {n}, key {key}")
        elif (key == 0) != (n == 0 or kv == 0):
            found.append(f"request {request}: key length {key} with {n} query rows and {kv} keys in all")
    owned = tuple(request for request, n in enumerate(local.query_lens) for _ in range(n))
    if owned != tuple(request for request in local.row_requests if request != NO_REQUEST):
        found.append(f"rows belong to requests {local.row_requests}, query lengths are {local.query_lens}")
    return found


def _row_problems(batch: GlobalBatch, local: LocalBatch, visible: tuple[int, ...]) -> list[str]:
    start, real = local.window.start, local.real
    found = []
    requests = [request for request, query in enumerate(batch.query_lens) for _ in range(query)]
    requests += [NO_REQUEST] * (start + len(local.slots) - len(requests))
    for j, seen in enumerate(visible_keys(local)):
        row = start + j
        if seen != visible[row]:
            found.append(f"row {row} sees {seen} keys, not {visible[row]}")
        if local.positions[j] != visible[row] - 1:
            found.append(f"row {row} has position {local.positions[j]}, not {visible[row] - 1}")
        if local.slots[j] != batch.slots[row]:
            found.append(f"row {row} has slot {local.slots[j]}, not {batch.slots[row]}")
    for j, request in enumerate(local.row_requests):
        if request != requests[start + j]:
            found.append(f"row {start + j} belongs to request {request}, not {requests[start + j]}")
    if any(slot != NO_SLOT for slot in local.slots[real:]):
        found.append(f"pad rows have slots {local.slots[real:]}")
    if any(position != NO_POSITION for position in local.positions[real:]):
        found.append(f"pad rows have positions {local.positions[real:]}")
    return found


# The token cutters: rows of every rank, pads included. They count different things, and disagree on uneven counts.


def cut_dsa_cp(rows: int, *, parts: int) -> tuple[int, ...]:
    """DSA context parallelism: T of the own dp rank, rounded up to parts."""
    return (Tokens(rows, parts).per,) * parts


def cut_flashcomm1(real_per_dp: Sequence[int], *, parts: int) -> tuple[int, ...]:
    """FlashComm1 under data parallelism: the dp maximum, rounded up to parts; the same on every dp rank."""
    return (Tokens(max(real_per_dp), parts).per,) * parts


def cut_mc2(real_per_dp: Sequence[int], *, parts: int) -> tuple[int, ...]:
    """MC2 prepare: hidden states, router logits and mask, cut like FlashComm1 whatever attention did."""
    return cut_flashcomm1(real_per_dp, parts=parts)


def cut_all2all(real: int, *, parts: int) -> tuple[int, ...]:
    """All2All prepare: padded only up to parts, and only if fewer rows; else uneven, the first ranks one row more."""
    each, more = divmod(max(real, parts), parts)
    return tuple(each + (index < more) for index in range(parts))


def cut_sp_chunk(real: int, *, parts: int) -> tuple[int, ...]:
    """Upstream vLLM sequence_parallel_chunk: the own dp rank's tokens, rounded up to parts."""
    return (Tokens(real, parts).per,) * parts


def cut_ep(real_per_dp: Sequence[int], *, parts: int) -> tuple[int, ...]:
    """Upstream expert-parallel local sizes, [dp * parts]: each dp rank's chunk rows, once per tp rank."""
    return tuple(rows for real in real_per_dp for rows in cut_sp_chunk(real, parts=parts))


def mc2_mask(real_per_dp: Sequence[int], *, parts: int, dp_index: int) -> tuple[tuple[bool, ...], ...]:
    """Which rows of each tp rank's MC2 cut are real: parts x per; sums to the real rows of dp rank `dp_index`."""
    per = cut_mc2(real_per_dp, parts=parts)[0]
    return tuple(tuple(index * per + j < real_per_dp[dp_index] for j in range(per)) for index in range(parts))


def capture_sizes(sizes: Sequence[int], *, parts: int) -> list[int]:
    """Graph sizes that split over the ranks, ascending; the largest graph is the last of these."""
    return sorted(size for size in sizes if size % parts == 0)


def runner_rows(real_per_dp: Sequence[int], *, parts: int, graph_sizes: Sequence[int] = ()) -> int:
    """T of every dp rank when the runner pads to the dp maximum: rounded up to parts, then up to the smallest graph
    that holds it, if any does (else the step is eager)."""
    rows = Tokens(max(real_per_dp), parts).padded
    return next((size for size in capture_sizes(graph_sizes, parts=parts) if size >= rows), rows)
