"""A host's process whose links take their switches from a file each time they are laid, so that
`links.py` can change them without loading the model again.

The file is named by STRETTO_BENCH_SWITCHES; it holds those of SWITCHES that are off. The others are
on, whatever the default is."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from stretto.messages.hosts import Connect, Listen, Unlink
from stretto.stage.host import process
from stretto.stage.links.endpoints import LinkEndpoints

FILE = "STRETTO_BENCH_SWITCHES"
SWITCHES = ("payload_stream", "async_h2d", "async_d2h", "zero_copy_encode")
"""Of `OverlapSwitches`, those of links."""

handle = LinkEndpoints.handle


def switched(endpoints: LinkEndpoints, message: Listen | Connect | Unlink) -> Any:
    off = json.loads(Path(os.environ[FILE]).read_text(encoding="utf-8"))
    settings = endpoints.settings
    switches = replace(settings.switches, **{name: name not in off for name in SWITCHES})
    endpoints.settings = replace(settings, switches=switches)
    return handle(endpoints, message)


if __name__ == "__main__":
    LinkEndpoints.handle = switched  # type: ignore[method-assign]
    process.main()
