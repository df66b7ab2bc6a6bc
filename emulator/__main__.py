"""`python -m emulator` and the `emulator` command."""

from emulator.cli import app


def main() -> None:
    app(prog_name="emulator")


if __name__ == "__main__":
    main()
