"""Puts the page together: data from the traces and summary.json, one HTML file that needs no network."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from emulator.cost.replay import DEFAULT
from emulator.cost.totals import by_bound, by_source
from emulator.errors import UsageError
from emulator.export.run import Run, Target, Trace, load_traces, make_run
from emulator.report_html import tables
from emulator.report_html.failures import places_of
from emulator.report_html.layout_map import STATES, Words, layout_map
from emulator.trace.record import steps_of

_HERE = Path(__file__).parent
_SCRIPTS = ("dom.js", "map.js", "tables.js", "page.js")


def write_report(folder: Path, target: Target | None = None, out: Path | None = None) -> Path:
    """Writes the page about the run in `folder` and returns its path (default: <folder>/report.html).

    target: to replay the run on; without one the page holds no times. UsageError for a folder without traces.
    """
    html = render(page_data(load_traces(folder), _summary(folder), target))
    path = out or folder / "report.html"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(html)
    except OSError as error:
        raise UsageError(f"{path}: cannot be written ({error.strerror})") from None
    return path


def render(data: Mapping[str, Any]) -> str:
    """The page that shows this data."""
    html = (_HERE / "page.html").read_text()
    texts = {
        "{{title}}": _escaped(data["title"]),
        "{{css}}": (_HERE / "page.css").read_text(),
        "{{data}}": json.dumps(data, separators=(",", ":")).replace("<", "\\u003c"),  # no text may end the script
        "{{js}}": "\n".join((_HERE / name).read_text() for name in _SCRIPTS),
    }
    for place, text in texts.items():
        before, _, after = html.partition(place)
        html = before + text + after
    return html


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;")


def _summary(folder: Path) -> dict[str, Any]:
    """summary.json; empty when a rank failed before there was one."""
    path = folder / "summary.json"
    try:
        return dict(json.loads(path.read_text())) if path.is_file() else {}
    except (ValueError, TypeError):
        raise UsageError(f"{path}: not the summary of a run") from None


def page_data(traces: Sequence[Trace], summary: Mapping[str, Any], target: Target | None) -> dict[str, Any]:
    """Everything that the page shows, texts that repeat as numbers into `words`."""
    run, problem = _timed(traces, target)
    words = Words()
    by_step = [[own[n][1] if n < len(own) else [] for own in _steps(traces)] for n in range(len(run.steps))]
    ops = [[[r for r in own if r["kind"] == "op"] for own in ranks] for ranks in by_step]
    drawn = layout_map(run.steps, ops, places_of(summary), words)
    header = run.headers[0]
    return {
        "title": f"{header['scenario']} {run.steps[0]['plan']}",
        "head": _head(run, summary),
        "verdict": summary.get("verdict", "unfinished"),
        "checks": summary.get("checks", []),
        "first_failure": summary.get("first_failure"),
        "culprit": summary.get("culprit"),
        "errors": {key: summary.get(key) for key in ("max_abs_error", "max_rel_error", "max_error_in_tolerances")},
        "ranks": [f"{rank}" for rank in run.ranks],
        "last": _last_ops(by_step),
        "states": STATES,
        "steps": drawn,
        "boundaries": _boundaries(by_step, drawn, run, summary),
        "collectives": tables.collective_rows(run.timelines, run.device is not None),
        "time": _time(run) if run.device else None,
        "times": run.times if run.device else problem,
        "memory": tables.memory_rows(summary["memory"]) if summary.get("memory") else [],
        "resources": {"wall_s": summary.get("wall_s"), "peak_rss_mb": summary.get("peak_rss_mb")},
        "words": list(words.numbers),
    }


def _steps(traces: Sequence[Trace]) -> list[list[tuple[dict[str, Any], list[dict[str, Any]]]]]:
    return [steps_of(records) for _, records in traces]


def _timed(traces: Sequence[Trace], target: Target | None) -> tuple[Run, str]:
    """The run, replayed where that is asked for and possible (a run that failed may not be), and why it is not."""
    if target is None:
        return make_run(traces), "No times: no device was given (emulator report DIR --device NAME)."
    try:
        return make_run(traces, target), ""
    except UsageError as error:
        return make_run(traces), f"No times: the traces cannot be replayed on {target.device.name}: {error}"


def _head(run: Run, summary: Mapping[str, Any]) -> list[list[str]]:
    header, step = run.headers[0], run.steps[0]
    layers = step["symbols"]["layers"]
    found = {
        "scenario": header["scenario"],
        "model": f"{header['model']}, {layers} layers",
        "plan": ", ".join(dict.fromkeys(step["plan"] for step in run.steps)),
        "variants": ", ".join(f"{key}={value}" for key, value in step["variants"].items()),
        "ranks": " ".join(f"{axis} {size}" for axis, size in header["mesh"].items()),
        "tokens": f"{summary.get('tokens', step['symbols']['T'])}",
        "steps": f"{len(run.steps)}",
        "run": f"{header['mode']} {header['dtype']}",
        "device": run.device.title if run.device else "none",
    }
    return [[key, value] for key, value in found.items()]


def _boundaries(
    by_step: Sequence[Sequence[Sequence[Mapping[str, Any]]]], drawn: Sequence[Mapping[str, Any]], run: Run,
    summary: Mapping[str, Any],
) -> list[dict[str, Any]]:  # fmt: skip
    """Boundaries of the first layer of each kind, and of what is outside layers: {step, layers, rows}."""
    found = []
    numbers = [step["step"] for step in run.steps]
    for shown in drawn:
        ranks = by_step[numbers.index(shown["steps"][0])]
        crossing = [[r for r in own if r["kind"] == "boundary"] for own in ranks]
        for layers in [kind["layers"] for kind in shown["kinds"] if kind["layers"]] + [[]]:
            rows = tables.boundary_rows(crossing, [layers[0] if layers else None], summary.get("broken_boundaries", ()))
            found.append({"step": shown["steps"][0], "layers": layers, "rows": rows})
    return found


def _last_ops(by_step: Sequence[Sequence[Sequence[Mapping[str, Any]]]]) -> list[dict[str, str]]:
    """The last op that ranks finished: {ranks, op, module}."""
    found: dict[tuple[str, str], list[int]] = {}
    for rank in range(len(by_step[0])):
        ops = [r for ranks in by_step for r in ranks[rank] if r["kind"] == "op"]
        if ops:
            found.setdefault((ops[-1]["op"], ops[-1]["module"]), []).append(rank)
    return [{"ranks": tables.ranks_text(ranks), "op": op, "module": module} for (op, module), ranks in found.items()]


def _time(run: Run) -> dict[str, Any]:
    return {
        "steps": [timeline.seconds for timeline in run.timelines],
        "options": {k: v for k, v in vars(run.options).items() if v not in (getattr(DEFAULT, k), "none")},
        "ranks": tables.rank_rows(run.timelines),
        "modules": tables.module_rows(run.timelines, len(run.ranks)),
        "sources": tables.shares(run.timelines, by_source),
        "bounds": tables.shares(run.timelines, by_bound),
    }
