"""Commands of the cost model on measured rows: price and calibrate."""

import json
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Column, Table

from emulator.cli.common import JsonOption, exit_codes
from emulator.cost.accuracy import Priced, Unpriced, by, price_rows
from emulator.cost.calibrate import Calibrated, Errors, calibrate, samples, with_coefficients
from emulator.cost.device import Device, load_device
from emulator.cost.profile_text import profile_text
from emulator.cost.rows import Row, read_rows
from emulator.errors import UsageError

RowsArg = Annotated[
    Path, typer.Argument(help="CSV of measured rows (op, params, measured_us, ...) or a profiler's kernel_details.")
]


def register(app: typer.Typer) -> None:
    """Adds the commands to the command line."""
    app.command(name="price")(price_command)
    app.command(name="calibrate")(calibrate_command)


def price_command(
    rows: RowsArg,
    device: Annotated[
        str | None,
        typer.Option(help="Profile name or TOML file: for rows that name no known device, or that name this one."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Predict every row of a file and compare with what was measured; rows without a price are listed with why."""
    with exit_codes():
        done, left = price_rows(read_rows(rows), device_of(load_device(device) if device else None))
    if as_json:
        print(json.dumps(_price_summary(done, left)))
    else:
        _print_prices(done, left)


def device_of(given: Device | None) -> Callable[[Row], Device]:
    """The profile of a row: the given one where the row names it or no known device, else the one it names."""
    known: dict[str, Device] = {}

    def find(row: Row) -> Device:
        if given is not None and (not row.device or row.device in given.names()):
            return given
        if not row.device:
            raise UsageError("the row names no device: give --device")
        if row.device not in known:
            try:
                known[row.device] = load_device(row.device)
            except UsageError:
                if given is None:
                    raise UsageError(f"{row.device!r} is no device with a profile: give --device") from None
                known[row.device] = given
        return known[row.device]

    return find


def _round(value: float | None, digits: int = 3) -> float | None:
    return None if value is None else round(value, digits)


def _price_summary(done: list[Priced], left: list[Unpriced]) -> dict[str, Any]:
    rows = [
        {
            "id": p.row.id, "device": p.row.device, "profile": p.profile, "op": p.row.op, "family": p.family,
            "kind": p.kind, "predicted_us": _round(p.seconds * 1e6),
            "measured_us": None if p.measured is None else _round(p.measured * 1e6),
            "error_pct": None if p.error is None else _round(100 * p.error, 2),
            "flops": p.flops, "bytes": p.bytes, "bound": p.bound, "setting": p.row.setting, "source": "analytic",
            "fitted_rows": p.fitted,
        }
        for p in done
    ]  # fmt: skip
    return {
        "rows": rows,
        "families": [
            {"family": name.split(" on ")[0], "profile": name.split(" on ")[1], **asdict(found)}
            for name, found in by(done, lambda p: f"{p.family} on {p.profile}").items()
        ],
        "kinds": [{"kind": name, **asdict(found)} for name, found in by(done, lambda p: p.kind).items()],
        "unpriceable": [{"id": u.row.id, "device": u.row.device, "op": u.row.op, "why": u.why} for u in left],
        "priced": len(done),
        "total": len(done) + len(left),
    }


def _print_prices(done: list[Priced], left: list[Unpriced]) -> None:
    console = _console()
    table = Table(
        "row",
        "device",
        "op",
        "family",
        *map(_right, ("predicted us", "measured us", "error %")),
        "bound",
        box=box.SIMPLE,
    )
    for p in done:
        measured = "-" if p.measured is None else f"{p.measured * 1e6:.2f}"
        error = "-" if p.error is None else f"{100 * p.error:+.1f}"
        table.add_row(p.row.id, p.profile, p.row.op, p.family, f"{p.seconds * 1e6:.2f}", measured, error, p.bound)
    console.print(table)
    _print_errors(console, "family", by(done, lambda p: f"{p.family} on {p.profile}"))
    _print_errors(console, "kind", by(done, lambda p: p.kind))
    if left:
        console.print(f"{len(left)} of {len(done) + len(left)} rows have no price:")
        for u in left:
            console.print(
                f"  {u.row.id} {u.row.op} ({u.row.device or 'no device'}): {u.why}", markup=False, soft_wrap=True
            )
    else:
        console.print(f"all {len(done)} rows are priced")


def _console() -> Console:
    """As wide as the terminal; wide enough for whole rows where it is none."""
    return Console() if sys.stdout.isatty() else Console(width=200)


def _right(title: str) -> Column:
    return Column(title, justify="right")


def _print_errors(console: Console, title: str, found: dict[str, Errors]) -> None:
    table = Table(title, *map(_right, ("rows", "MAPE %", "median %", "p90 %")), box=box.SIMPLE)
    for name, e in found.items():
        table.add_row(name, str(e.rows), f"{e.mape:.1f}", f"{e.median:.1f}", f"{e.p90:.1f}")
    console.print(table)


def calibrate_command(
    rows: RowsArg,
    device: Annotated[str, typer.Option(help="Profile to start from: a name or a TOML file.")],
    out: Annotated[Path | None, typer.Option(help="Where to write the calibrated profile.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Fit a profile's coefficients to the rows of its device, with the errors on rows left out."""
    with exit_codes():
        profile = load_device(device)
        used, others = _of_device(read_rows(rows), profile)
        if not used:
            raise UsageError(f"{rows}: no row is of {profile.name}; its names: {', '.join(sorted(profile.names()))}")
        results = calibrate(used, profile)
        if not results:
            why = samples(used, profile)[1][0][1]
            raise UsageError(f"{rows}: none of the {len(used)} rows of {profile.name} can be used: {why}")
        if out is not None:
            found = with_coefficients(profile, results)
            names = sorted({*profile.names()} - {out.stem})  # rows of this device are rows of the new profile too
            _write(out, profile_text(found.model_copy(update={"aliases": names})))
    _, left = samples(used, profile)
    if as_json:
        print(json.dumps(_calibration_summary(profile, results, left, others, out)))
    else:
        _print_calibration(profile, results, left, others, out)


def _of_device(rows: list[Row], profile: Device) -> tuple[list[Row], Counter[str]]:
    """Rows that name the profile or no device at all, and how many there are of others."""
    used = [row for row in rows if not row.device or row.device in profile.names()]
    return used, Counter(row.device for row in rows if row.device and row.device not in profile.names())


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text)
    except OSError as error:
        raise UsageError(f"{path}: cannot be written: {error.strerror}") from None


def _calibration_summary(
    profile: Device, results: list[Calibrated], left: list[tuple[Row, str]], others: Counter[str], out: Path | None
) -> dict[str, Any]:
    return {
        "device": profile.name,
        "families": [asdict(result) for result in results],
        "unused": [{"id": row.id, "op": row.op, "why": why} for row, why in left],
        "other_devices": dict(others),
        "out": None if out is None else str(out),
    }


def _print_calibration(
    profile: Device, results: list[Calibrated], left: list[tuple[Row, str]], others: Counter[str], out: Path | None
) -> None:
    console = _console()
    titles = ("rows", "fit MAPE %", "left out MAPE %", "median", "p90", "25 % split MAPE %", "median", "p90")
    table = Table("family", *map(_right, titles), title=profile.name, box=box.SIMPLE)
    for r in results:
        cells = [_three(r.left_out), _three(r.held_out)]
        table.add_row(r.key, str(r.in_sample.rows), f"{r.in_sample.mape:.1f}", *cells[0], *cells[1])
    console.print(table)
    for row, why in left:
        console.print(f"not used: {row.id} {row.op}: {why}", markup=False, soft_wrap=True)
    if others:
        console.print(f"{others.total()} rows are of other devices: {', '.join(others)}", markup=False, soft_wrap=True)
    if out is not None:
        console.print(f"wrote {out}", markup=False, soft_wrap=True)


def _three(errors: Errors | None) -> list[str]:
    return ["-"] * 3 if errors is None else [f"{v:.1f}" for v in (errors.mape, errors.median, errors.p90)]
