"""The catalogue: names, the public cases it expresses, and that every fault changes what it says it changes."""

import re
from typing import Any

import pytest
import torch
from torch import fx

from emulator.errors import UsageError
from emulator.faults.catalogue import FAULTS, find_fault, inject_in_graph, inject_on_rank
from emulator.faults.fault import Fault
from emulator.jobs.matrix import TOKENS, Cell, case_of, scenario_of
from emulator.jobs.prepare import Prepared, add_batches, prepare
from emulator.layout.plan import module_pattern
from emulator.layout.rank_graph import RankGraph
from emulator.model.batch import own_caches
from emulator.ops.registry import OPS
from emulator.ops.transition import TRANSITIONS
from emulator.verify.diagnosis import KINDS

# ids of the public bug catalogue that one prefill request on one dp rank can express, by class
EXPRESSED = {
    "lengths": {"negative-key-length-on-graph-padding", "draft-steps-share-length-buffers"},
    "slots": {"dummy-run-reuses-live-slots"},
    "metadata": {
        "one-token-last-chunk-taken-for-decode", "short-row-topk-minus-one-read-as-index",
        "rope-positions-and-query-in-different-layouts",
    },
    "reduction": {
        "sp-prefill-only-with-weight-gather",
        "prefill-attention-output-times-tp", "quant-bias-missing-with-full-weight", "o-proj-paths-disagree",
        "full-head-rows-into-sharded-o-proj", "role-selects-wrong-o-proj-path", "complete-moe-output-reduced-again",
        "needed-moe-all-reduce-missing",
    },
    "token_mixing": {"dense-mlp-sums-different-tokens"},
    "residual": {
        "layout-inferred-from-row-count", "layer-boundary-leaves-and-reenters-sp",
        "double-gather-at-dense-moe-boundary", "residual-chunk-silently-skipped", "draft-inputs-split-unlike-target",
    },
    "padding": {
        "dp-ranks-padded-to-different-lengths", "sp-padding-adds-a-request", "dummy-request-missing-in-kv-lengths",
        "uninitialised-pad-rows-spread-nan",
    },
    "moe": {"mc2-mask-buffer-not-tp-aligned"},
    "hang": {
        "draft-forward-count-decided-locally", "empty-query-rank-skips-gather", "lm-head-gather-with-unequal-rows",
        "layer-shard-broadcast-unpaired",
    },
    "memory": {"full-weight-pool-shared-across-layouts"},
}  # fmt: skip
RFC_ERRORS = {1: "full-tokens-into-gate", 2: "local-tokens-into-attention", 3: "residual-gathered"}


def test_there_are_enough_faults_of_every_kind() -> None:
    assert len(FAULTS) >= 40
    by_kind = {
        kind: sum(f.kind == kind for f in FAULTS.values()) for kind in ("graph", "weights", "metadata", "behaviour")
    }
    assert all(number >= 10 for number in by_kind.values()), by_kind


def test_every_case_that_can_be_expressed_is() -> None:
    assert {case for fault in FAULTS.values() for case in fault.cases} == set().union(*EXPRESSED.values())


@pytest.mark.parametrize(("number", "name"), RFC_ERRORS.items())
def test_the_modelling_errors_of_the_specification(number: int, name: str) -> None:
    assert f"RFC error {number}" in FAULTS[name].summary


@pytest.mark.parametrize("fault", FAULTS.values(), ids=lambda f: f.name)
def test_a_fault_says_what_it_is(fault: Fault) -> None:
    assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)+", fault.name)
    assert fault.summary.endswith(".")
    assert fault.places
    assert fault.diagnoses <= set(KINDS)
    known = {*OPS, *TRANSITIONS, "cat"}
    assert {op for place in fault.places for op in place.ops} <= known


def test_an_unknown_name_is_a_clear_error() -> None:
    with pytest.raises(UsageError, match="did you mean all-reduce-twice"):
        find_fault("all-reduce-twise")
    with pytest.raises(UsageError, match="emulator inject --list"):
        find_fault("zzz")


def _cell(fault: Fault) -> Cell:
    """The first cell in which the fault has an effect."""
    for model in ("glm-5.1-mini", "deepseek-v3.2-mini"):
        for tp, counts in TOKENS.items():
            for tokens in (counts[1], counts[0], counts[2]):
                cell = Cell(fault.name, model, tp, tokens)
                if fault.no_effect(case_of(scenario_of(cell))) is None:
                    return cell
    raise AssertionError(f"{fault.name} has no effect anywhere")


def _healthy(cell: Cell) -> Prepared:
    scenario = scenario_of(cell).model_copy(update={"fault": None})
    prepared = prepare(scenario, graph_only=True)
    shapes = prepared.program.parameters
    generator = torch.Generator().manual_seed(0)
    prepared.weights = {n: torch.rand(p.shape, generator=generator, dtype=torch.float64) for n, p in shapes.items()}
    add_batches(prepared)
    return prepared


