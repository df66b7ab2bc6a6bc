"""Ragged batches, chunks and decodes on one cache, dp ranks with other tokens or none: every plan and every way to the
experts equals the one-process Program."""

import itertools

import pytest
import torch

from emulator.jobs.job import run
from emulator.jobs.prepare import prepare
from emulator.scenario import load_scenario, parse_requests

NINE_DECODES = ",".join(f"1:{context}" for context in range(9, 18))  # kv 10 .. 18
SIX_WITH_A_DRAFT = ",".join(["2:18"] * 6)  # kv 20
WORKLOADS = {
    "ragged": (4, 1, ["5,3:10,1:100"]),
    "more keys than top-k": (4, 1, ["6:70,7"]),  # index_topk is 32
    "nine decodes": (4, 1, [NINE_DECODES]),
    "six with a draft": (4, 1, [SIX_WITH_A_DRAFT]),
    "fewer tokens than ranks": (4, 1, ["3"]),
    "dp 14 and 6": (2, 2, ["14/6"]),
    "dp 4 and none": (2, 2, ["4/"]),
    "chunks then decodes": (4, 1, ["7", "7:7", "3:14", *(f"1:{17 + i}" for i in range(5))]),
    "dp in different phases": (2, 2, ["7,2/3", "1:7,4:2/1:3", "1:8,1:6/1:4"]),
}
PLANS, MOE = ("tp", "sp", "dsa_cp"), ("all_to_all", "all_gather", "mc2")


def _scenario(workload: str, plan: str, moe: str, model: str = "glm-5.1-mini", **more):
    tp, dp, steps = WORKLOADS[workload]
    given = {
        "plan": plan, "parallel": {"tp": tp, "dp": dp}, "step": [parse_requests(s).model_dump() for s in steps],
        "variants": {"moe": moe}, "layers": 3, **more,
    }  # fmt: skip
    return load_scenario(model, given)


def _holds(summary: dict, *, exact: bool = False) -> None:
    """exact: no sum is taken in another order than in the reference, so every value is its bits."""
    assert summary["verdict"] == "pass", (summary["checks"], summary["first_failure"], summary["culprit"])
    names = [c["name"] for c in summary["checks"]]
    assert names[:4] == ["static layout", "values", "windows", "caches"]
    assert len(names) > 5  # and a contract
    assert summary["max_rel_error"] < 1e-9
    if exact:
        assert summary["max_abs_error"] == 0
    elif summary["parallel"]["tp"] == 4:  # two halves can be summed as the reference sums them
        assert summary["max_abs_error"] > 0


