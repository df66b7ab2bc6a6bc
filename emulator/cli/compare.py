"""The command `compare`: several plans on the same weights and batch."""

import json
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from emulator.cli.common import JsonOption, ScenarioArg, VariantOption, exit_codes, variants
from emulator.jobs.compare import compare
from emulator.report.compare import print_comparison
from emulator.report.run import progress_bar
from emulator.scenario import load_scenario, parse_requests


def register(app: typer.Typer) -> None:
    """Adds the command to the command line."""
    app.command("compare")(compare_plans)


def compare_plans(
    scenario: ScenarioArg,
    plans: Annotated[str, typer.Option(help="Plan names or TOML files, separated by commas.")],
    tp: Annotated[int | None, typer.Option(help="Tensor-parallel ranks.")] = None,
    dp: Annotated[int | None, typer.Option(help="Data-parallel ranks.")] = None,
    ep: Annotated[int | None, typer.Option(help="Expert-parallel ranks.")] = None,
    tokens: Annotated[int | None, typer.Option(help="Tokens of one prefill request per dp rank.")] = None,
    requests: Annotated[
        list[str] | None,
        typer.Option(help="A step's requests q:context,..., `/` between dp ranks; again for a next step."),
    ] = None,
    layers: Annotated[int | None, typer.Option(help="Decoder layers, fewer than the model has.")] = None,
    mode: Annotated[str | None, typer.Option(help="real tensors, or shape only.")] = None,
    dtype: Annotated[str | None, typer.Option(help="float64, float32 or bfloat16.")] = None,
    variant: VariantOption = None,
    seed: Annotated[int | None, typer.Option(help="Seed of weights and batch.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for each plan's traces. Default: none are kept.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Run several plans on the same weights and batch; compare values, FLOPs, bytes sent, memory and counts."""
    with exit_codes():
        loaded = load_scenario(scenario, {
            "parallel": {k: v for k, v in {"tp": tp, "dp": dp, "ep": ep}.items() if v is not None},
            "tokens": tokens, "step": [parse_requests(text).model_dump() for text in requests or ()] or None,
            "layers": layers, "mode": mode, "dtype": dtype, "variants": variants(variant), "seed": seed,
        })  # fmt: skip
        names = [name.strip() for name in plans.split(",") if name.strip()]
        with tempfile.TemporaryDirectory() as scratch, progress_bar(quiet=not sys.stderr.isatty()) as update:
            result = compare(
                loaded, names, out or Path(scratch), lambda plan, stage, share: update(f"{plan}: {stage}", share)
            )
        print(json.dumps(result)) if as_json else print_comparison(result)
    raise typer.Exit(0 if result["verdict"] == "pass" else 1)
