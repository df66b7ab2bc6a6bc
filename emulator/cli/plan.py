"""The commands `plan show` and `plan check`."""

import json
from typing import Annotated

import typer
from pydantic import ValidationError

from emulator.cli.common import JsonOption, VariantOption, exit_codes, variants
from emulator.errors import UsageError, first_problem
from emulator.jobs.plan_check import check_plan
from emulator.layout.plan import load_plan
from emulator.report import run as report
from emulator.scenario import Scenario

PlanArg = Annotated[str, typer.Argument(help="Plan name or TOML file.")]

plan_app = typer.Typer(no_args_is_help=True, help="Look at plans, and check them against contracts.")


@plan_app.command("show")
def plan_show(name: PlanArg, variant: VariantOption = None) -> None:
    """Print a plan's table with the chosen variants."""
    with exit_codes():
        report.print_plan(load_plan(name, variants(variant)))


@plan_app.command("check")
def plan_check(
    name: PlanArg,
    contract: Annotated[str | None, typer.Option(help="Contract name or TOML file. Default: the plan's own.")] = None,
    model: Annotated[str, typer.Option(help="Model whose sizes are used.")] = "glm-5.1-mini",
    tp: Annotated[int, typer.Option(help="Tensor-parallel ranks.")] = 4,
    dp: Annotated[int, typer.Option(help="Data-parallel ranks.")] = 1,
    ep: Annotated[int | None, typer.Option(help="Expert-parallel ranks.")] = None,
    tokens: Annotated[int, typer.Option(help="Tokens of the step per dp rank.")] = 13,
    variant: VariantOption = None,
    as_json: JsonOption = False,
) -> None:
    """Say where a plan and a contract differ, from shapes alone: no ranks are run."""
    with exit_codes():
        given = {
            "model": model, "plan": name, "parallel": {"tp": tp, "dp": dp, "ep": ep}, "tokens": tokens,
            "variants": variants(variant),
        }  # fmt: skip
        try:
            scenario = Scenario.model_validate(given)
        except ValidationError as error:
            raise UsageError(f"plan check: {first_problem(error)}") from None
        result = check_plan(scenario, contract)
        print(json.dumps(result)) if as_json else report.print_plan_check(result)
    raise typer.Exit(0 if result["verdict"] == "pass" else 1)
