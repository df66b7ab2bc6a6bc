"""Windows of ranks: the worked examples of the engine's rules, a brute-force oracle on random batches, and what the
invariants catch. query / key are per-request lengths; the engine's query entries are running sums."""

import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from emulator.errors import UsageError
from emulator.layout import windows
from emulator.layout.windows import GlobalBatch, LocalBatch, check_invariants, local_batch, local_batches, visible_keys
from emulator.model.batch import Request
from emulator.ops.indexer_kernel import topk_ids


def batch_of(q: list[int], kv: list[int], rows: int | None = None, graph_pads: tuple[int, ...] = ()) -> GlobalBatch:
    real = sum(q)
    requests = tuple(Request(n, length - n) for n, length in zip(q, kv))
    return GlobalBatch(requests, tuple(range(real)), real if rows is None else rows, graph_pads)


def tail(values: list[int], length: int) -> list[int]:
    return [0] * (length - len(values)) + values


# Per rank: (query entries, key entries, window or None)
WORKED = {
    "one request of 9": (
        batch_of([9], [9]),
        [([3], [3], (0, 3, 3)), ([3], [6], (3, 6, 6)), ([3], [9], (6, 9, 9)), ([0], [0], (9, 9, 12))],
    ),
    "two requests, tp 2": (
        batch_of([3, 2], [3, 2]),
        [([3, 3], [3, 0], (0, 3, 3)), ([0, 2], [0, 2], (3, 5, 6))],
    ),
    "ragged with context": (
        batch_of([5, 3, 1], [5, 13, 101]),
        [
            ([3, 3, 3], [3, 0, 0], None),
            ([2, 3, 3], [5, 11, 0], None),
            ([0, 2, 3], [0, 13, 101], None),
            ([0, 0, 0], [0, 0, 0], None),
        ],
    ),
    "nine decodes": (
        batch_of([1] * 9, list(range(10, 19))),
        [
            ([1, 2, 3, 3, 3, 3, 3, 3, 3], [10, 11, 12, 0, 0, 0, 0, 0, 0], None),
            ([0, 0, 0, 1, 2, 3, 3, 3, 3], [0, 0, 0, 13, 14, 15, 0, 0, 0], None),
            (tail([1, 2, 3], 9), tail([16, 17, 18], 9), None),
            ([0] * 9, [0] * 9, (9, 9, 12)),
        ],
    ),
    "six requests with one draft": (
        batch_of([2] * 6, [20] * 6),
        [
            ([2, 3, 3, 3, 3, 3], [20, 19, 0, 0, 0, 0], None),
            ([0, 1, 3, 3, 3, 3], [0, 20, 20, 0, 0, 0], None),
            ([0, 0, 0, 2, 3, 3], [0, 0, 0, 20, 19, 0], None),
            ([0, 0, 0, 0, 1, 3], [0, 0, 0, 0, 20, 20], None),
        ],
    ),
    "context 1024": (
        batch_of([6, 7], [1030, 7]),
        [
            ([4, 4], [1028, 0], None),
            ([2, 4], [1030, 2], None),
            ([0, 4], [0, 6], None),
            ([0, 1], [0, 7], (12, 13, 16)),
        ],
    ),
    "three tokens": (
        batch_of([3], [3]),
        [([1], [1], None), ([1], [2], None), ([1], [3], None), ([0], [0], (3, 3, 4))],
    ),
    "dp peer has 14": (
        batch_of([6], [6], rows=16),
        [([4], [4], (0, 4, 4)), ([2], [6], (4, 6, 8)), ([0], [0], (8, 6, 12)), ([0], [0], (12, 6, 16))],
    ),
    # cases.toml
    "one-token last chunk of 2049": (
        batch_of([1], [2049]),
        [([1], [2049], None), ([0], [0], None), ([0], [0], None), ([0], [0], None)],
    ),
    "empty query ranks": (
        batch_of([3], [3]),
        [([1], [1], None), ([1], [2], None), ([1], [3], None), *[([0], [0], (r, 3, r + 1)) for r in range(3, 8)]],
    ),
    "one token, tp 4": (
        batch_of([1], [1]),
        [([1], [1], (0, 1, 1)), ([0], [0], (1, 1, 2)), ([0], [0], (2, 1, 3)), ([0], [0], (3, 1, 4))],
    ),
    "one token, tp 2": (batch_of([1], [1]), [([1], [1], (0, 1, 1)), ([0], [0], (1, 1, 2))]),
    "dp ranks 3 and 8 padded to 8": (batch_of([3], [3], rows=8), [([3], [3], (0, 3, 4)), ([0], [0], (4, 3, 8))]),
}


