"""The command `memory`: what a rank's weights take, tensor by tensor, and why two settings differ."""

import json
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from emulator.errors import UsageError
from emulator.layout.plan import load_plan, plan_for
from emulator.memory.compare import compare
from emulator.memory.ledger import Ledger, Settings, build_ledger
from emulator.memory.parameters import raw_sizes
from emulator.memory.rules import load_accounting
from emulator.model.config import model_folder
from emulator.model.quant_description import find_description, read_description
from emulator.model.quantisation import load_scheme
from emulator.model.workload import phase_of
from emulator.report.memory import print_comparison, print_ledger, print_tensors
from emulator.scenario import Scenario, load_scenario

PHASES = ("prefill", "decode")
GROUPS = ("component", "category", "layer")
_SIZES = ("tp", "dp", "ep")
_CHANGES = ("plan", "rules", "quant", "phase", "description", *_SIZES)


def register(app: typer.Typer) -> None:
    """Adds the command to the command line."""
    app.command("memory")(memory)


def memory(
    scenario: Annotated[
        str, typer.Argument(help="A name under profiles/scenarios, a TOML file, or an HF model directory.")
    ],
    plan: Annotated[str | None, typer.Option(help="Plan name or TOML file.")] = None,
    quant: Annotated[
        str, typer.Option(help="Scheme under profiles/quant (none, w8a8, w8a8_dynamic, w8a8_w4a8_moe) or a TOML file.")
    ] = "none",
    rules: Annotated[
        str,
        typer.Option(
            help="Rules under profiles/accounting (tensorcast-old, tensorcast, engine, emulator) or a TOML file."
        ),
    ] = "engine",
    tp: Annotated[int | None, typer.Option(help="Tensor-parallel ranks.")] = None,
    dp: Annotated[int | None, typer.Option(help="Data-parallel ranks.")] = None,
    ep: Annotated[int | None, typer.Option(help="Expert-parallel ranks; default: all that divide the experts.")] = None,
    phase: Annotated[str | None, typer.Option(help="prefill or decode; default: of the scenario's first step.")] = None,
    variant: Annotated[list[str] | None, typer.Option(help="Plan variant key=value; repeatable.")] = None,
    layers: Annotated[int | None, typer.Option(help="Cut the model to this many layers.")] = None,
    dtype: Annotated[str | None, typer.Option(help="Dtype of float weights: float64, float32 or bfloat16.")] = None,
    rank: Annotated[int, typer.Option(help="Rank whose tensors are listed.")] = 0,
    mtp: Annotated[bool, typer.Option("--mtp", help="With the multi-token-prediction layers.")] = False,
    nz: Annotated[bool, typer.Option("--nz", help="Round int8 and bf16 weights up to fractal NZ blocks.")] = False,
    description: Annotated[
        Path | None,
        typer.Option(help="A quant_model_description.json; default: the one beside the model's config.json."),
    ] = None,
    group_by: Annotated[str, typer.Option(help="component, category or layer.")] = "component",
    tensors: Annotated[bool, typer.Option("--tensors", help="List every tensor.")] = False,
    against: Annotated[
        list[str] | None,
        typer.Option(
            "--compare",
            help="Explain the difference to these rules, or to settings plan=, rules=, quant=, tp=, dp=, ep=, phase=, "
            "description=, variant.KEY=; repeatable.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout and nothing else.")] = False,
) -> None:
    """Account for every byte of a rank's weights, without allocating any."""
    try:
        if group_by not in GROUPS:
            raise UsageError(f"--group-by {group_by}: expected {', '.join(GROUPS)}")
        given: dict[str, Any] = {
            "plan": plan, "parallel": {k: v for k, v in (("tp", tp), ("dp", dp), ("ep", ep)) if v is not None},
            "variants": _pairs(variant or (), "--variant"), "layers": layers, "dtype": dtype,
        }  # fmt: skip
        chosen = {"rules": rules, "quant": quant, "phase": phase, "description": description}
        first = settings_of(load_scenario(scenario, given), chosen, rank=rank, mtp=mtp, nz=nz)
        ledger = build_ledger(first)
        if not against:
            _show(ledger, first, scenario, group_by, tensors, as_json)
            return
        other, given = _changed(load_scenario(scenario, given), chosen, against)
        second = settings_of(other, given, rank=rank, mtp=mtp, nz=nz)
        comparison = compare(ledger, build_ledger(second), group_by)
        sides = [summary_of(comparison.first, first, scenario), summary_of(comparison.second, second, scenario)]
        if as_json:
            print(json.dumps({"first": sides[0], "second": sides[1], "difference": comparison.as_json()}))
        else:
            print_comparison(comparison, sides[0], sides[1], group_by)
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(2) from None


