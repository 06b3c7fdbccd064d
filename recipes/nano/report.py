"""What a run says and what it leaves behind: progress lines, gates, and one JSON of minutes and
quality per step."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

_STARTED = time.monotonic()


def say(step: str, text: str) -> None:
    print(f"[{time.monotonic() - _STARTED:7.1f}] {step}: {text}", flush=True)


def gate(step: str, what: str, passed: bool) -> bool:
    say(step, f"gate {'passed' if passed else 'FAILED'}: {what}")
    return passed


def note(work: Path, step: str, **values: Any) -> None:
    """Keep what a step took and reached; the model card is made from it."""
    path = work / f"report-{step}.json"
    path.write_text(json.dumps(values, indent=1, default=str) + "\n", encoding="utf-8")
    say(step, f"wrote {path.name}: {json.dumps(values, default=str)[:1500]}")