@pytest.mark.parametrize("name", WORKED)
def test_worked_example(name: str) -> None:
    batch, ranks = WORKED[name]
    for index, (query, key, window) in enumerate(ranks):
        local = local_batch(batch, parts=len(ranks), index=index)
        assert list(local.query_ends) == query, index
        assert list(local.kv_lens) == key, index
        assert window is None or local.window == window
    assert check_invariants(batch, local_batches(batch, parts=len(ranks))) == []


def test_rows_of_worked_examples() -> None:
    first, second = local_batches(batch_of([3, 2], [3, 2]), parts=2)
    assert (first.slots, first.positions, first.row_requests) == ((0, 1, 2), (0, 1, 2), (0, 0, 0))
    assert (second.slots, second.positions, second.row_requests) == ((3, 4, -1), (0, 1, -1), (1, 1, -1))
    assert (first.real, second.real) == (3, 2)

    ranks = local_batches(batch_of([5, 3, 1], [5, 13, 101]), parts=4)
    assert [r.positions for r in ranks] == [(0, 1, 2), (3, 4, 10), (11, 12, 100), (-1, -1, -1)]
    assert [r.row_requests for r in ranks] == [(0, 0, 0), (0, 0, 1), (1, 1, 2), (-1, -1, -1)]
    assert [visible_keys(r) for r in ranks] == [(1, 2, 3), (4, 5, 11), (12, 13, 101), ()]
    assert visible_keys(batch_of([5, 3, 1], [5, 13, 101])) == (1, 2, 3, 4, 5, 11, 12, 13, 101)

    peer = local_batches(batch_of([6], [6], rows=16), parts=4)  # rank 2's window ends before it starts
    assert [r.real for r in peer] == [4, 2, 0, 0]
    assert [r.slots for r in peer] == [(0, 1, 2, 3), (4, 5, -1, -1), (-1,) * 4, (-1,) * 4]


def test_positions_are_cut_like_queries() -> None:
    ranks = local_batches(batch_of([12], [12]), parts=4)
    assert [list(r.positions) for r in ranks] == [list(range(12))[3 * r : 3 * r + 3] for r in range(4)]


def test_key_length_of_graph_pad_requests() -> None:
    # 20 slots of 4 tokens, 9 of them real: requests 12 and 17 are cut by a rank boundary
    batch = batch_of([4] * 9, [128] * 9, rows=80, graph_pads=(4,) * 11)
    ranks = local_batches(batch, parts=8)
    assert batch.real == 36
    assert [r.window for r in ranks][3:5] == [(30, 36, 40), (40, 36, 50)]
    assert (ranks[4].query_lens[12], ranks[4].kv_lens[12]) == (2, 0)
    assert (ranks[5].query_lens[12], ranks[5].kv_lens[12]) == (2, 0)
    assert (ranks[6].query_lens[17], ranks[6].kv_lens[17]) == (2, 0)
    assert all(key >= 0 for r in ranks for key in r.kv_lens)
    assert [r.query_ends[-1] for r in ranks] == [10] * 8  # the graph's rows all belong to requests
    assert ranks[3].kv_lens == (0,) * 7 + (128, 128) + (0,) * 11
    assert ranks[3].positions == (126, 127, 124, 125, 126, 127, -1, -1, -1, -1)
    assert ranks[3].row_requests == (7, 7, 8, 8, 8, 8, 9, 9, 9, 9)
    assert check_invariants(batch, ranks) == []
    for rank, request in (4, 12), (6, 17):
        keys = list(ranks[rank].kv_lens)
        keys[request] = -2
        broken = [*ranks[:rank], replace(ranks[rank], kv_lens=tuple(keys)), *ranks[rank + 1 :]]
        assert check_invariants(batch, broken) == [f"rank {rank}: request {request}: negative length, query 2, key -2"]


