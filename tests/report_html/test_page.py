"""The page's text: self-contained, complete and safe, for runs that passed, failed or did not finish."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from emulator.errors import UsageError
from emulator.export.run import find_target
from emulator.report_html.page import render, write_report


def data_of(html: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', html, re.DOTALL)
    assert found
    return dict(json.loads(found[1]))


@pytest.fixture(scope="module")
def page(healthy: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    out = tmp_path_factory.mktemp("page") / "sub" / "a.html"
    return write_report(healthy, find_target("910C_752T"), out).read_text()


def test_it_needs_no_network(page: str) -> None:
    assert not re.search(r"https?:|src=|href=|@import|url\(", page)
    assert "{{" not in page
    assert len(page) < 200_000


def test_it_says_what_ran(page: str) -> None:
    data = data_of(page)
    head = dict(data["head"])
    assert (head["scenario"], head["ranks"], head["tokens"]) == ("glm-5.1-mini", "dp 1 tp 3 ep 3", "10")
    assert head["device"] == "Ascend 910C, one die, Atlas A3 (752T)"
    assert data["verdict"] == "pass"
    assert all(check["passed"] for check in data["checks"])
    (step,) = data["steps"]
    assert [kind["layers"] for kind in step["kinds"]] == [[], [0], [1], [2], [3], []]
    assert all(len(kind["cells"]) == 3 for kind in step["kinds"])


def test_its_times_add_up(page: str) -> None:
    time = data_of(page)["time"]
    (whole,) = time["steps"]
    assert whole > 0
    for rank, row in enumerate(time["ranks"]):
        assert sum(row.values()) == pytest.approx(whole)
        modules = sum(m["seconds"][rank] for m in time["modules"] if m["stream"] == "compute")
        assert modules == pytest.approx(row["compute"])
    assert time["sources"] == {"analytic": 1.0}


def test_its_boundaries_are_those_of_the_contract(page: str) -> None:
    # RFC: attention takes full tokens, o_proj local ones; 10 tokens on 3 ranks are 4 each
    parts = {tuple(part["layers"]): part["rows"] for part in data_of(page)["boundaries"]}
    rows = {(r["module"], r["port"]): r for r in parts[(3,)]}
    attention, o_proj = (rows[f"model.layers.3.self_attn{name}", "input"] for name in ("", ".o_proj"))
    assert (attention["layout"], attention["shape"]) == ("full-token", [10, 144])
    assert (o_proj["layout"], o_proj["shape"][0]) == ("local-token", 4)
    assert all(row["ok"] for rows in parts.values() for row in rows)


def test_a_failed_run_names_module_rank_and_culprit(broken: Path, tmp_path: Path) -> None:
    data = data_of(write_report(broken, None, tmp_path / "a.html").read_text())
    assert (data["verdict"], data["first_failure"]["rank"]) == ("fail", 1)
    assert (data["culprit"]["op"], data["culprit"]["ranks"]) == ("rope", [1])
    first = next(kind for kind in data["steps"][0]["kinds"] if kind["layers"] == [0])
    red = [[i for i, cell in enumerate(row) if cell[3] == 2] for row in first["cells"]]
    assert red[0] == red[2] == []
    assert "rope" in {data["words"][first["columns"][i][0]] for i in red[1]}
    assert data["time"] is None
    assert "no device was given" in data["times"]


def test_a_run_that_did_not_finish(healthy: Path, tmp_path: Path) -> None:
    shutil.copytree(healthy, tmp_path / "cut")
    (tmp_path / "cut" / "summary.json").unlink()
    trace = tmp_path / "cut" / "rank_1.jsonl"
    lines = trace.read_text().splitlines(keepends=True)
    trace.write_text("".join(lines[:40]))
    target = find_target("910C_752T")
    path = write_report(tmp_path / "cut", target)
    assert path == tmp_path / "cut" / "report.html"
    data = data_of(path.read_text())
    assert data["verdict"] == "unfinished"
    assert "cannot be replayed on 910C_752T" in data["times"]
    ends = {last["ranks"]: (last["op"], last["module"]) for last in data["last"]}
    last = next(json.loads(line) for line in reversed(lines[:40]) if '"kind": "op"' in line)
    assert ends == {"ranks 0, 2": ("all_gather", "lm_head"), "rank 1": (last["op"], last["module"])}


def test_no_text_of_a_run_becomes_markup(page: str) -> None:
    evil = "</script><b>&"
    html = render({**data_of(page), "title": evil})
    assert evil not in html
    assert "<title>&lt;/script>&lt;b>&amp;</title>" in html
    assert data_of(html)["title"] == evil


def test_refusals(healthy: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no trace here"):
        write_report(tmp_path)
    shutil.copytree(healthy, tmp_path / "bad")
    (tmp_path / "bad" / "summary.json").write_text("[1")
    with pytest.raises(UsageError, match="not the summary"):
        write_report(tmp_path / "bad")
    (tmp_path / "bad" / "summary.json").unlink()
    (tmp_path / "bad" / "rank_1.jsonl").unlink()
    with pytest.raises(UsageError, match="3 ranks, and there is no trace of 1"):
        write_report(tmp_path / "bad")
    with pytest.raises(UsageError, match="cannot be written"):
        write_report(healthy, out=tmp_path)
