"""The command line, as `rush` and as `python -m rush`."""

import sys

from rush.interrupts import defer_interrupts_in_imports


def main() -> None:
    defer_interrupts_in_imports()
    try:
        from rush.cli import main as run
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        sys.exit(130)
    run()


if __name__ == "__main__":
    main()