def test_eager_padding_belongs_to_no_request() -> None:
    last = local_batch(batch_of([6, 7], [1030, 7]), parts=4, index=3)
    assert last.query_ends[-1] == 1
    assert last.row_requests == (1, -1, -1, -1)


def test_draft_steps_have_their_own_lengths() -> None:
    steps = [local_batches(batch_of([1, 1], [20 + s, 30 + s]), parts=2) for s in (1, 2, 3)]  # all built, then read
    assert [ranks[0].kv_lens for ranks in steps] == [(21, 0), (22, 0), (23, 0)]
    assert [ranks[1].kv_lens for ranks in steps] == [(0, 31), (0, 32), (0, 33)]


def test_dummy_step_has_no_slots() -> None:
    batch = GlobalBatch((), (), rows=4)
    ranks = local_batches(batch, parts=2)
    assert [r.slots for r in ranks] == [(-1, -1), (-1, -1)]
    assert [r.query_ends for r in ranks] == [(), ()]
    assert check_invariants(batch, ranks) == []


def test_padding_adds_no_request() -> None:
    q = [1] * 63 + [2]
    rows = windows.runner_rows([65], parts=4)
    assert rows == 68
    for local in local_batches(batch_of(q, [9] * 64, rows=rows), parts=4):
        assert len(local.query_lens) == len(local.kv_lens) == 64
    # with a dummy request for the pad rows, every per-request array grows by it
    q = [1] * 19 + [2]
    rows = windows.runner_rows([21], parts=4)
    assert rows == 24
    for local in local_batches(batch_of(q, [9] * 20, rows=rows, graph_pads=(3,)), parts=4):
        assert len(local.query_lens) == len(local.kv_lens) == 21


def test_short_rows_find_fewer_keys_than_topk() -> None:
    batch = batch_of([5], [5])
    ranks = local_batches(batch, parts=4)
    assert [visible_keys(r) for r in ranks] == [(1, 2), (3, 4), (5,), ()]
    generator = torch.Generator().manual_seed(0)
    query, weights, cache = (torch.randn(*shape, generator=generator) for shape in ((8, 2, 4), (8, 2), (16, 4)))
    valid = []
    for local in ranks:
        rows = slice(local.window.start, local.window.end_with_pad)
        lens = torch.tensor(local.query_lens), torch.tensor(local.kv_lens)
        ids = topk_ids(query[rows], weights[rows], cache, *lens, torch.tensor([[0]]), block_size=16, topk=8)
        valid.append((ids >= 0).sum(1).tolist())
        assert all(sorted(ids[j][ids[j] >= 0].tolist()) == list(range(n)) for j, n in enumerate(valid[-1]))
    assert valid == [[1, 2], [3, 4], [5, 0], [0, 0]]


# ---------------------------------------------------------------- token cutters


def test_cutters_disagree_on_nine_tokens() -> None:
    assert windows.cut_dsa_cp(9, parts=4) == (3, 3, 3, 3)
    assert windows.cut_flashcomm1([9, 9], parts=4) == (3, 3, 3, 3)
    assert windows.cut_mc2([9, 9], parts=4) == (3, 3, 3, 3)
    assert windows.cut_all2all(9, parts=4) == (3, 2, 2, 2)
    assert windows.cut_sp_chunk(9, parts=4) == (3, 3, 3, 3)
    assert windows.cut_ep([9, 9], parts=4) == (3,) * 8
    assert windows.cut_mc2([9] * 8, parts=4) == (3, 3, 3, 3)  # decode dp 8, tp 4


@pytest.mark.parametrize(
    ("tokens", "rows"), [(3, (1, 1, 1, 1)), (0, (1, 1, 1, 1)), (4, (1, 1, 1, 1)), (7, (2, 2, 2, 1)), (13, (4, 3, 3, 3))]
)
def test_all2all_pads_only_up_to_tp(tokens: int, rows: tuple[int, ...]) -> None:
    assert windows.cut_all2all(tokens, parts=4) == rows
    split = torch.arange(max(tokens, 4)).tensor_split(4)
    assert tuple(len(part) for part in split) == rows


