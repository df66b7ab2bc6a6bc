"""The commands `run`, `inject`, `check` and `profiles`."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from emulator import launcher, profiles
from emulator.cli import export as cli_export
from emulator.cli import replay as cli_replay
from emulator.cli.common import JsonOption, ScenarioArg, exit_codes, variants
from emulator.errors import UsageError
from emulator.faults.catalogue import FAULTS, find_fault
from emulator.jobs import job, matrix, shrink
from emulator.report import faults as report_faults
from emulator.report import run as report
from emulator.scenario import Scenario, default_out_dir, load_scenario, parse_requests
from emulator.trace.record import read_trace, trace_files
from emulator.verify.contract import check_folder, load_contract


def run(
    scenario: ScenarioArg,
    plan: Annotated[str | None, typer.Option(help="Plan name or TOML file.")] = None,
    tp: Annotated[int | None, typer.Option(help="Tensor-parallel ranks.")] = None,
    dp: Annotated[int | None, typer.Option(help="Data-parallel ranks, each with its own requests.")] = None,
    ep: Annotated[int | None, typer.Option(help="Expert-parallel ranks; default: all that divide the experts.")] = None,
    tokens: Annotated[int | None, typer.Option(help="Tokens of the prefill request.")] = None,
    requests: Annotated[
        list[str] | None,
        typer.Option(help="A step's requests q:context,q:context, `/` between dp ranks; repeat for more steps."),
    ] = None,
    layers: Annotated[int | None, typer.Option(help="Cut the model to this many layers.")] = None,
    mode: Annotated[str | None, typer.Option(help="real (tensors and values) or shape (full size, no values).")] = None,
    dtype: Annotated[str | None, typer.Option(help="float64, float32 or bfloat16.")] = None,
    variant: Annotated[list[str] | None, typer.Option(help="Plan variant key=value; repeatable.")] = None,
    graph_pass: Annotated[
        list[str] | None,
        typer.Option("--pass", help="FX pass, module:callable or file.py:callable; repeatable."),
    ] = None,
    contract: Annotated[str | None, typer.Option(help="Contract name or TOML file, in place of the plan's.")] = None,
    no_static_check: Annotated[bool, typer.Option("--no-static-check", help="Run a plan that breaks a rule.")] = False,
    seed: Annotated[int | None, typer.Option(help="Seed of weights and token ids.")] = None,
    weights: Annotated[str | None, typer.Option(help="seed, or a local HF safetensors checkpoint directory.")] = None,
    quant: Annotated[
        str | None,
        typer.Option(help="Quantise the weights: none, w8a8, w8a8_dynamic, w8a8_w4a8_moe, or a scheme's TOML file."),
    ] = None,
    attention: Annotated[
        str | None,
        typer.Option(help="What attention multiplies, whatever --quant: float (the dtype), or int8 (dense MLA only)."),
    ] = None,
    mtp: Annotated[bool, typer.Option("--mtp", help="Run the multi-token-prediction layer behind the model.")] = False,
    latent_norm_eps: Annotated[
        str | None, typer.Option(help="eps of the latent norms: hf (1e-6 always) or config (as engines do).")
    ] = None,
    timeout: Annotated[
        float | None, typer.Option(help="Seconds without progress after which a rank has stalled.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="Price the run on this device profile, as `replay` does.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for traces and summary.json.")] = None,
    shrunk: Annotated[
        bool, typer.Option("--shrink", help="On failure, find the smallest scenario that fails in the same way.")
    ] = False,
    page: Annotated[
        bool, typer.Option("--report", help="Write report.html beside the traces, also when a rank failed.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Run a scenario on ranks and check every boundary, shape, collective count and value."""

    def load() -> Scenario:
        given: dict[str, Any] = {
            "plan": plan, "parallel": {"tp": tp, "dp": dp, "ep": ep}, "tokens": tokens, "layers": layers,
            "step": [parse_requests(text).model_dump() for text in requests or ()] or None,
            "mode": mode, "dtype": dtype, "variants": variants(variant), "seed": seed, "weights": weights,
            "timeout": timeout, "passes": graph_pass or None, "contract": contract,
            "static_check": False if no_static_check else None, "latent_norm_eps": latent_norm_eps, "device": device,
            "quant": quant, "attention": attention, "mtp": mtp or None,
        }  # fmt: skip
        given["parallel"] = {k: v for k, v in given["parallel"].items() if v is not None}
        if launcher.under_torchrun():
            given["parallel"] = launcher.sizes_from_world(given["parallel"])
        return load_scenario(scenario, given)

    _run_and_exit(load, out, shrunk, as_json, page)


