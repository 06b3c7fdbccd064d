"""`python -m stretto` is the command `stretto`. Importing it takes a while, during which it can be
told to stop."""

from __future__ import annotations

import sys

from stretto.signals import end_on_signals


def main() -> int:
    if sys.argv[1:2] == ["serve"]:
        end_on_signals()
    try:
        from stretto.cli import main as run
    except KeyboardInterrupt:
        return 130
    return run()


if __name__ == "__main__":
    sys.exit(main())
