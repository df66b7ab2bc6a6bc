"""Replay of hand-made traces, with rows and bytes as seconds, so that every time is worked out by hand."""

import re
from collections.abc import Sequence
from types import SimpleNamespace

import pytest

from emulator.cost.device import load_device
from emulator.cost.kernel import Cost, Kernel, Timeline
from emulator.cost.pricing import Pricer
from emulator.cost.replay import Options, replay, replay_with
from emulator.cost.work import Unpriceable
from emulator.errors import UsageError

from .records import all_reduce, counted, linear, op, tensor, trace

O_PROJ = "model.layers.0.self_attn.o_proj"


def run(ranks: Sequence[Sequence[dict]], options: Options = Options(), **more) -> Timeline:  # noqa: B008
    traces = [trace(rank, records, tp=len(ranks), **more) for rank, records in enumerate(ranks)]
    return replay_with(traces, Pricer(SimpleNamespace(name="stand-in"), None, counted), options)[0]


def times(timeline: Timeline) -> list[list[tuple]]:
    """(op, start, end, wait) of every slice, by rank."""
    return [[(s.record["op"], s.start, s.end, s.wait) for s in own] for own in timeline.slices]


def test_a_collective_starts_when_its_last_rank_arrives_and_the_others_wait():
    # [4, 8] in bf16 is 64 bytes: 64 s
    timeline = run([[linear(rows, 8, 8), all_reduce(4, 8), linear(2, 8, 8)] for rows in (3, 5)])
    assert times(timeline) == [
        [("linear", 0, 3, 0), ("all_reduce", 5, 69, 2), ("linear", 69, 71, 0)],
        [("linear", 0, 5, 0), ("all_reduce", 5, 69, 0), ("linear", 69, 71, 0)],
    ]
    assert timeline.seconds == 71
    assert timeline.meetings == (((0, 1), (1, 1)),)
    assert [s.stream for s in timeline.slices[0]] == ["compute", "comm", "compute"]
    assert [s.index for s in timeline.slices[0]] == [0, 1, 2]


def uneven(rank: int) -> dict:
    """Rank 0 sends 1 of its 3 rows, rank 1 sends 3 of its 4; rows of 5 values."""
    splits, received = ([2, 1], 5) if rank == 0 else ([3, 1], 2)
    given, made = tensor([sum(splits), 5], "token-rows"), tensor([received, 5], "expert-rows")
    attrs = {"leg": "expert-rows", "splits": splits}
    return op("all_to_all", [given], [made], group="tp", attrs=attrs, module="model.layers.0.mlp.experts")


def test_an_uneven_exchange_lasts_as_long_as_on_its_busiest_rank():
    timeline = run([[uneven(0)], [uneven(1)]])
    assert times(timeline) == [[("all_to_all", 0, 30, 0)], [("all_to_all", 0, 30, 0)]]
    sizes = [own[0].kernels[0][0].sizes for own in timeline.slices]
    assert [(s["bytes"], s["received"], s["ranks"]) for s in sizes] == [(10, 30, (0, 1)), (30, 10, (0, 1))]
    assert [own[0].kernels[0][1].seconds for own in timeline.slices] == [30, 30]  # what a slice is made of adds up


@pytest.mark.parametrize(
    ("record", "sizes"),
    [
        (op("all_gather", [tensor([2, 8], "local-token")], [tensor([4, 8])], group="tp", attrs={"dim": 0}), 32),
        (op("reduce_scatter", [tensor([4, 8], "partial")], [tensor([2, 8])], group="tp", attrs={"dim": 0}), 32),
        (all_reduce(4, 8), 64),
        (op("all_to_all", [tensor([2, 4, 3], "local-token")], [tensor([4, 2, 3], "shard(1)")], group="tp",
            attrs={"dim": 1, "concat_dim": 0}), 24),
    ],
)  # fmt: skip
def test_bytes_that_one_rank_puts_in(record, sizes):
    timeline = run([[record], [record]])
    assert timeline.slices[1][0].kernels[0][0].sizes["bytes"] == sizes


