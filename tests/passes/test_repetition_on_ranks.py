"""A graph that was folded and expanded runs like the one it came from: the same values at every boundary of every rank,
the same trace but for order and time."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from emulator.model.config import load_config
from emulator.ops.registry import op_name
from emulator.passes.repetition import expand, fold
from emulator.prepare import Prepared, prepare
from emulator.rank import run_on_rank
from emulator.scenario import load_scenario
from emulator.verdict import summarise

# GLM-5.1's schedule in small: Fd Fd Sm Sm Sm Fm Sm Sm, so shared layers reuse the ids of layer 1, then of layer 5
SHARED = {"num_hidden_layers": 8, "index_topk_freq": 4, "index_skip_topk_offset": 2}


def prepared(plan: str, tp: int, tokens: int, model: str = "glm-5.1-mini", embedding: str = "row") -> Prepared:
    given = {"plan": plan, "parallel": {"tp": tp}, "tokens": tokens, "variants": {"embedding": embedding}}
    return _folded(prepare(load_scenario(model, given)))


def prepared_shared(plan: str, tp: int, tokens: int, tmp: Path) -> Prepared:
    config = load_config("glm-5.1-mini").model_dump(mode="json", exclude_none=True) | SHARED
    (tmp / "config.json").write_text(json.dumps(config))
    return _folded(prepare(load_scenario(str(tmp), {"plan": plan, "parallel": {"tp": tp}, "tokens": tokens})))


def _folded(made: Prepared) -> Prepared:
    folded = fold(made.rank_graph)
    assert any(op_name(n.target) == "copy_region" for n in folded.graph.nodes)
    made.rank_graph = expand(folded)
    return made


def on_ranks(tp: int, tokens: int) -> Any:
    return pytest.param(tp, tokens, marks=pytest.mark.ranks(tp, mesh={"tp": tp, "ep": tp}, inherit=prepared))


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
