"""A graph that was folded and expanded runs like the one it came from: the same values at every boundary of every rank,
the same trace but for order and time."""

import json
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from emulator.jobs.prepare import Prepared, prepare
from emulator.jobs.rank import run_on_rank
from emulator.jobs.verdict import summarise
from emulator.model.config import load_config
from emulator.ops.registry import op_name
from emulator.passes.repetition import expand, fold
from emulator.scenario import load_scenario

# GLM-5.1's schedule in small: Fd Fd Sm Sm Sm Fm Sm Sm, so shared layers reuse the ids of layer 1, then of layer 5
SHARED = {"num_hidden_layers": 8, "index_topk_freq": 4, "index_skip_topk_offset": 2}


def prepared(plan: str, tp: int, tokens: int, model: str = "glm-5.1-mini", embedding: str = "row") -> Prepared:
    given = {"plan": plan, "parallel": {"tp": tp}, "tokens": tokens, "variants": {"embedding": embedding}}
    return _folded(prepare(load_scenario(model, given)))


def prepared_shared(plan: str, tp: int, tokens: int) -> Prepared:
    config = load_config("glm-5.1-mini").model_dump(mode="json", exclude_none=True) | SHARED
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        scenario = load_scenario(folder, {"plan": plan, "parallel": {"tp": tp}, "tokens": tokens})
        # the plans' contracts know no ids that enter a layer from an earlier one
        return _folded(replace(prepare(scenario), contract=None))


def prepared_twice(plan: str, tp: int, tokens: int) -> tuple[Prepared, Prepared]:
    """The same run on the graph as lowered, and on the graph folded and expanded; each writes its trace."""
    made = prepare(load_scenario("glm-5.1-mini", {"plan": plan, "parallel": {"tp": tp}, "tokens": tokens}))
    folders = [Path(tempfile.mkdtemp()) for _ in range(2)]
    return replace(made, out_dir=folders[0]), _folded(replace(made, out_dir=folders[1]))


def _folded(made: Prepared) -> Prepared:
    folded = fold(made.rank_graph)
    assert any(op_name(n.target) == "copy_region" for n in folded.graph.nodes)
    made.rank_graph = expand(folded)
    return made


def on_ranks(tp: int, tokens: int, inherit: Callable = prepared) -> Any:
    return pytest.param(tp, tokens, marks=pytest.mark.ranks(tp, mesh={"tp": tp, "ep": tp}, inherit=inherit))


def run(made: Prepared, context: Any) -> dict[str, Any]:
    reports: list[Any] = [None] * made.mesh.size
    dist.all_gather_object(reports, run_on_rank(made, context))
    summary = summarise(made, reports, 0.0)
    assert summary["verdict"] == "pass", (summary["checks"], summary["first_failure"])
    assert [c["name"] for c in summary["checks"]][1] == "values"
    assert summary["max_rel_error"] < 1e-9
    assert len({b["module"] for b in summary["boundaries"]}) > 20 * summary["layers"]  # every layer was looked at
    return summary


@pytest.mark.parametrize("plan", ["tp", "sp", "dsa_cp"])
@pytest.mark.parametrize("model", ["glm-5.1-mini", "deepseek-v3.2-mini"])
@pytest.mark.parametrize(("tp", "tokens"), [on_ranks(4, 97), on_ranks(4, 3)])
def test_values(plan: str, tp: int, tokens: int, model: str, inherited: Prepared, rank_context: Any) -> None:
    run(inherited, rank_context)


@pytest.mark.parametrize("plan", ["tp", "sp", "dsa_cp"])
@pytest.mark.parametrize("embedding", ["replicated"])
@pytest.mark.parametrize(("tp", "tokens"), [on_ranks(2, 16)])
def test_values_with_a_whole_embedding(
    plan: str, tp: int, tokens: int, embedding: str, inherited: Prepared, rank_context: Any
) -> None:
    run(inherited, rank_context)


@pytest.mark.parametrize("plan", ["tp", "sp", "dsa_cp"])
@pytest.mark.parametrize(("tp", "tokens"), [on_ranks(4, 97, prepared_shared)])
def test_values_with_shared_indexers(plan: str, tp: int, tokens: int, inherited: Prepared, rank_context: Any) -> None:
    assert run(inherited, rank_context)["layers"] == SHARED["num_hidden_layers"]


@pytest.mark.parametrize("plan", ["dsa_cp"])
@pytest.mark.parametrize(("tp", "tokens"), [on_ranks(4, 13, prepared_twice)])
def test_traces(plan: str, tp: int, tokens: int, inherited: tuple[Prepared, Prepared], rank_context: Any) -> None:
    traces = []
    for made in inherited:
        run(made, rank_context)
        assert made.out_dir is not None
        lines = (made.out_dir / f"rank_{rank_context.rank}.jsonl").read_text().splitlines()[1:]  # not the header
        records = [json.loads(line) for line in lines]
        for record in records:
            for key in ("seq", "start", "duration"):
                record.pop(key, None)
        traces.append([json.dumps(record, sort_keys=True) for record in records])
        dist.barrier()
        shutil.rmtree(made.out_dir, ignore_errors=True)
    assert len(traces[0]) > 5 * 40
    assert Counter(traces[0]) == Counter(traces[1])
    calls = [[line for line in trace if '"group": "' in line and '"op": "slice"' not in line] for trace in traces]
    assert len(calls[0]) > 5 * 4
    assert calls[0] == calls[1]  # and communication in the same order
