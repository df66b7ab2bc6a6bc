"""Shrinking: a failing scenario with fewer layers, tokens and ranks and smaller features that fails in the same way."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from emulator.errors import LayoutError, RankError, UsageError
from emulator.jobs.job import run
from emulator.layout.plan import module_pattern
from emulator.scenario import Scenario

_FEATURES = (
    "vocab_size", "intermediate_size", "moe_intermediate_size", "n_routed_experts", "num_attention_heads", "index_topk",
    "index_n_heads", "hidden_size", "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "v_head_dim",
)  # fmt: skip


@dataclass(frozen=True)
class Failure:
    """How a run fails, up to layer number and size: two runs with equal ones have the same cause."""

    check: str
    module: str
    op: str
    kind: str

    def __str__(self) -> str:
        return f"{self.check}: {self.op or 'boundary'} of {self.module}" + (f", {self.kind}" if self.kind else "")


@dataclass
class Shrunk:
    """scenario: the smallest found that fails like `failure`. tried: (what was changed, whether it failed alike)."""

    scenario: Scenario
    failure: Failure
    tried: list[tuple[str, bool]] = field(default_factory=list)
    seconds: float = 0.0


def failure_of_run(scenario: Scenario) -> Failure | None:
    """Runs a scenario and says how it fails; None when it passes or makes no sense."""
    try:
        summary = run(scenario)
    except LayoutError as error:
        if not error.violations:
            return None
        first = error.violations[0]
        return Failure("static check", module_pattern(first.module), first.op, _without_numbers(first.reason))
    except UsageError:
        return None
    except RankError as error:
        culprit = error.report.get("culprit")
        if culprit:
            return Failure("rank", module_pattern(culprit["module"]), culprit["op"], culprit["kind"])
        return Failure("rank", "", "", str(error.report.get("kind", "")))
    return _failure(summary)


def _failure(summary: dict[str, Any]) -> Failure | None:
    culprit, first = summary["culprit"], summary["first_failure"]
    if summary["verdict"] == "pass":
        return None
    if culprit:
        return Failure("values", module_pattern(culprit["module"]), culprit["op"], culprit["kind"])
    check = next(c["name"] for c in summary["checks"] if not c["passed"])
    return Failure(check, module_pattern(first["module"]) if first else "", "", "")


def _without_numbers(text: str) -> str:
    return "".join("#" if c.isdigit() else c for c in text)


def shrink(
    scenario: Scenario, *, seconds: float = 60.0, on_try: Callable[[str, bool], None] = lambda what, same: None
) -> Shrunk | None:
    """The smallest failing scenario that `seconds` allow; None when the scenario does not fail.

    Reduces layers, then ranks, tokens and feature sizes, each to the smallest that still fails with the same check,
    module, op and diagnosis. on_try(what, failed alike) is called for every run.
    """
    started = time.perf_counter()
    failure = failure_of_run(scenario)
    if failure is None:
        return None
    found = Shrunk(scenario, failure)
    for reduce in (_layers, _ranks, _tokens, _ranks, *(_feature(name) for name in _FEATURES)):
        for what, candidate in reduce(found.scenario):
            if time.perf_counter() - started > seconds:
                break
            same = failure_of_run(candidate) == failure
            found.tried.append((what, same))
            on_try(what, same)
            if same:
                found.scenario = candidate
                break
    found.seconds = time.perf_counter() - started
    return found


def _with(scenario: Scenario, **changes: Any) -> Scenario:
    return Scenario.model_validate({**scenario.model_dump(), **changes})


def _layers(scenario: Scenario) -> Iterator[tuple[str, Scenario]]:
    for layers in range(1, scenario.config().num_hidden_layers):
        yield f"layers {layers}", _with(scenario, layers=layers)


def _ranks(scenario: Scenario) -> Iterator[tuple[str, Scenario]]:
    parallel = scenario.parallel
    for tp in range(2, parallel.tp):
        for ep in dict.fromkeys((None, parallel.ep and max(1, parallel.ep * tp // parallel.tp))):
            yield f"tp {tp}", _with(scenario, parallel={**parallel.model_dump(), "tp": tp, "ep": ep})


def _tokens(scenario: Scenario) -> Iterator[tuple[str, Scenario]]:
    tp = scenario.parallel.tp
    sizes = sorted({1, 2, 3, tp, tp + 1, 2 * tp, 2 * tp + 1, 4 * tp, scenario.tokens // 2})
    for tokens in sizes:
        if 0 < tokens < scenario.tokens:
            yield f"tokens {tokens}", _with(scenario, tokens=tokens)


def _feature(name: str) -> Callable[[Scenario], Iterator[tuple[str, Scenario]]]:
    def reduce(scenario: Scenario) -> Iterator[tuple[str, Scenario]]:
        if scenario.weights != "seed":  # a checkpoint has its own sizes
            return
        size = getattr(scenario.config(), name)
        for part in (8, 4, 2):
            smaller = size // part
            if smaller:
                yield f"{name} {smaller}", _with(scenario, model_sizes={**scenario.model_sizes, name: smaller})

    return reduce


def write_scenario(scenario: Scenario, path: Path) -> Path:
    """A scenario as a TOML file that `emulator run` reads; only what differs from the defaults."""
    data = scenario.model_dump(exclude_defaults=True, exclude={"name", "description"})
    data["model"] = _whole(data["model"])
    data["plan"] = _whole(scenario.plan)
    if scenario.passes:
        data["passes"] = [_whole_pass(spec) for spec in scenario.passes]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(_toml(data))
    return path


def commands(scenario: Scenario, path: Path) -> list[str]:
    """The lines that run it: on ranks of one process, and under torchrun."""
    ranks = scenario.parallel.tp * scenario.parallel.dp
    return [f"emulator run {path}", f"torchrun --nproc-per-node {ranks} -m emulator run {path}"]


def sizes(scenario: Scenario) -> dict[str, int]:
    """What is left: layers, ranks, tokens, and the feature sizes that were changed."""
    config = scenario.config()
    given = {"layers": config.num_hidden_layers, "tp": scenario.parallel.tp, "tokens": scenario.tokens}
    return {**given, **scenario.model_sizes}


def _whole(name: str) -> str:
    """Paths are written in full, since the file may be run from elsewhere."""
    return str(Path(name).resolve()) if Path(name).exists() and ("/" in name or "." in name) else name


def _whole_pass(spec: str) -> str:
    where, _, name = spec.rpartition(":")
    return f"{_whole(where)}:{name}"


def _toml(data: dict[str, Any]) -> str:
    plain = {k: v for k, v in data.items() if not isinstance(v, dict)}
    lines = [f"{k} = {_value(v)}" for k, v in plain.items() if v is not None]
    for name, table in data.items():
        if isinstance(table, dict) and table:
            lines += ["", f"[{name}]", *(f"{k} = {_value(v)}" for k, v in table.items() if v is not None)]
    return "\n".join(lines) + "\n"


def _value(value: Any) -> str:
    """A TOML value: JSON's strings, numbers, booleans and lists are TOML's too."""
    return TypeAdapter(Any).dump_json(value).decode()
