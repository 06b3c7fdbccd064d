"""How the server logs: the shared formats, and what uvicorn need not say. Set up by the command."""

from __future__ import annotations

import logging
import os

from stretto.config.server import LogFormat, LogLevel
from stretto.observe import logs
from stretto.server.http.exchange import CutConnection


class NotBroken(logging.Filter):
    """Drops uvicorn's errors about connections that we cut on purpose: these have been logged
    already."""

    def filter(self, record: logging.LogRecord) -> bool:
        return not (record.exc_info and isinstance(record.exc_info[1], CutConnection))


def set_up(format: LogFormat, level: LogLevel) -> None:
    logs.set_up(format, level)
    os.environ[logs.FORMAT] = format  # hosts and prompt workers write the same
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    logging.getLogger("uvicorn.error").addFilter(NotBroken())
