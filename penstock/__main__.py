"""What `python -m penstock` and the installed command run: the command line, quiet when it is stopped as it loads."""

import sys


def main() -> None:
    """Load the command line and run it."""
    try:
        from penstock.cli import main as run

        run()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        raise SystemExit(130) from None


if __name__ == "__main__":
    main()
