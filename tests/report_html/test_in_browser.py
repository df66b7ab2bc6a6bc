"""The page in a real browser: what is on the picture, and the numbers that its scripts made."""

from collections import Counter
from pathlib import Path

import pytest
from PIL import Image

from emulator.export.run import find_target
from emulator.report_html.page import render, write_report

from .browser import body_data, cells, dom, screenshot

FULL, LOCAL, PARTIAL, SHARD, ROWS = (59, 111, 182), (127, 200, 169), (240, 168, 48), (169, 139, 201), (176, 137, 104)
RED, GREEN = (214, 40, 40), (43, 138, 62)


def colours(path: Path) -> Counter[tuple[int, int, int]]:
    """How many pixels have each colour."""
    with Image.open(path) as image:
        found = image.convert("RGB").getcolors(maxcolors=1 << 24)
    return Counter({colour: count for count, colour in found})


def test_a_healthy_run_is_drawn(healthy: Path, tmp_path: Path) -> None:
    page = write_report(healthy, find_target("910C_752T"), tmp_path / "a.html")
    seen = colours(screenshot(page, tmp_path, width=1500, height=2000))
    assert len(seen) > 50
    # a cell is 16 x 14 pixels; in 4 layers on 3 ranks each state stands in several cells, and in the legend
    for colour in (FULL, LOCAL, PARTIAL, SHARD, ROWS):
        assert seen[colour] > 3 * 16 * 14, colour
    assert seen[GREEN] > 500  # the verdict
    assert seen[RED] < 2 * 14 * 14  # the legend only


def test_its_numbers_are_those_of_the_run(healthy: Path, tmp_path: Path) -> None:
    page = write_report(healthy, find_target("910C_752T"), tmp_path / "a.html")
    document = dom(page, tmp_path)
    found = body_data(document)
    ops = 0
    for line in (healthy / "rank_0.jsonl").read_text().splitlines():
        ops += '"kind": "op"' in line and '"traffic": "verification"' not in line
    assert found["cells"] == 3 * ops  # no two of these layers are alike
    assert found["milliseconds"] < 3000
    assert document.count("<canvas") == 6
    ranks = cells(document, "rank-times")
    assert [row[0] for row in ranks] == ["0", "1", "2"]
    total = [sum(map(float, row[1:5])) for row in ranks]
    assert total == pytest.approx([total[0]] * 3, rel=0.01)
    calls = {(row[0], row[1], row[2]): row[4] for row in cells(document, "collective-table")}
    # the RFC's collectives: the normalised output is gathered before each attention, and expert rows travel in 2 layers
    assert calls["tp", "all_gather", "model.layers.*.self_attn"] == "4"
    assert calls["ep", "all_to_all", "model.layers.*.mlp.experts.combine"] == "2"


def test_a_broken_run_is_red(broken: Path, tmp_path: Path) -> None:
    page = write_report(broken, None, tmp_path / "a.html")
    seen = colours(screenshot(page, tmp_path, width=1500, height=2000))
    assert seen[RED] > 5000
    assert seen[GREEN] < 500
    document = dom(page, tmp_path)
    assert "First broken boundary" in document
    assert "wrong_positions: Rank 1 has another `positions`" in document
    assert ">FAIL</td>" in document


def test_full_size_stays_small_and_fast(tmp_path: Path) -> None:
    """78 layers on 16 ranks, each layer with a red cell of its own, so that none fold."""
    words = ["linear", "self_attn.q_a_proj", "[256, 6144] local-token"]
    kinds = [
        {"layers": [n], "columns": [[0, 1, 0]] * 34, "cells": [[[1, 2, 2, 0]] * 34 for _ in range(16)]}
        for n in range(78)
    ]
    step = {"steps": [0], "phase": "prefill", "plan": "dsa_cp", "requests": [[4096, 0]], "kinds": kinds}
    data = {
        "title": "large", "head": [], "verdict": "fail", "checks": [], "first_failure": None, "culprit": None,
        "errors": {}, "ranks": [str(rank) for rank in range(16)], "last": [], "states": ["a"] * 7, "steps": [step],
        "boundaries": [], "collectives": [], "time": None, "times": "", "memory": [], "resources": {}, "words": words,
    }  # fmt: skip
    page = tmp_path / "a.html"
    page.write_text(render(data))
    assert page.stat().st_size < 5e6
    found = body_data(dom(page, tmp_path))
    assert found["cells"] == 78 * 34 * 16
    assert found["milliseconds"] < 6000  # below 1 s on a quiet machine