def test_what_is_no_device_work_is_left_out():
    ids = op("all_gather", [tensor([2], dtype="int64")], [tensor([4], dtype="int64")], group="tp", attrs={"dim": 0},
             traffic="verification")  # fmt: skip
    mask = op("slice", [tensor([4], dtype="bool")], [tensor([2], dtype="bool")], group="tp", traffic="metadata")
    edge = {"kind": "boundary", "module": "model.layers.0", "port": "input"}
    timeline = run([[ids, mask, edge, linear(3, 8, 8)]] * 2)
    assert times(timeline) == [[("linear", 0, 3, 0)]] * 2
    assert timeline.slices[0][0].index == 3  # the position in the step, not among what is priced


def gather(node: str = "gather", bytes_: int = 16, attrs: dict | None = None, **more) -> dict:
    """An all_gather of bytes_ bytes per rank."""
    given, made = tensor([bytes_ // 2, 1], "local-token"), tensor([bytes_, 1])
    return op("all_gather", [given], [made], group="tp", node=node, attrs={"dim": 0, **(attrs or {})}, **more)


def wait(node: str) -> dict:
    return op("wait", [tensor([4, 1])], [tensor([4, 1])], node=node, attrs={"of": "gather"})


def told(bytes_: int, first: int = 10, start: str = "gather", end: str | None = "w") -> list[dict]:
    """`first` s of compute, a gather of bytes_ s, 100 s of compute until it is waited for, 1 s of compute."""
    asynchronous = gather("gather", bytes_, attrs={"async": {"start": start, "wait": end}})
    return [linear(first, 8, 8), asynchronous, linear(100, 8, 8), wait("w"), linear(1, 8, 8)]


def test_a_collective_blocks_unless_it_may_overlap():
    timeline = run([told(16)] * 2)
    assert times(timeline)[0] == [
        ("linear", 0, 10, 0), ("all_gather", 10, 26, 0), ("linear", 26, 126, 0), ("linear", 126, 127, 0)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("records", "expected"),
    [
        (told(16), [("linear", 0, 10), ("all_gather", 10, 26), ("linear", 10, 110), ("linear", 110, 111)]),
        (told(200), [("linear", 0, 10), ("all_gather", 10, 210), ("linear", 10, 110), ("linear", 210, 211)]),
        # before the node `linear`, that is first of all; the next step waits for it
        (told(16, 10, "linear"), [("linear", 0, 10), ("all_gather", 0, 16), ("linear", 10, 110), ("linear", 110, 111)]),
        (told(200, 10, "gather", None), [("linear", 0, 10), ("all_gather", 10, 210), ("linear", 10, 110),
                                         ("linear", 110, 111)]),
    ],
)  # fmt: skip
def test_a_collective_that_the_graph_starts_ahead_runs_until_it_is_waited_for(records, expected):
    found = times(run([records] * 2, Options(overlap=True)))[0]
    assert sorted((begin, name, end) for name, begin, end, _ in found) == sorted((b, n, e) for n, b, e in expected)


def test_the_communication_stream_is_in_order():
    # the all_reduce stands ready at 10 s, but the gather is on the stream until 26 s: no wait for other ranks
    first, asynchronous, *rest = told(16)
    timeline = run([[first, asynchronous, all_reduce(1, 2), *rest]] * 2, Options(overlap=True))
    assert times(timeline)[0][:3] == [("linear", 0, 10, 0), ("all_gather", 10, 26, 0), ("all_reduce", 26, 30, 0)]


def test_a_late_rank_delays_what_comes_after_it_on_the_stream():
    # rank 1 issues the gather at 40 s; rank 0's all_reduce, ready at 10 s, starts when the gather is over
    ranks = []
    for compute in (10, 40):
        first, asynchronous, *rest = told(16, compute)
        ranks.append([first, asynchronous, all_reduce(1, 2), *rest])
    found = times(run(ranks, Options(overlap=True)))
    assert found[0][:3] == [("linear", 0, 10, 0), ("all_gather", 40, 56, 30), ("all_reduce", 56, 60, 0)]
    assert found[1][:3] == [("linear", 0, 40, 0), ("all_gather", 40, 56, 0), ("all_reduce", 56, 60, 0)]


def test_a_broadcast_moves_the_whole_weight_from_its_owner():
    def broadcast(rank: int) -> dict:
        given, made = tensor([6 if rank == 1 else 0, 5], "tp:owner(1)"), tensor([6, 5], "replicated")
        return op("broadcast", [given], [made], group="tp", attrs={"owner": 1}, module=O_PROJ)

    timeline = run([[broadcast(0)], [broadcast(1)]])
    assert [own[0].kernels[0][0].sizes["bytes"] for own in timeline.slices] == [60, 60]


def weight_gather(seconds: int = 16) -> dict:
    shape = [1, seconds // 2]
    return op("all_gather", [tensor(shape, "tp:shard(1)")], [tensor([1, seconds], "replicated")], group="tp",
              attrs={"dim": 1}, module=O_PROJ)  # fmt: skip


def output_projection() -> dict:
    return op("linear", [tensor([2, 16]), tensor([1, 16], "replicated")], [tensor([2, 1])], module=O_PROJ)


def test_a_quantised_weight_travels_in_8_bits():
    whole = run([[weight_gather(), output_projection()]] * 2)
    quantised = run([[weight_gather(), output_projection()]] * 2, Options(quant="w8a8"))
    assert [t.slices[0][0].kernels[0][0].sizes["bytes"] for t in (whole, quantised)] == [16, 8]


def test_a_run_with_quantised_weights_is_priced_in_them_unless_told_otherwise():
    traces = [trace(0, [linear(3, 8, 8)], tp=1)]
    traces[0][0]["quant"] = "w8a8_dynamic"
    found = {}
    for quant in (None, "none", "w8a8_dynamic"):
        pricer = Pricer(SimpleNamespace(name="stand-in"), None, counted)
        (timeline,) = replay_with(traces, pricer, Options(quant=quant))
        found[quant] = [kernel.name for kernel, _ in timeline.slices[0][0].kernels]
    assert found["none"] == ["MatMulV2"]
    assert found[None] == found["w8a8_dynamic"] == ["DynamicQuant", "QuantBatchMatmulV3"]


def test_groups_of_several_axes():
    records = [all_reduce(4, 8), op("all_to_all", [tensor([1, 4])], [tensor([4, 1])], group="ep",
                                    attrs={"dim": 1, "concat_dim": 0})]  # fmt: skip
    traces = []
    for rank in range(4):
        header, own = trace(rank, records, tp=2)
        traces.append(({**header, "mesh": {"dp": 2, "tp": 2, "ep": 4}}, own))
    (timeline,) = replay_with(traces, Pricer(SimpleNamespace(name="stand-in"), None, counted))
    assert sorted(timeline.meetings) == [
        ((0, 0), (1, 0)), ((0, 1), (1, 1), (2, 1), (3, 1)), ((2, 0), (3, 0))
    ]  # fmt: skip


def attention(layout: str, rows: int) -> dict:
    """GLM-5.1's sparse attention: 64 heads, latent 512 + rope 64, top-2048."""
    inputs = [
        tensor([rows, 64, 256], layout), tensor([8192, 576], "replicated"), tensor([64, 192, 512], "replicated"),
        tensor([64, 512, 256], "replicated"), tensor([rows, 2048], layout, "int32"),
        *[tensor([1], "replicated", "int64")] * 2, tensor([1, 512], "replicated", "int64"),
    ]  # fmt: skip
    module = "model.layers.0.self_attn.attn"
    return op("mla_sparse_attention", inputs, [tensor([rows, 64, 256], layout)], module=module)


def test_under_a_causal_split_the_last_rank_is_the_heaviest():
    traces = [trace(rank, [attention("local-token", 1024)], tp=4, requests=[(4096, 0)]) for rank in range(4)]
    (timeline,) = replay(traces, load_device("910C_752T"))
    kernels = [own[0].kernels[1] for own in timeline.slices]
    assert [k.sizes["keys"] for k, _ in kernels] == [(1024,), (2048,), (3072,), (4096,)]
    # row g of rank r sees r * 1024 + g + 1 keys, and uses 2048 of them at most
    entries = [sum(min(rank * 1024 + g + 1, 2048) for g in range(1024)) for rank in range(4)]
    assert [c.flops for _, c in kernels] == [2 * 64 * (576 + 512) * n for n in entries]
    seconds = [own[0].seconds for own in timeline.slices]
    assert seconds[0] < seconds[1] < seconds[2] == seconds[3]


@pytest.mark.parametrize(
    ("order", "queries", "keys"),
    [
        # 16 tokens with 5 before them on 2 ranks. zigzag: rank 1 of 2 has the blocks 1 and 2 of 4
        ("zigzag", (4, 4), (13, 17)),
        ("round_robin", (1,) * 8, (7, 9, 11, 13, 15, 17, 19, 21)),
        ("contiguous", (8,), (21,)),
    ],
)
def test_lengths_follow_the_order_in_which_tokens_are_dealt_out(order, queries, keys):
    layout = "local-token" if order == "contiguous" else f"local-token({order})"
    traces = [trace(rank, [attention(layout, 8)], requests=[(16, 5)]) for rank in range(2)]
    for _, (step, *_) in traces:
        step["order"] = order
    (timeline,) = replay(traces, load_device("910C_752T"))
    sizes = timeline.slices[1][0].kernels[1][0].sizes
    assert (sizes["queries"], sizes["keys"]) == (queries, keys)


def local_o_proj(rows: int) -> dict:
    return linear(rows, 16, 8, O_PROJ, "local-token")


@pytest.mark.parametrize(("split", "queries"), [(False, 9), (True, 3)])
def test_attention_under_context_parallelism_is_split_where_asked(split, queries):
    records = [attention("full-token", 9), local_o_proj(3)]
    traces = [trace(rank, records, tp=3, requests=[(9, 0)]) for rank in range(3)]
    (timeline,) = replay(traces, load_device("910C_752T"), options=Options(split_attention=split))
    sizes = [k.sizes for k, _ in timeline.slices[1][0].kernels]
    assert sizes[1]["queries"] == (queries,)
    assert [s["m"] for s in (sizes[0], sizes[2])] == [queries, queries]


def test_without_context_parallelism_nothing_is_split():
    records = [attention("full-token", 9), linear(9, 16, 8, O_PROJ, "shard(1)")]
    traces = [trace(rank, records, tp=3, requests=[(9, 0)]) for rank in range(3)]
    (timeline,) = replay(traces, load_device("910C_752T"), options=Options(split_attention=True))
    assert timeline.slices[1][0].kernels[1][0].sizes["queries"] == (9,)


def fails(ranks: Sequence[Sequence[dict]], options: Options = Options(), **more) -> str:  # noqa: B008
    with pytest.raises(UsageError) as caught:
        run(ranks, options, **more)
    return str(caught.value)


def test_different_calls_name_both_ranks():
    other = op("reduce_scatter", [tensor([4, 8], "partial")], [tensor([2, 8])], group="tp", attrs={"dim": 0})
    assert fails([[linear(3, 8, 8), all_reduce(4, 8)], [linear(3, 8, 8), other]]) == (
        "rank 1, record 2: reduce_scatter of model.layers.0.x: rank 0 calls all_reduce of "
        "model.layers.0.self_attn.o_proj on [4, 8] here (record 2)"
    )


def test_a_missing_call_names_who_waits_and_who_does_not_come():
    assert fails([[all_reduce(4, 8)], [linear(3, 8, 8)]]) == (
        "rank 0, record 1: all_reduce of model.layers.0.self_attn.o_proj: rank 1 makes no call 1 on its tp group in "
        "this step"
    )


def test_shapes_of_other_ranks_are_compared():
    assert "rank 0 calls all_reduce of model.layers.0.self_attn.o_proj on [4, 8] here" in fails(
        [[all_reduce(4, 8)], [all_reduce(5, 8)]]
    )


def test_rows_that_others_send_are_compared():
    wrong = uneven(1)
    wrong["outputs"][0]["shape"] = [4, 5]
    assert fails([[uneven(0)], [wrong]]) == (
        "rank 1, record 1: all_to_all of model.layers.0.mlp.experts: 4 rows come out, but the ranks of its group send 2"
    )


def test_ranks_that_wait_for_each_other():
    exchange = op("all_to_all", [tensor([1, 4])], [tensor([2, 2])], group="ep", attrs={"dim": 1, "concat_dim": 0})
    traces = []
    for rank, records in enumerate(([all_reduce(4, 8), exchange], [exchange, all_reduce(4, 8)])):
        header, own = trace(rank, records, tp=2)
        traces.append(({**header, "mesh": {"dp": 1, "tp": 2, "ep": 2}}, own))
    with pytest.raises(UsageError, match=r"rank 0, record 1: all_reduce of .*: ranks wait for each other in a circle"):
        replay_with(traces, Pricer(SimpleNamespace(name="stand-in"), None, counted))


BROKEN = [
    ("all_gather", [2, 8], [3, 8], {"dim": 0}, "output [3, 8] of an input [2, 8] on 2 ranks, expected [4, 8]"),
    ("reduce_scatter", [3, 8], [2, 8], {"dim": 0}, "dim 0 of [3, 8] does not divide by the 2 ranks of its group"),
    ("reduce_scatter", [4, 8], [4, 8], {"dim": 0}, "output [4, 8] of an input [4, 8] on 2 ranks, expected [2, 8]"),
    ("all_reduce", [4, 8], [4, 9], {}, "expected [4, 8]"),
    ("all_to_all", [4, 8], [5, 8], {"splits": [1, 2]}, "splits [1, 2] for 4 rows and 2 ranks"),
    ("all_to_all", [4, 8], [2, 8], {"dim": 0, "concat_dim": 1}, "expected [2, 16]"),
    ("slice", [4, 8], [3, 8], {"dim": 0}, "expected [2, 8]"),
    ("all_gather", [2, 8], [4, 8], {"dim": 2}, "dim 2 of a shape [2, 8]"),
]


@pytest.mark.parametrize(("name", "given", "made", "attrs", "says"), BROKEN)
def test_a_collective_whose_shapes_contradict_it(name, given, made, attrs, says):
    record = op(name, [tensor(given)], [tensor(made)], group="tp", attrs=attrs)
    told = fails([[record]] * 2)
    assert told.startswith(f"rank 0, record 1: {name} of model.layers.0.x: ")
    assert says in told


def test_padding_that_shrinks():
    record = op("pad", [tensor([4, 8])], [tensor([3, 8])], attrs={"dim": 0, "length": 3})
    assert "pad of [4, 8] to 3 rows" in fails([[record]] * 2)


def test_a_window_that_is_not_the_ranks():
    record = {**linear(2, 8, 8, layout="local-token"), "window": [2, 4]}
    assert "rank 0, record 1" in fails([[record]] * 2)
    assert "window [2, 4], but the step's requests give [0, 2]" in fails([[record]] * 2)


@pytest.mark.parametrize(
    ("record", "says"),
    [
        (op("fast_add", [], []), "rank 0, record 2: fast_add of model.layers.0.x: kernel table ascend has no op"),
        ({k: v for k, v in linear(2, 8, 8).items() if k != "attrs"}, "malformed record: KeyError 'attrs'"),
        (op("all_reduce", [tensor([4])], [tensor([4])], group="pp"), "the mesh has no axis 'pp'"),
        (told(16, start="zz")[1], "async start names node 'zz', which no record has"),
    ],
)
def test_the_place_of_a_broken_record(record, says):
    assert says in fails([[linear(3, 8, 8), record]] * 2, Options(overlap=True))


def test_a_wait_before_the_start():
    first, asynchronous, second, waits, last = told(16)
    records = [first, waits, asynchronous, second, last]
    assert "record 3: all_gather of model.layers.0.x: async: waited for at w, before it starts at gather" in fails(
        [records] * 2, Options(overlap=True)
    )


def test_an_op_that_cannot_be_priced():
    def nothing(kernel: Kernel, device: object) -> Cost:
        raise Unpriceable(kernel, "no coefficients")

    traces = [trace(rank, [linear(3, 8, 8)]) for rank in range(2)]
    says = "rank 0, record 1: linear of model.layers.0.self_attn.q_b_proj: MatMulV2 (bfloat16): no coefficients"
    with pytest.raises(UsageError, match=re.escape(says)):
        replay_with(traces, Pricer(SimpleNamespace(name="stand-in"), None, nothing))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda t: t[:1], "traces of ranks [0], but the mesh has 2 ranks"),
        (lambda t: [t[1], t[0]], "traces of ranks [1, 0], but the mesh has 2 ranks"),
        (lambda t: [t[0], ({**t[1][0], "scenario": "another"}, t[1][1])], "different runs: scenario differs"),
        (lambda t: [t[0], (t[1][0], t[1][1][1:])], "ranks ran different numbers of steps: [1, 0]"),
        (lambda t: [(header, records[1:]) for header, records in t], "the traces hold no step"),
        (lambda t: [], "no traces"),
    ],
)
def test_traces_of_one_run_and_all_its_ranks(change, says):
    traces = [trace(rank, [linear(3, 8, 8)]) for rank in range(2)]
    with pytest.raises(UsageError, match=re.escape(says)):
        replay(change(traces), load_device("910C_752T"))


def test_an_unknown_step():
    with pytest.raises(UsageError, match="step 7: the trace has 0"):
        replay([trace(r, [linear(3, 8, 8)]) for r in range(2)], load_device("910C_752T"), options=Options(step=7))