# every workload twice, with every plan and every variant in turn
CASES = [
    (w, PLANS[(i + again) % 3], MOE[(i // 3 + i + 2 * again) % 3]) for again in (0, 1) for i, w in enumerate(WORKLOADS)
]


@pytest.mark.parametrize(("workload", "plan", "moe"), CASES)
def test_workloads(workload, plan, moe):
    _holds(run(_scenario(workload, plan, moe)))


@pytest.mark.slow
@pytest.mark.parametrize("model", ["glm-5.1-mini", "deepseek-v3.2-mini"])
@pytest.mark.parametrize("moe", MOE)
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("workload", WORKLOADS)
def test_all_workloads(workload, plan, moe, model):
    _holds(run(_scenario(workload, plan, moe, model)))


@pytest.mark.parametrize("model", ["glm-5.1-mini", "deepseek-v3.2-mini"])
def test_chunks_and_decodes_equal_one_prefill(model):
    chunked = prepare(_scenario("chunks then decodes", "dsa_cp", "all_to_all", model))
    whole = prepare(load_scenario(model, {"plan": "dsa_cp", "tokens": 22, "layers": 3}))

    def logits(part):
        return next(value for value in part.reference.values() if value.shape[1:] == (part.config.vocab_size,))

    assert torch.equal(torch.cat([p.batch.input_ids for p in chunked.parts]), whole.batch.input_ids)
    found, expected = torch.cat([logits(p) for p in chunked.parts]), logits(whole)
    assert found.shape == (22, chunked.config.vocab_size)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-9 * float(expected.abs().max()))


def test_decode_steps_take_the_decode_plan():
    summary = run(_scenario("dp in different phases", "dsa_cp", "all_to_all"))
    told = [(s["phase"], s["plan"], s["tokens"], s["padded"]) for s in summary["steps"]]
    # decode pads both dp ranks to the larger count, 5 and 1 tokens to 3 rows per rank
    assert told == [
        ("prefill", "dsa_cp", [9, 3], [10, 4]),
        ("decode", "decode", [5, 1], [6, 6]),
        ("decode", "decode", [2, 1], [2, 2]),
    ]
    # one rank decodes, its peer prefills: phase is decided from all of them
    mixed = run(_scenario("ragged", "dsa_cp", "all_to_all"))
    assert [(s["phase"], s["plan"]) for s in mixed["steps"]] == [("mixed", "dsa_cp")]


@pytest.mark.parametrize(("gate", "layout", "shape"), [("true", "full-token", 9), ("false", "local-token", 3)])
def test_the_published_decode_shapes(gate, layout, shape):
    """RFC 3.8 on a model of other widths: [9, H] -> [9, E] -> [12, E] -> [3, E] -> [3, k]."""
    given = {
        "plan": "decode", "variants": {"gate_returns_raw_logits": gate}, "layers": 3, "parallel": {"tp": 4, "dp": 2},
        "step": [parse_requests(f"{NINE_DECODES}/{NINE_DECODES}").model_dump()],
    }  # fmt: skip
    summary = run(load_scenario("glm-5.1-mini", given))
    _holds(summary)

    def at(module, port):
        return [(b["layout"], b["shape"]) for b in summary["boundaries"] if b["module"] == module and b["port"] == port]

    mlp = "model.layers.2.mlp"
    assert at(f"{mlp}.gate", "input") == [(layout, [shape, 144])]
    assert at(f"{mlp}.gate", "output") == [(layout, [shape, 48])]
    assert ("local-token", [3, 48]) in at(f"{mlp}.topk", "input")
    assert set(map(str, at(f"{mlp}.topk", "output1"))) == {"('local-token', [3, 4])"}
    assert ("local-token", [3, 144]) in at(f"{mlp}.experts.dispatch", "input")
    assert at(mlp, "output") == [("full-token", [9, 144])]
    cuts = {(c["module"], tuple(c["input_shape"])) for c in summary["collectives"] if c["op"] == "slice"}
    hidden = ("model.layers.*.mlp", (12, 144))
    assert cuts == ({hidden, ("model.layers.*.mlp.topk", (12, 48))} if gate == "true" else {hidden})


def test_expert_rows_are_those_of_the_routing():
    summary = run(_scenario("dp 14 and 6", "dsa_cp", "all_to_all"))
    rows = summary["expert_rows"]
    assert len(rows["per_rank"]) == 4
    assert sum(rows["per_rank"]) == (14 + 6) * 4  # tokens x experts per token; padding is never routed
    assert rows["largest_over_mean"] == pytest.approx(max(rows["per_rank"]) / 20)


def test_ranks_without_a_token_make_the_same_calls():
    summary = run(_scenario("dp 4 and none", "sp", "all_to_all"))
    order = next(c for c in summary["checks"] if c["name"] == "collective order")
    assert order["passed"]
    assert summary["steps"][0]["tokens"] == [4, 0]


def test_a_context_that_nothing_left_behind_is_refused():
    from emulator.errors import UsageError

    given = {"step": [parse_requests("5").model_dump(), parse_requests("1:7").model_dump()]}
    with pytest.raises(UsageError, match=r"step 1, request 0 of dp rank 0: context 7, but 5 tokens"):
        prepare(load_scenario("glm-5.1-mini", given))


@pytest.mark.parametrize(("plan", "steps"), [("sp", ["5/3"]), ("tp", ["5/3"]), ("dsa_cp", ["5/3", "1:5/1:3"])])
@pytest.mark.parametrize("moe", MOE)
def test_one_tp_rank_per_dp_rank(plan, steps, moe):
    """Nothing is cut, but rows that the ep group joins are padded to the larger dp rank's."""
    given = {
        "plan": plan, "parallel": {"tp": 1, "dp": 2}, "variants": {"moe": moe}, "layers": 3,
        "step": [parse_requests(s).model_dump() for s in steps],
    }  # fmt: skip
    summary = run(load_scenario("glm-5.1-mini", given))
    _holds(summary, exact=moe != "all_gather")  # whose experts sum their own rows only
    joined = [c["input_shape"] for c in summary["collectives"] if c["group"] == "ep" and c["op"] == "all_gather"]
    assert ([5, 144] in joined) == (moe == "all_gather" and steps == ["5/3"])


def test_requests_sit_out_with_no_queries():
    given = {"step": [parse_requests(s).model_dump() for s in ("4,3", "0,1:3", "1:4,1:4")], "layers": 2}
    summary = run(load_scenario("glm-5.1-mini", given))
    assert summary["verdict"] == "pass"
    assert [s["tokens"] for s in summary["steps"]] == [[7], [1], [2]]


def test_every_case_is_there():
    assert {w for w, *_ in CASES} == set(WORKLOADS)
    assert {(p, m) for _, p, m in CASES} == set(itertools.product(PLANS, MOE))