def test_cutters_take_different_counts() -> None:
    # eager dp 2 with 14 and 6 tokens: attention of dp rank 1 has 2 rows a rank, MC2 has 4, as of dp rank 0
    assert windows.cut_dsa_cp(6, parts=4) == (2, 2, 2, 2)
    assert windows.cut_sp_chunk(6, parts=4) == (2, 2, 2, 2)
    assert windows.cut_mc2([14, 6], parts=4) == (4, 4, 4, 4)
    assert windows.cut_flashcomm1([14, 6], parts=4) == (4, 4, 4, 4)
    assert windows.cut_flashcomm1([3, 8], parts=2) == (4, 4)  # 5 pad rows on dp rank 0, more than tp
    assert windows.cut_ep([1, 5], parts=2) == (1, 1, 3, 3)
    assert windows.cut_dsa_cp(4096, parts=16) == (256,) * 16


def mask_words(*args: list[int], **kwargs: int) -> str:
    return " ".join("".join("FT"[real] for real in rank) for rank in windows.mc2_mask(*args, **kwargs))


def test_mc2_mask() -> None:
    assert mask_words([9], parts=4, dp_index=0) == "TTT TTT TTT FFF"
    assert mask_words([7, 9], parts=4, dp_index=0) == "TTT TTT TFF FFF"
    assert mask_words([7, 9], parts=4, dp_index=1) == "TTT TTT TTT FFF"
    assert mask_words([4, 0], parts=4, dp_index=1) == "F F F F"
    mask = windows.mc2_mask([9], parts=4, dp_index=0)
    assert tuple(len(rank) for rank in mask) == windows.cut_mc2([9], parts=4)
    assert sum(sum(rank) for rank in mask) == 9


def test_capture_sizes_are_multiples_of_tp() -> None:
    assert windows.capture_sizes([16, 32, 48, 64, 80, 88, 90], parts=16) == [16, 32, 48, 64, 80]
    assert windows.capture_sizes([90, 64, 16], parts=16)[-1] == 64


def test_rows_agreed_over_dp() -> None:
    assert windows.runner_rows([5, 9], parts=2, graph_sizes=[16]) == 16  # not (16 - 5) + 9 = 20 on dp rank 0
    assert windows.runner_rows([13, 0], parts=1, graph_sizes=[2, 16]) == 16  # not the idle rank's 2
    assert windows.runner_rows([3, 8], parts=2) == 8
    assert windows.runner_rows([14, 6], parts=4) == 16
    assert windows.runner_rows([9, 2], parts=4, graph_sizes=[10, 16, 32]) == 16  # 10 is not captured
    assert windows.runner_rows([9, 2], parts=4, graph_sizes=[8, 12, 16]) == 12
    assert windows.runner_rows([33, 2], parts=4, graph_sizes=[8, 16]) == 36  # too large for a graph: eager


# ---------------------------------------------------------------- invariants catch