def _shape(graph: fx.Graph) -> list[Any]:
    """A graph's calls, in order."""
    return [(n.op, n.target, fx.map_arg(n.args, lambda a: a.name)) for n in graph.nodes]


def _changes(site: Any, healthy: RankGraph, prepared: Prepared) -> bool:
    if site.stand_ins or _shape(site.graph) != _shape(healthy.graph):
        return True
    proper = {n.target: n.meta["layout"] for n in healthy.graph.nodes if n.op == "get_attr"}
    other_weight = any(
        not torch.equal(part, site.part(name)) if part.shape == site.part(name).shape else True
        for name, part in site.parts.items()
    )
    assert set(site.parts) <= set(proper)
    fresh = own_caches(prepared.batch)
    other_input = any(
        isinstance(v, torch.Tensor) and (v.shape != fresh[k].shape or not torch.equal(v, fresh[k]))
        for k, v in site.inputs.items()
    )
    return other_weight or other_input


@pytest.mark.parametrize("fault", FAULTS.values(), ids=lambda f: f.name)
def test_a_fault_changes_something_and_only_its_copy(fault: Fault) -> None:
    cell = _cell(fault)
    prepared = _healthy(cell)
    before = _shape(prepared.rank_graph.graph)
    assert inject_in_graph(None, prepared.rank_graph) is prepared.rank_graph
    edited = inject_in_graph(fault.name, prepared.rank_graph)
    modules = {module_pattern(m) for m in prepared.program.modules}
    assert {p.module for p in fault.places} & modules, "no place is a module of this model"
    if fault.kind == "graph":
        assert _shape(edited.graph) != before
        assert all({"layout", "module", "origin", "traffic"} <= n.meta.keys() for n in edited.graph.nodes)
    else:
        assert edited is prepared.rank_graph
        sites = [
            inject_on_rank(fault.name, edited, prepared.mesh, rank, prepared.weights, dict(own_caches(prepared.batch)))
            for rank in range(cell.tp)
        ]
        assert any(_changes(site, edited, prepared) for site in sites)
    assert _shape(prepared.rank_graph.graph) == before


def test_a_fault_that_does_not_apply_says_what_it_is_made_for() -> None:
    scenario = scenario_of(Cell("all-reduce-twice", "glm-5.1-mini", 2, 13)).model_copy(update={"plan": "dsa_cp"})
    with pytest.raises(UsageError, match=r"all-reduce-twice: .*the graph has 0.*made for plan tp, 1 layers or more"):
        prepare(scenario, graph_only=True)


def test_a_shape_only_run_takes_no_fault() -> None:
    scenario = scenario_of(Cell("shards-swapped", "glm-5.1-mini", 2, 13)).model_copy(update={"mode": "shape"})
    with pytest.raises(UsageError, match="mode real only"):
        prepare(scenario, graph_only=True)


# --- claims of no effect ---------------------------------------------------------------------------------------------


# worked by hand. tp 2: 16 tokens 8+8, 13 7+6 (+1 pad), 1 1+0 (+1); tp 4: 16 4 each, 13 4+4+4+1 (+3), 3 1+1+1+0 (+1)
@pytest.mark.parametrize(
    ("name", "without"),
    [
        ("unpad-from-the-front", {(2, 16), (4, 16)}),  # no padding
        ("round-robin-slice", {(2, 1), (4, 3)}),  # a row each
        ("scale-over-padding", {(2, 16), (4, 16), (2, 1), (4, 3)}),  # pads alone, or none
        ("empty-query-rank-skips-gather", {(2, 16), (4, 16), (2, 13), (4, 13)}),  # nobody is empty
        ("gather-skipped-by-row-count", {(2, 16), (4, 16), (2, 13), (4, 13), (4, 3)}),  # only 1 row is 1 row
        ("gather-sends-rows-of-last-layer", {(2, 1)}),  # rank 1 has nothing to send
        ("received-blocks-reversed", {(2, 1)}),  # one source
        ("window-of-next-rank", set()),
    ],
)
def test_no_effect(name: str, without: set[tuple[int, int]]) -> None:
    sizes = [(tp, tokens) for tp, counts in TOKENS.items() for tokens in counts]
    cases = {size: case_of(scenario_of(Cell(name, "glm-5.1-mini", *size))) for size in sizes}
    assert {size for size in sizes if FAULTS[name].no_effect(cases[size])} == without


def test_no_effect_of_an_eps_that_is_the_same() -> None:
    fault = FAULTS["latent-norm-with-config-eps"]
    reasons = {
        model: fault.no_effect(case_of(scenario_of(Cell(fault.name, model, 2, 13))))
        for model in ("glm-5.1-mini", "deepseek-v3.2-mini")
    }
    assert reasons["glm-5.1-mini"] is None  # 1e-5 against 1e-6
    assert "1e-6" in str(reasons["deepseek-v3.2-mini"])