def _run_and_exit(
    load: Callable[[], Scenario], out: Path | None, shrunk: bool, as_json: bool, page: bool = False
) -> None:
    """Runs a scenario, writes its page and shrinks it if that was asked for, and leaves with the exit code."""
    loaded: Scenario | None = None
    shrunk = shrunk and not launcher.under_torchrun()
    try:
        with exit_codes():
            loaded = load()
            summary = _run(loaded, out or default_out_dir(loaded), as_json)
    except typer.Exit as refused:  # by the static check, or by a rank: a smaller one is as welcome
        if page and loaded is not None and refused.exit_code == 3 and launcher.is_reporter():
            cli_export.write_page(out or default_out_dir(loaded), loaded.device, quiet=as_json)
        if shrunk and loaded is not None:
            report.print_shrunk(_shrink(loaded, out))
        raise refused
    if summary is None:  # under torchrun only rank 0 reports
        return
    if page:
        cli_export.write_page(out or default_out_dir(loaded), loaded.device, quiet=as_json)
    if shrunk and summary["verdict"] == "fail":
        summary["shrunk"] = _shrink(loaded, out)
        if not as_json:
            report.print_shrunk(summary["shrunk"])
    if as_json:
        print(json.dumps(summary))
    raise typer.Exit(0 if summary["verdict"] == "pass" else 1)


def _run(loaded: Scenario, folder: Path, as_json: bool) -> dict[str, Any] | None:
    if launcher.under_torchrun():
        summary = launcher.run_under_torchrun(loaded, folder)
    else:
        with report.progress_bar(quiet=not sys.stderr.isatty()) as update:
            summary = job.run(loaded, folder, update)
    if summary is not None and not as_json:
        report.print_summary(summary)
        if summary["cost"]:
            cli_replay.print_cost(summary["cost"])
    return summary


def _shrink(loaded: Scenario, out: Path | None) -> dict[str, Any] | None:
    """Shrinks a failing scenario and writes the small one beside the traces."""
    with report.shrink_progress(quiet=not sys.stderr.isatty()) as update:
        found = shrink.shrink(loaded, on_try=update)
    if found is None:
        return None
    path = shrink.write_scenario(found.scenario, (out or default_out_dir(loaded)) / "shrunk.toml")
    return {
        "failure": str(found.failure), "scenario": str(path), "commands": shrink.commands(found.scenario, path),
        "sizes": shrink.sizes(found.scenario), "runs": len(found.tried), "seconds": round(found.seconds, 1),
    }  # fmt: skip