# Windows of 4 rows: request 0 is cut at row 4, the graph-pad request (rows 9 to 13) at row 12, rows 14 and 15 are free.
BATCH = batch_of([5, 3, 1], [5, 13, 101], rows=16, graph_pads=(5,))
WRONG = {
    "keys of later rows": (0, {"kv_lens": (5, 0, 0, 0)}, "row 0 sees 2 keys, not 1"),
    "key of a request without rows": (0, {"kv_lens": (4, 10, 0, 0)}, "request 1: key length 10 with 0 query rows"),
    "no key for rows": (1, {"kv_lens": (5, 0, 0, 0)}, "request 1: key length 0 with 3 query rows"),
    "key of a graph-pad request": (2, {"kv_lens": (0, 0, 101, 3)}, "request 3: key length 3 with 3 query rows"),
    "negative query": (0, {"query_lens": (5, -1, 0, 0)}, "request 1: negative length, query -1"),
    "row given to the next request": (1, {"query_lens": (2, 2, 0, 0)}, "query lengths are (2, 2, 0, 0)"),
    "fewer request entries": (1, {"query_lens": (1, 3, 0)}, "3 query and 4 key lengths for 4 requests"),
    "fewer key entries": (1, {"kv_lens": (5, 12, 0)}, "4 query and 3 key lengths for 4 requests"),
    "real row of no request": (
        1,
        {"query_lens": (1, 2, 0, 0), "row_requests": (0, 1, 1, -1)},
        "row 7 belongs to request -1, not 1",
    ),
    "window moved": (1, {"window": windows.Window(3, 7, 7)}, "window (3, 7, 7) must be (4, 8, 8)"),
    "real end with pads": (2, {"window": windows.Window(8, 12, 12)}, "window (8, 12, 12) must be (8, 9, 12)"),
    "pad row with a slot": (2, {"slots": (8, 0, -1, -1)}, "pad rows have slots (0, -1, -1)"),
    "real row without its slot": (1, {"slots": (4, 5, -1, 7)}, "row 6 has slot -1, not 6"),
    "position of another rank": (1, {"positions": (0, 10, 11, 12)}, "row 4 has position 0, not 4"),
    "pad row with a position": (3, {"positions": (-1, -1, 0, -1)}, "pad rows have positions (-1, -1, 0, -1)"),
    "three rows for four": (1, {"slots": (4, 5, 6)}, "3 slots for 4 rows"),
    "pad row of a real request": (3, {"row_requests": (3, 3, 2, -1)}, "rows belong to requests (3, 3, 2, -1)"),
    "graph-pad row behind a free one": (
        3,
        {"row_requests": (3, -1, 3, -1)},
        "row 13 belongs to request -1, not 3",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_part_is_named(name: str) -> None:
    index, change, message = WRONG[name]
    ranks = local_batches(BATCH, parts=4)
    assert check_invariants(BATCH, ranks) == []
    ranks[index] = replace(ranks[index], **change)
    found = check_invariants(BATCH, ranks)
    assert any(line.startswith(f"rank {index}: ") and message in line for line in found), found


def test_rows_that_no_rank_or_two_ranks_own() -> None:
    ranks = local_batches(BATCH, parts=4)
    found = check_invariants(BATCH, [ranks[0], ranks[1], ranks[1], ranks[3]])
    assert [line for line in found if line.startswith("row")] == [
        *(f"row {row} belongs to 2 ranks" for row in (4, 5, 6, 7)),
        "row 8 belongs to 0 ranks",
    ]
    assert [line for line in found if line.startswith("request")] == [
        "request 0: ranks hold 6 of 5 query rows",
        "request 1: ranks hold 6 of 3 query rows",
        "request 2: ranks hold 0 of 1 query rows",
        "request 3: ranks hold 2 of 5 query rows",
    ]
    short = replace(ranks[3], window=windows.Window(12, 9, 15))
    assert "windows end at 15, not at 16" in check_invariants(BATCH, [*ranks[:3], short])


def test_shared_slots_are_found() -> None:
    batch = replace(BATCH, slots=(0, 1, 2, 3, 4, 5, 6, 7, 7))
    assert check_invariants(batch, local_batches(batch, parts=4)) == ["slots of real rows are not distinct and >= 0"]
    batch = replace(BATCH, slots=(0, 1, 2, 3, 4, 5, 6, 7, -1))
    assert "slots of real rows are not distinct and >= 0" in check_invariants(batch, local_batches(batch, parts=4))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: batch_of([3], [2]), "request 0: query 3, context -1: must be >= 0"),
        (lambda: batch_of([5], [5], rows=4), "5 real rows and no graph-pad request do not fit in 4 rows"),
        (
            lambda: batch_of([5], [5], rows=8, graph_pads=(2, 2)),
            r"5 real rows and graph-pad requests of \[2, 2\] do not fit in 8 rows",
        ),
        (
            lambda: batch_of([5], [5], rows=8, graph_pads=(2, -1)),
            r"5 real rows and graph-pad requests of \[2, -1\] do not fit in 8 rows",
        ),
        (lambda: GlobalBatch((Request(3),), (0, 1), rows=4), "2 slots for 3 real rows: must be equal"),
    ],
)
def test_batches_that_cannot_be(make, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make()


# ---------------------------------------------------------------- random batches against brute force


def random_batch(rng: random.Random) -> tuple[GlobalBatch, int]:
    parts = rng.randint(2, 16)
    style = rng.choice(["decode", "drafts", "prefill", "mixed", "idle"])
    top = {"decode": 1, "drafts": 4, "prefill": 40, "mixed": rng.choice([1, 30]), "idle": 0}[style]
    requests = []
    for _ in range(rng.randint(1, 9 if style in ("decode", "drafts") else 4)):
        query = rng.randint(min(top, rng.randint(0, 1)), top) if style != "mixed" else rng.choice([1, 2, top])
        requests.append(Request(query, rng.choice([0, rng.randint(0, 3000)])))
    real = sum(r.query for r in requests)
    padding = rng.choice(["none", "runner", "dp"])
    rows = {"none": real, "runner": real + rng.randint(0, 40), "dp": max(real, rng.randint(0, 60))}[padding]
    graph_pads, room = [], rows - real
    while room and rng.random() < 0.7:
        graph_pads.append(rng.randint(0, min(room, 9)))
        room -= graph_pads[-1]
    return GlobalBatch(tuple(requests), tuple(rng.sample(range(100_000), real)), rows, tuple(graph_pads)), parts


def brute_force(batch: GlobalBatch, parts: int) -> list[dict]:
    """Deals the rows out one by one. A row is (request, the keys it sees, slot); a rank needs the union of the keys
    that its rows of a request see. No interval arithmetic."""
    rows: list[tuple[int, range, int]] = []
    for i, request in enumerate(batch.requests):
        for token in range(request.query):
            rows.append((i, range(request.context + token + 1), batch.slots[len(rows)]))
    real = len(rows)
    for i, count in enumerate(batch.graph_pads, len(batch.requests)):
        rows += [(i, range(0), -1)] * count
    per = next(n for n in range(batch.rows + 1) if n * parts >= batch.rows)
    rows += [(-1, range(0), -1)] * (per * parts - len(rows))
    num_requests = len(batch.requests) + len(batch.graph_pads)
    dealt = []
    for rank in range(parts):
        own = [rows.pop(0) for _ in range(per)]
        query, keys = [0] * num_requests, [0] * num_requests
        for request, seen, _ in own:
            if request >= 0:
                query[request] += 1
                keys[request] = max(keys[request], len(seen))  # prefixes: the longest is the union
        dealt.append(
            {
                "query_ends": tuple(np.cumsum(query, dtype=int).tolist()),
                "kv_lens": tuple(keys),
                "positions": tuple(len(seen) - 1 for _, seen, _ in own),
                "slots": tuple(slot for _, _, slot in own),
                "row_requests": tuple(request for request, _, _ in own),
                "real": max(0, min(per, real - per * rank)),
                "window": (per * rank, min(real, per * rank + per), per * rank + per),
            }
        )
    return dealt


def assert_masks_match(batch: GlobalBatch, ranks: list[LocalBatch]) -> None:
    """Right-aligned causal masks over the ranks' lengths, stacked, are the one over the global lengths."""
    for i, request in enumerate(batch.requests):
        length = request.context + request.query
        wanted = np.tri(request.query, length, request.context, dtype=bool)
        stacked = np.zeros_like(wanted)
        row = 0
        for local in ranks:
            n, keys = local.query_lens[i], local.kv_lens[i]
            stacked[row : row + n, :keys] = np.tri(n, keys, keys - n, dtype=bool)
            row += n
        assert row == request.query
        assert np.array_equal(stacked, wanted)


def test_random_batches_match_brute_force() -> None:
    rng = random.Random(20260822)
    checked = {"rows": 0, "fewer rows than ranks": 0, "pad-only rank": 0, "cut graph pad": 0, "no real row": 0}
    for number in range(20_000):
        batch, parts = random_batch(rng)
        ranks = local_batches(batch, parts=parts)
        for local, dealt in zip(ranks, brute_force(batch, parts), strict=True):
            assert {name: getattr(local, name) for name in dealt} == dealt, (batch, parts)
            assert visible_keys(local) == tuple(n + 1 for n in dealt["positions"][: dealt["real"]])
        assert check_invariants(batch, ranks) == []
        if number % 20 == 0:
            assert_masks_match(batch, ranks)
        pads = len(batch.graph_pads)
        checked["rows"] += batch.real
        checked["fewer rows than ranks"] += batch.real < parts
        checked["pad-only rank"] += any(r.window.end < r.window.start for r in ranks)
        checked["cut graph pad"] += any(
            0 < n < total for r in ranks for n, total in zip(r.query_lens[-pads:] if pads else (), batch.graph_pads)
        )
        checked["no real row"] += batch.real == 0
    assert checked["rows"] > 300_000
    assert min(checked.values()) > 1_000, checked
