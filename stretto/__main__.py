"""`python -m stretto` is the command `stretto`. Importing it takes a while, during which it can be
told to stop. On other systems than Linux it says where it runs, before it imports what only Linux
has."""

from __future__ import annotations

import platform
import sys

from stretto.signals import end_on_signals

ELSEWHERE = (
    "stretto: it runs on Linux, and this is {system}: use WSL2 on Windows, or a container, in a "
    "clone of https://github.com/stretto-engine/stretto: docker build -f deploy/Containerfile "
    "--build-arg TORCH_INDEX=https://download.pytorch.org/whl/cpu -t stretto:cpu . && docker run "
    "--rm -p 127.0.0.1:8000:8000 stretto:cpu\n"
)


def main() -> int:
    if platform.system() != "Linux":
        sys.stderr.write(ELSEWHERE.format(system=platform.system()))
        return 1
    if sys.argv[1:2] == ["serve"]:
        end_on_signals()
    try:
        from stretto.cli import main as run
    except KeyboardInterrupt:
        return 130
    return run()


if __name__ == "__main__":
    sys.exit(main())