def settings_of(
    scenario: Scenario, chosen: Mapping[str, Any], *, rank: int = 0, mtp: bool = False, nz: bool = False
) -> Settings:
    """What a ledger is built from. chosen: rules, quant, phase and description (path or None) of the command line.

    Raises UsageError for unknown names, and sizes that do not fit.
    """
    phase = chosen.get("phase") or phase_of(scenario.steps()[0])
    if phase not in PHASES:
        raise UsageError(f"phase {phase!r}: expected {' or '.join(PHASES)}")
    config, folder = scenario.config(), model_folder(scenario.model)
    sizes = raw_sizes(folder)
    path = chosen.get("description") or find_description(folder)
    return Settings(
        config=config, plan=plan_for(scenario.plan, scenario.variants, phase), mesh=scenario.mesh(config),
        scheme=load_scheme(chosen["quant"]), rules=load_accounting(chosen["rules"]),
        names=(chosen["quant"], chosen["rules"]), dtype=scenario.torch_dtype, rank=rank,
        mtp_layers=max(1, sizes.get("num_nextn_predict_layers", 0)) if mtp or scenario.mtp else 0, nz=nz,
        description=read_description(Path(path)) if path else None, sizes=sizes,
    )  # fmt: skip


def summary_of(ledger: Ledger, settings: Settings, scenario: str) -> dict[str, Any]:
    """The ledger as one JSON object."""
    plan = settings.plan
    return {
        "scenario": scenario, "plan": plan.name, "variants": dict(plan.variants), "parallel": settings.mesh.describe(),
        "rank": settings.rank, "layers": settings.config.num_hidden_layers, "mtp_layers": settings.mtp_layers,
        "dtype": str(settings.dtype).removeprefix("torch."), "quant": settings.names[0], "rules": settings.names[1],
        "description": str(settings.description.path) if settings.description else None, "nz": settings.nz,
        "total_bytes": ledger.total_bytes, "peak_load_bytes": ledger.peak_load_bytes,
        "num_tensors": len(ledger.tensors), "components": ledger.by("component"), "categories": ledger.by("category"),
        "by_layer": ledger.by("layer"),
    }  # fmt: skip


def _show(ledger: Ledger, settings: Settings, scenario: str, group_by: str, tensors: bool, as_json: bool) -> None:
    summary = summary_of(ledger, settings, scenario)
    if not as_json:
        print_ledger(summary, ledger.by(group_by), group_by)
        if tensors:
            print_tensors(ledger)
        return
    if tensors:
        summary["tensors"] = [asdict(t) for t in ledger.tensors]
        summary["freed_tensors"] = [asdict(t) for t in ledger.loading]
    print(json.dumps(summary))


def _pairs(items: Iterable[str], option: str) -> dict[str, str]:
    pairs = [item.partition("=") for item in items]
    for key, equals, value in pairs:
        if not (key and equals and value):
            raise UsageError(f"{option} {key}{equals}{value}: expected key=value")
    return {key: value for key, _, value in pairs}


def _changed(scenario: Scenario, chosen: Mapping[str, Any], changes: list[str]) -> tuple[Scenario, dict[str, Any]]:
    """The other side of a comparison: the first one's settings with these changes. A word alone names rules; variants
    of the first side's plan stay where the other plan offers them, too."""
    given = _pairs((item if "=" in item else f"rules={item}" for item in changes), "--compare")
    variants = {k.removeprefix("variant."): v for k, v in given.items() if k.startswith("variant.")}
    unknown = [k for k in given if k not in _CHANGES and not k.startswith("variant.")]
    if unknown:
        raise UsageError(f"--compare {unknown[0]}=: expected one of {', '.join(_CHANGES)}, variant.KEY")
    wrong = [k for k in _SIZES if k in given and not given[k].isdigit()]
    if wrong:
        raise UsageError(f"--compare {wrong[0]}={given[wrong[0]]}: expected a whole number")
    plan = given.get("plan", scenario.plan)
    offered = load_plan(plan).variants
    kept = {k: v for k, v in scenario.variants.items() if k in offered}
    sizes = {k: int(given[k]) for k in _SIZES if k in given}
    other = scenario.model_copy(
        update={
            "plan": plan, "variants": {**kept, **variants}, "parallel": scenario.parallel.model_copy(update=sizes),
        }
    )  # fmt: skip
    return other, {k: given.get(k, v) for k, v in chosen.items()}
