"""The detection matrix: how cells are judged, a part of it on real ranks, and (slow) the whole with its targets."""

import json
from dataclasses import replace
from typing import Any

import pytest
from typer.testing import CliRunner

from emulator.cli import app
from emulator.errors import RankError, UsageError
from emulator.faults.catalogue import FAULTS, find_fault
from emulator.jobs.matrix import (
    Cell,
    Outcome,
    _of_error,
    _of_summary,
    cells,
    faulty_scenario,
    rows,
    run_cell,
    scenario_of,
    totals,
)

GLM, DEEPSEEK = "glm-5.1-mini", "deepseek-v3.2-mini"


# --- a part of the matrix on ranks -----------------------------------------------------------------------------------

# cell -> checks that must fail, the first wrong node, diagnosis (or kind of rank error). From what each fault does:
# a transition too many changes counts, right values leave the value check silent, a swap of rows is seen by it alone
EXPECTED = {
    Cell("dense-mlp-sums-different-tokens", GLM, 2, 13): (
        "static shapes counts values", "all_reduce of model.layers.0.mlp.down_proj", "mixed_tokens",
    ),
    Cell("complete-rows-reduce-scattered", DEEPSEEK, 4, 3): (
        "static shapes counts values", "reduce_scatter of model.layers.0.self_attn.o_proj", "reduced_twice",
    ),
    Cell("residual-gathered", GLM, 2, 13): (
        "static rank error", "add_rms_norm2 of model.layers.1.input_layernorm", "residual_gathered",
    ),
    Cell("full-tokens-into-gate", GLM, 2, 13): ("shapes counts", "model.layers.2.mlp.gate", ""),
    Cell("all-reduce-then-slice", DEEPSEEK, 2, 16): ("counts", "model.layers.0.mlp.down_proj", ""),
    Cell("norm-eps-wrong", DEEPSEEK, 2, 13): ("values", "rms_norm of model.layers.0.input_layernorm", "wrong_eps"),
    Cell("shard-of-another-rank", GLM, 4, 13): ("values", "linear of model.layers.0.mlp.gate_proj", "weight_shard"),
    Cell("positions-local-on-one-rank", GLM, 2, 13): ("values", "rope of model.layers.0.self_attn", "wrong_positions"),
    Cell("window-of-next-rank", GLM, 4, 3): ("values", "slice of model.layers.0.self_attn.o_proj", "window_shift"),
    Cell("unpad-from-the-front", GLM, 2, 13): ("values", "unpad of model.layers.0.self_attn", "window_shift"),
    Cell("scale-over-padding", GLM, 4, 13): ("values", "linear of model.layers.0.self_attn.o_proj", "pad_leaked"),
    Cell("gather-skipped-by-row-count", GLM, 2, 1): ("values", "all_gather of model.layers.0.self_attn", "pad_leaked"),
    Cell("empty-query-rank-skips-gather", GLM, 4, 3): (
        "rank error", "all_gather of model.layers.0.self_attn", "CallMismatch",
    ),
    Cell("rank-raises", GLM, 2, 16): ("rank error", "all_gather of model.layers.0.mlp", "MemoryError"),
}  # fmt: skip


@pytest.mark.parametrize("cell", EXPECTED, ids=lambda c: f"{c.fault}-tp{c.tp}-{c.tokens}")
def test_a_fault_is_found(cell: Cell) -> None:
    seen, place, kind = EXPECTED[cell]
    outcome = run_cell(cell)
    assert outcome.state == "detected"
    assert " ".join(outcome.seen) == seen
    assert (outcome.place, outcome.kind) == (place, kind)
    assert outcome.node_right is True
    # nothing to diagnose where every value is right, or where one rank alone raised or made another call
    is_diagnosed = "values" in seen or cell.fault == "residual-gathered"
    assert outcome.diagnosis_right is (True if is_diagnosed else None)


@pytest.mark.parametrize("cell", [Cell("unpad-from-the-front", GLM, 2, 16), Cell("round-robin-slice", GLM, 2, 1)])
def test_a_fault_without_effect_is_told_as_such(cell: Cell) -> None:
    outcome = run_cell(cell)
    assert (outcome.state, outcome.seen) == ("no effect", ())
    assert outcome.reason


def test_a_claim_of_no_effect_that_does_not_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    claimed = replace(FAULTS["norm-eps-wrong"], no_effect=lambda case: "I say so")
    monkeypatch.setitem(FAULTS, claimed.name, claimed)
    outcome = run_cell(Cell(claimed.name, GLM, 2, 5))
    assert (outcome.state, outcome.reason, outcome.seen) == ("unexpected", "I say so", ("values",))


