"""One line a record, for people or as JSON for machines. Set up by the command, never by the library."""

from __future__ import annotations

import json
import logging
import sys
import time

from stretto.server.config import LogFormat, LogLevel
from stretto.server.exchange import Broken


class TextLines(logging.Formatter):
    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)-7s %(name)s: %(message)s", "%H:%M:%S")


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


class NotBroken(logging.Filter):
    """Connections that we cut on purpose have been logged by whoever did; uvicorn takes them for accidents."""

    def filter(self, record: logging.LogRecord) -> bool:
        return not (record.exc_info and isinstance(record.exc_info[1], Broken))


def set_up(format: LogFormat, level: LogLevel) -> None:
    out = logging.StreamHandler(sys.stderr)
    out.setFormatter(JsonLines() if format == "json" else TextLines())
    logging.basicConfig(level=level.upper(), handlers=[out], force=True)
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    logging.getLogger("uvicorn.error").addFilter(NotBroken())
