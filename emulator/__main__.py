"""`python -m emulator` and the `emulator` command."""

import signal
import sys

from emulator.cli import app


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that ranks and shared memory are cleaned up
    app(prog_name="emulator")


if __name__ == "__main__":
    main()