def test_a_fault_that_nothing_sees_is_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    idle = replace(FAULTS["norm-eps-wrong"], kind="behaviour", inject=lambda site: None)
    monkeypatch.setitem(FAULTS, idle.name, idle)
    outcome = run_cell(Cell(idle.name, GLM, 2, 5))
    assert (outcome.state, outcome.seen, outcome.node_right) == ("missed", (), None)


@pytest.mark.slow
def test_the_whole_matrix() -> None:
    outcomes = [run_cell(cell) for cell in cells()]
    found = totals(outcomes)
    assert found["cells"] == 12 * len(FAULTS)
    assert [o for o in outcomes if o.state in ("missed", "unexpected")] == []
    assert found["node"]["right"] >= 0.95 * found["node"]["of"], found
    assert found["diagnosis"]["right"] >= 0.95 * found["diagnosis"]["of"], found
    assert len(found["only"]["values"]) >= 20  # a class of its own, which no shape check can see


# --- cells and scenarios ---------------------------------------------------------------------------------------------


def test_the_cells_of_the_matrix() -> None:
    found = list(cells(["all-reduce-twice"]))
    assert [(c.model, c.tp, c.tokens) for c in found] == [
        (model, tp, tokens)
        for model in (GLM, DEEPSEEK)
        for tp, counts in ((2, (16, 13, 1)), (4, (16, 13, 3)))
        for tokens in counts
    ]
    assert [c.tokens for c in cells(["all-reduce-twice"], [GLM], [8])] == [16, 13, 7]  # divides, does not, too few
    with pytest.raises(UsageError, match="unknown"):
        list(cells(["no-such-fault"]))


def test_a_fault_brings_its_plan_sizes_and_layers() -> None:
    scenario = scenario_of(Cell("reduced-over-ep-group", GLM, 4, 13))
    assert (scenario.plan, scenario.parallel.ep, scenario.layers) == ("tp", 2, 1)
    assert not scenario.static_check  # the fault is run whatever the static check says
    own = faulty_scenario(find_fault("shared-expert-sum-missing"), GLM, {"parallel": {"tp": 2}})
    assert (own.plan, own.variants, own.fault) == ("dsa_cp", {"shared_experts": "gather_scatter"}, own.fault)
    assert own.layers is None  # the scenario's, all of them
    given = faulty_scenario(find_fault("all-reduce-twice"), GLM, {"plan": "sp"})
    assert given.plan == "sp"  # what the user says wins
    assert faulty_scenario(find_fault("reduced-over-ep-group"), GLM, {}).parallel.ep == 2  # of the scenario's tp 4


# --- judging ---------------------------------------------------------------------------------------------------------

DOWN = "model.layers.0.mlp.down_proj"
FAULT = FAULTS["all-reduce-twice"]  # at the all_reduce of mlp.down_proj; reduced_twice or scaled


def _summary(culprit: dict[str, Any] | None, *failed: str, module: str = "model.layers.7.mlp.down_proj") -> dict:
    names = ("static layout", "values", "contract tp_prefill", "collective order")
    return {
        "checks": [{"name": n, "passed": n.split()[0] not in failed} for n in names],
        "culprit": culprit, "first_failure": {"module": module, "detail": "d"},
    }  # fmt: skip


def _culprit(module: str, op: str, kind: str) -> dict[str, str]:
    return {"module": module, "op": op, "kind": kind, "text": "t"}


@pytest.mark.parametrize(
    ("culprit", "node", "diagnosis"),
    [
        (_culprit("model.layers.7.mlp.down_proj", "all_reduce", "scaled"), True, True),
        (_culprit("model.layers.7.mlp.down_proj", "linear", "scaled"), False, True),
        (_culprit("model.layers.7.mlp.up_proj", "all_reduce", "reduced_twice"), False, True),
        (_culprit("model.layers.7.mlp.down_proj", "all_reduce", "unknown"), True, False),
        (None, True, False),  # wrong values of which no node was made responsible
    ],
)
def test_node_and_diagnosis(culprit: dict | None, node: bool, diagnosis: bool) -> None:
    found = _of_summary(FAULT, _summary(culprit, "values"), set())
    assert (found["node_right"], found["diagnosis_right"], found["seen"]) == (node, diagnosis, ("values",))


def test_where_values_are_right_there_is_nothing_to_diagnose() -> None:
    found = _of_summary(FAULT, _summary(None, "static", "contract"), {"count"})
    assert (found["node_right"], found["diagnosis_right"]) == (True, None)
    assert found["seen"] == ("static", "counts")
    assert _of_summary(FAULT, _summary(None, "contract", module="lm_head"), {"layout"})["node_right"] is False
    assert _of_summary(FAULT, _summary(None, "contract"), {"layout"})["seen"] == ("shapes",)
    assert _of_summary(FAULT, _summary(None), set()) == {"seen": ()}


