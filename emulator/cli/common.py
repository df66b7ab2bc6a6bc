"""What the command modules share: exit codes, options and their parsing."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import typer

from emulator import launcher
from emulator.errors import RankError, UsageError
from emulator.runtime.failure import explain

ScenarioArg = Annotated[
    str, typer.Argument(help="A name under profiles/scenarios, a TOML file, or an HF model directory.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout and nothing else.")]
VariantOption = Annotated[list[str] | None, typer.Option(help="Plan variant key=value; repeatable.")]


@contextmanager
def exit_codes() -> Iterator[None]:
    """Turns errors into one clear line on stderr and an exit code."""
    try:
        yield
    except RankError as error:
        print(explain(error), file=sys.stderr)
        raise typer.Exit(3) from None
    except UsageError as error:
        if launcher.is_reporter():
            print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(2) from None


def variants(given: list[str] | None) -> dict[str, str]:
    """--variant key=value, as a mapping; UsageError for anything else."""
    pairs = [item.partition("=") for item in given or []]
    for key, equals, value in pairs:
        if not (key and equals and value):
            raise UsageError(f"--variant {key}{equals}{value}: expected key=value, such as embedding=replicated")
    return {key: value for key, _, value in pairs}
