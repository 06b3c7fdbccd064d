"""One line a record, for people or as JSON for machines. Set up by commands and by the processes that they start, never
by the library."""

from __future__ import annotations

import json
import logging
import sys
import time
from types import TracebackType

FORMAT = "STRETTO_LOG_FORMAT"
"""The variable that tells child processes how to write: `text` or `json`."""


class TextLines(logging.Formatter):
    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)-7s %(name)s: %(message)s", "%Y-%m-%d %H:%M:%S")


class JsonLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, object] = {
            "time": f"{stamp}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
        }
        fields = record.__dict__.get("fields")  # what a log call passed as `extra`
        line |= fields if isinstance(fields, dict) else {"message": record.getMessage()}
        if record.exc_info:
            line["stack"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


def set_up(format: str, level: str) -> None:
    """Everything that this process logs, warnings and its own death included, goes to stderr in one format."""
    out = logging.StreamHandler(sys.stderr)
    out.setFormatter(JsonLines() if format == "json" else TextLines())
    logging.basicConfig(level=level.upper(), handlers=[out], force=True)
    logging.captureWarnings(True)
    if format == "json":
        sys.excepthook = _log_death


def _log_death(kind: type[BaseException], error: BaseException, stack: TracebackType | None) -> None:
    logging.getLogger("stretto").critical("the process ends", exc_info=(kind, error, stack))