def inject(
    fault: Annotated[str | None, typer.Argument(help="Name of a fault; --list shows them.")] = None,
    scenario: Annotated[str | None, typer.Argument(help="Scenario to run with it, as for `run`.")] = None,
    listed: Annotated[bool, typer.Option("--list", help="List the faults.")] = False,
    whole: Annotated[bool, typer.Option("--matrix", help="Run every fault on models x tp x tokens.")] = False,
    only: Annotated[list[str] | None, typer.Option("--fault", help="Matrix: only this fault; repeatable.")] = None,
    model: Annotated[list[str] | None, typer.Option(help="Matrix: only this model; repeatable.")] = None,
    plan: Annotated[str | None, typer.Option(help="Plan; default: the one that the fault is made for.")] = None,
    tp: Annotated[list[int] | None, typer.Option(help="Tensor-parallel ranks; repeatable for the matrix.")] = None,
    ep: Annotated[int | None, typer.Option(help="Expert-parallel ranks.")] = None,
    tokens: Annotated[list[int] | None, typer.Option(help="Tokens; repeatable for the matrix.")] = None,
    requests: Annotated[
        list[str] | None, typer.Option(help="A ragged batch q:context,q:context; repeatable for the matrix.")
    ] = None,
    layers: Annotated[int | None, typer.Option(help="Cut the model to this many layers.")] = None,
    variant: Annotated[list[str] | None, typer.Option(help="Plan variant key=value; repeatable.")] = None,
    dtype: Annotated[str | None, typer.Option(help="float64, float32 or bfloat16.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of weights and token ids.")] = None,
    timeout: Annotated[float | None, typer.Option(help="Seconds after which a rank has stalled.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for traces and summary.json.")] = None,
    shrunk: Annotated[
        bool, typer.Option("--shrink", help="Find the smallest scenario in which the fault shows in the same way.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Run a scenario with a fault on purpose, list the faults, or show for all of them what finds them."""
    with exit_codes():
        if listed:
            report_faults.print_faults(list(FAULTS.values()))
            return
        if whole:
            failed = _matrix(
                list(matrix.cells(only or ([fault] if fault else None), model, tp, tokens, requests)), as_json
            )
            raise typer.Exit(1 if failed else 0)
        if fault is None or scenario is None or len(tp or [0]) != 1 or len(tokens or [0]) != 1:
            raise UsageError("inject takes a fault and a scenario, with one --tp and --tokens; or --list, or --matrix")

    def load() -> Scenario:
        given = {
            "plan": plan, "parallel": {"tp": tp[0] if tp else None, "ep": ep}, "layers": layers,
            "tokens": tokens[0] if tokens else None, "dtype": dtype, "variants": variants(variant), "seed": seed,
            "step": [parse_requests(text).model_dump() for text in requests or ()] or None, "timeout": timeout,
        }  # fmt: skip
        return matrix.faulty_scenario(find_fault(str(fault)), str(scenario), given)

    _run_and_exit(load, out, shrunk, as_json)


def _matrix(todo: list[matrix.Cell], as_json: bool) -> bool:
    """Runs the matrix and prints it; whether a cell was missed, or detected against its claim."""
    outcomes: list[matrix.Outcome] = []
    with report.progress_bar(quiet=not sys.stderr.isatty()) as update:
        for cell in todo:
            update(f"{cell.fault} on {cell.model} tp {cell.tp}, {cell.tokens} tokens", len(outcomes) / len(todo))
            outcomes.append(matrix.run_cell(cell))
    print(json.dumps(matrix.as_json(outcomes))) if as_json else report_faults.print_matrix(outcomes)
    return any(o.state in ("missed", "unexpected") for o in outcomes)


def check(
    trace_dir: Annotated[Path, typer.Argument(help="Folder with rank_<r>.jsonl files.")],
    contract: Annotated[str, typer.Option(help="Contract name or TOML file.")],
    step: Annotated[
        int | None, typer.Option(help="Only this step of the run (decode steps have another contract).")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Check the traces of an earlier run against a contract."""
    with exit_codes():
        loaded = load_contract(contract)
        result = check_folder(loaded, [read_trace(path) for path in trace_files(trace_dir)], step)
        print(json.dumps(result)) if as_json else report.print_check(contract, result)
    raise typer.Exit(0 if result["verdict"] == "pass" else 1)


def list_profiles() -> None:
    """List the models, plans, contracts and scenarios that come with the package."""
    console = Console()
    for kind in profiles.KINDS:
        console.print(f"[bold]{kind}[/bold]: " + ", ".join(profiles.names(kind)), soft_wrap=True)


def register(app: typer.Typer) -> None:
    """Adds the commands to the command line."""
    app.command()(run)
    app.command()(inject)
    app.command()(check)
    app.command("profiles")(list_profiles)