@pytest.mark.parametrize(
    ("doing", "others", "node"),
    [
        ("waiting in all_reduce (all_reduce_1) of model.layers.0.mlp.down_proj", {}, True),
        ("running linear (linear_3) of model.layers.0.mlp.down_proj", {}, False),
        # the rank that reports is one that waits; the culprit tells where it was
        (
            "waiting in all_gather (a) of lm_head",
            {1: "waiting in all_reduce (b) of model.layers.0.mlp.down_proj"},
            True,
        ),
        (
            "waiting in all_gather (a) of lm_head",
            {0: "waiting in all_reduce (b) of model.layers.0.mlp.down_proj"},
            False,
        ),
        ("", {}, False),
    ],
)
def test_the_place_of_a_rank_error(doing: str, others: dict[int, str], node: bool) -> None:
    error = RankError("m", {"doing": doing, "others": others, "culprits": [1], "kind": "CallMismatch"})
    found = _of_error(FAULT, scenario_of(Cell(FAULT.name, GLM, 2, 13)), error)
    assert (found["node_right"], found["kind"]) == (node, "CallMismatch")
    assert found["seen"] == ("static", "rank error")  # the static check sees this fault too


# --- totals and the command ------------------------------------------------------------------------------------------


def _outcome(fault: str, state: Any, seen: tuple[str, ...] = (), node: bool | None = None) -> Outcome:
    return Outcome(Cell(fault, GLM, 2, 13), state, "why" if state == "no effect" else "", seen, node, node, seconds=0.5)


def test_totals() -> None:
    outcomes = [
        _outcome("norm-eps-wrong", "detected", ("values",), True),
        _outcome("norm-eps-wrong", "no effect"),
        _outcome("round-robin-slice", "detected", ("values",), False),
        _outcome("round-robin-slice", "missed"),
        _outcome("all-reduce-then-slice", "detected", ("counts",)),
        _outcome("all-reduce-twice", "detected", ("static", "values"), True),
        _outcome("all-reduce-twice", "unexpected", ("static",), True),
    ]
    found = totals(outcomes)
    assert (found["faults"], found["cells"], found["seconds"]) == (4, 7, 3.5)
    assert [found[s] for s in ("detected", "no effect", "missed", "unexpected")] == [4, 1, 1, 1]
    assert found["node"] == {"right": 3, "of": 4}
    assert found["only"]["values"] == ["norm-eps-wrong", "round-robin-slice"]
    assert found["only"]["counts"] == ["all-reduce-then-slice"]
    assert found["only"]["static"] == []
    first = rows(outcomes)[0]
    assert (first.fault, first.count("detected"), first.reasons, first.seen["values"]) == (
        "norm-eps-wrong",
        1,
        ["why"],
        1,
    )


def _run(*args: str) -> Any:
    return CliRunner().invoke(app, ["inject", *args])


def test_the_list() -> None:
    result = _run("--list")
    assert result.exit_code == 0
    assert all(name in result.stdout for name in FAULTS)
    assert f"{len(FAULTS)} faults" in result.stdout


def test_one_fault_on_a_scenario(tmp_path) -> None:
    args = ("all-reduce-twice", GLM, "--tp", "2", "--tokens", "5", "--layers", "1", "--out", str(tmp_path), "--json")
    result = _run(*args)
    assert result.exit_code == 1  # a check failed, as it should
    summary = json.loads(result.stdout)
    assert (summary["plan"], summary["tokens"], summary["layers"], summary["parallel"]["tp"]) == ("tp", 5, 1, 2)
    assert summary["culprit"]["kind"] == "reduced_twice"


def test_a_part_of_the_matrix_by_command() -> None:
    args = ("--matrix", "--fault", "latent-norm-with-config-eps", "--tp", "2", "--tokens", "5")
    result = _run(*args, "--json")
    assert result.exit_code == 0
    found = json.loads(result.stdout)
    assert [(c["model"], c["tokens"], c["state"]) for c in found["cells"]] == [
        (GLM, 5, "detected"), (DEEPSEEK, 5, "no effect"),
    ]  # fmt: skip
    assert found["totals"]["detected"] == 1
    shown = _run(*args).stdout
    assert "values only" in shown
    assert "1 of 1 with an effect detected, 1 without effect, 0 missed" in shown


@pytest.mark.parametrize(
    "args", [(), ("all-reduce-twice",), ("all-reduce-twice", GLM, "--tp", "2", "--tp", "4"), ("no-such", GLM)]
)
def test_mistakes_are_one_line(args: tuple[str, ...]) -> None:
    result = _run(*args)
    assert result.exit_code == 2
    assert len(result.stderr.splitlines()) == 1
