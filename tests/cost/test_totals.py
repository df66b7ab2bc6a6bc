"""Sums over timelines: what is conserved, and what is counted where."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest

from emulator.cost.device import load_device
from emulator.cost.kernel import Timeline
from emulator.cost.pricing import Pricer
from emulator.cost.replay import Options, replay, replay_with
from emulator.cost.totals import (
    by_bound,
    by_kernel,
    by_layer,
    by_module,
    by_op,
    by_source,
    compare_flops,
    not_priced,
    rank_times,
    skew,
)
from emulator.trace.record import steps_of

from .records import all_reduce, counted, linear, op, tensor, trace


def run(ranks: list[list[dict]], options: Options = Options()) -> Timeline:  # noqa: B008
    traces = [trace(rank, records, tp=len(ranks)) for rank, records in enumerate(ranks)]
    return replay_with(traces, Pricer(SimpleNamespace(name="stand-in"), None, counted), options)[0]


@pytest.fixture
def uneven() -> Timeline:
    """Rank 0 computes 3, waits 2, sends 64, computes 2 and is idle for 5; rank 1 computes 5, sends 64, computes 7."""
    ranks = []
    for first, last in ((3, 2), (5, 7)):
        o_proj = linear(last, 8, 8, "model.layers.1.self_attn.o_proj")
        ranks.append([linear(first, 8, 8), all_reduce(4, 8), {**o_proj, "layer": 1}])
    return run(ranks)


def test_where_the_time_of_a_rank_goes(uneven):
    first, second = rank_times(uneven)
    assert (first.compute, first.comm, first.overlapped, first.wait, first.idle) == (5, 64, 0, 2, 5)
    assert (second.compute, second.comm, second.overlapped, second.wait, second.idle) == (12, 64, 0, 0, 0)
    assert skew(uneven) == {
        "lightest_rank": 0, "lightest": 5, "heaviest_rank": 1, "heaviest": 12, "max_over_min": 12 / 5
    }  # fmt: skip


def test_sums_by_op_module_and_layer(uneven):
    ops = {g.key: g for g in by_op(uneven)}
    assert [g.key for g in by_op(uneven)] == ["all_reduce", "linear"]  # longest first
    assert (ops["linear"].seconds, ops["linear"].calls, ops["linear"].slowest, ops["linear"].mean) == (17, 4, 12, 8.5)
    assert (ops["all_reduce"].seconds, ops["all_reduce"].wait, ops["all_reduce"].stream) == (128, 2, "comm")
    assert ops["linear"].flops == 2 * 17
    modules = {(g.key, g.stream): g.seconds for g in by_module(uneven)}
    assert modules == {
        ("model.layers.*.self_attn.q_b_proj", "compute"): 8, ("model.layers.*.self_attn.o_proj", "compute"): 9,
        ("model.layers.*.self_attn.o_proj", "comm"): 128,
    }  # fmt: skip
    assert [(g.key, g.stream, g.seconds) for g in by_layer(uneven)] == [
        (0, "comm", 128), (0, "compute", 8), (1, "compute", 9)
    ]  # fmt: skip
    assert by_bound(uneven) == {"memory": 17, "communication": 128}
    assert by_source(uneven) == {"analytic": 145}
    assert by_kernel(uneven) == {"hcom_allReduce_": 128, "MatMulV2": 17}


def test_overlapped_time_is_counted_once():
    def rank(first: int, beside: int = 10) -> list[dict]:
        attrs = {"dim": 0, "async": {"start": "all_gather", "wait": "w"}}
        gather = op("all_gather", [tensor([8, 1], "local-token")], [tensor([16, 1])], group="tp", attrs=attrs)
        wait = op("wait", [tensor([16, 1])], [tensor([16, 1])], node="w", attrs={"of": "all_gather"})
        return [linear(first, 8, 8), gather, linear(beside, 8, 8), wait, linear(1, 8, 8)]

    timeline = run([rank(0), rank(20)], Options(overlap=True))
    # rank 0 computes 0..10, its gather starts with rank 1's at 20 and ends at 36: nothing to do in 10..20
    first, second = rank_times(timeline)
    assert (first.compute, first.comm, first.overlapped, first.wait, first.idle) == (11, 16, 0, 10, 0)
    # rank 1 computes 0..20 and, beside its gather, 20..30
    assert (second.compute, second.comm, second.overlapped, second.wait, second.idle) == (31, 16, 10, 0, 0)
    assert timeline.seconds == 37
    # rank 0's gather starts with rank 1's at 30 and ends at 46, amid its compute of 5..105; the step ends at 131
    inside, _ = rank_times(run([rank(5, 100), rank(30, 100)], Options(overlap=True)))
    assert (inside.compute, inside.comm, inside.overlapped, inside.wait, inside.idle) == (106, 16, 16, 0, 25)


def test_rounding_overlaps_nothing():
    """In floats 0.2 + (0.9 - 0.4) + (0.4 - 0.2) is less than 0.9."""
    timeline = run([[linear(1, 8, 8), all_reduce(4, 8), linear(3, 8, 8)]] * 2)
    starts, seconds = (0.0, 0.2, 0.4), (0.2, 0.2, 0.5)
    own = tuple(replace(s, start=t, seconds=d, wait=0.0) for s, t, d in zip(timeline.slices[0], starts, seconds))
    (found,) = rank_times(replace(timeline, slices=(own,), seconds=0.9))
    assert found.overlapped == 0.0


@pytest.mark.parametrize("options", [Options(), Options(overlap=True, quant="w8a8"), Options(split_attention=True)])
@pytest.mark.parametrize("plan", ["dsa_cp_engine", "tp"])
def test_busy_wait_and_idle_are_the_step(traces_of, plan, options):
    (timeline,) = replay(traces_of(plan, 4), load_device("910C_752T"), options=options)
    assert len(timeline.slices) == 4
    for time, own in zip(rank_times(timeline), timeline.slices):
        assert math.isclose(time.busy + time.wait + time.idle, timeline.seconds, rel_tol=1e-12)
        assert min(time.compute, time.comm, time.wait, time.idle, time.overlapped) > -1e-15
        assert math.isclose(time.compute, sum(s.seconds for s in own if s.stream == "compute"), rel_tol=1e-9)
        assert math.isclose(time.comm, sum(s.seconds for s in own if s.stream == "comm"), rel_tol=1e-9)
        if not options.overlap:  # then each second is one slice's, a wait, or the idle end
            waits = sum(s.wait for s in own)
            assert math.isclose(time.wait, waits, rel_tol=1e-9, abs_tol=1e-15)
            assert math.isclose(time.idle, timeline.seconds - own[-1].end, rel_tol=1e-9, abs_tol=1e-15)
    assert math.isclose(sum(by_source(timeline).values()), sum(g.seconds for g in by_op(timeline)), rel_tol=1e-9)


def test_flops_of_the_ranks_are_those_of_the_program_but_for_replicated_work(traces_of):
    device = load_device("910C_752T")
    (single,) = replay(traces_of("tp", 1), device)
    (parallel,) = replay(traces_of("tp", 4), device)
    ratios = {row["module"].removeprefix("model.layers.*."): row["ratio"] for row in compare_flops(single, parallel)}
    sharded = [
        "self_attn.q_b_proj", "self_attn.attn", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj",
        "mlp.experts.gate_up_proj", "mlp.experts.down_proj", "lm_head",
    ]  # fmt: skip
    assert {name: ratios[name] for name in sharded} == dict.fromkeys(sharded, 1.0)
    whole = ["self_attn.q_a_proj", "self_attn.kv_a_proj_with_mqa", "self_attn.indexer.wk", "self_attn.indexer",
             "input_layernorm", "post_attention_layernorm"]  # fmt: skip
    assert {name: ratios[name] for name in whole} == dict.fromkeys(whole, 4.0)
    padded = ["mlp.gate", "mlp.topk", "mlp.shared_experts.gate_proj", "mlp.shared_experts.down_proj"]
    assert {name: ratios[name] for name in padded} == dict.fromkeys(padded, 32 / 30)  # 30 tokens on 4 ranks are 32


def test_flops_of_the_program_by_hand(traces_of):
    (single,) = replay(traces_of("tp", 1), load_device("910C_752T"))
    flops = {g.key.removeprefix("model.layers.*."): g.flops for g in by_module(single)}
    # glm-5.1-mini: hidden 144, q rank 56, 24 heads of 20 + 8, value 26, latent 44; 30 tokens, 4 layers, 2 of them MoE
    assert flops["self_attn.q_a_proj"] == 4 * 2 * 30 * 144 * 56
    assert flops["self_attn.o_proj"] == 4 * 2 * 30 * 24 * 26 * 144
    absorb = 2 * 24 * 30 * (20 * 44 + 44 * 26)
    pairs = 30 * 31 // 2  # causal, and fewer than the top-32
    assert flops["self_attn.attn"] == 4 * (absorb + 2 * 24 * (52 + 44) * pairs)
    assert flops["mlp.experts.down_proj"] == 2 * 2 * (30 * 4) * 120 * 144


def test_rows_of_experts_are_real_in_a_real_run(traces_of):
    traces = traces_of("tp", 4)
    per_module: dict[str, int] = {}
    for _, records in traces:
        for record in records:
            if record.get("op") == "grouped_matmul":
                rows = record["attrs"]["expert_rows"]
                assert len(rows) == record["inputs"][1]["shape"][0]
                per_module[record["module"]] = per_module.get(record["module"], 0) + sum(rows)
    assert set(per_module.values()) == {30 * 4}  # every token goes to 4 experts
    rows = [r["attrs"]["expert_rows"] for r in traces[0][1] if r.get("op") == "grouped_matmul"]
    assert any(max(r) - min(r) > 1 for r in rows)  # a router is not even
    (timeline,) = replay(traces, load_device("910C_752T"))
    kernels = [s.kernels[0][0] for s in timeline.slices[0] if s.record["op"] == "grouped_matmul"]
    assert [list(k.sizes["rows"]) for k in kernels] == rows


def test_what_is_not_priced_is_listed(traces_of):
    _, records = steps_of(traces_of("dsa_cp_engine", 4)[0][1])[0]
    found = not_priced(records)
    assert set(found) == {"metadata", "verification"}
    assert sum(found.values()) == sum(r["kind"] == "op" and r["traffic"] != "payload" for r in records)
