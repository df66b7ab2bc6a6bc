"""The command line: commands only, no logic.

Exit codes: 0 all checks hold; 1 a check failed; 2 bad input; 3 a rank failed.
"""

import typer

from emulator.cli import compare, cost, export, memory, replay, run
from emulator.cli.plan import plan_app

app = typer.Typer(
    add_completion=False, no_args_is_help=True, rich_markup_mode=None, pretty_exceptions_enable=False,
    help="Runs DSA models on emulated tensor-parallel ranks and proves their token layouts.",
)  # fmt: skip
for _commands in (run, compare, replay, export, memory, cost):
    _commands.register(app)
app.add_typer(plan_app, name="plan")
