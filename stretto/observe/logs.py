"""Formats of log lines: text for people or JSON for machines, one line a record. Set up by commands
and by the processes that they start, never by the library.

Logging never blocks: in a process whose stderr is set up here, everything that is written to stderr
goes through a bounded queue (`stderr.py`)."""

from __future__ import annotations

import json
import logging
import sys
import time
from types import TracebackType
from typing import TextIO

from stretto.observe.stderr import DRAIN_S, QueuedStderr

FORMAT = "STRETTO_LOG_FORMAT"
"""The variable by which child processes know how to write: `text` or `json`."""


STDERR = 2
# 0x85, 0x2028 and 0x2029 break lines in some programs
_CONTROLS = (*range(0x20), *range(0x7F, 0xA0), 0x2028, 0x2029)
_ESCAPED = {
    code: chr(code).encode("unicode_escape").decode() for code in _CONTROLS if chr(code) != "\t"
}


class TextLines(logging.Formatter):
    """A message is one line, whatever a client put into it; only a stack trace has lines of its
    own."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)-7s %(name)s: %(message)s", "%Y-%m-%d %H:%M:%S")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - as logging calls it
        return super().formatMessage(record).translate(_ESCAPED)


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
        return json.dumps(line)  # in ASCII: Unicode has line breaks of its own


def set_up(format: str, level: str) -> None:
    """Everything that this process logs, warnings and its own death included, goes to stderr in one
    format."""
    formatter = JsonLines() if format == "json" else TextLines()
    out = logging.StreamHandler(_stderr(formatter))
    out.setFormatter(formatter)
    logging.basicConfig(level=level.upper(), handlers=[out], force=True)
    logging.captureWarnings(True)
    if format == "json":
        sys.excepthook = _log_death


def _log_death(
    kind: type[BaseException], error: BaseException, stack: TracebackType | None
) -> None:
    logging.getLogger("stretto").critical("the process ends", exc_info=(kind, error, stack))


def _stderr(formatter: logging.Formatter) -> TextIO | QueuedStderr:
    """The process's own stderr, from now on behind a queue; or whatever else stands in its
    place."""

    def notice(lines: int) -> str:
        words = "%d lines were dropped: stderr was not read fast enough"
        return formatter.format(
            logging.LogRecord(__name__, logging.WARNING, __file__, 0, words, (lines,), None)
        )

    own: TextIO | QueuedStderr = sys.stderr
    if isinstance(own, QueuedStderr):
        own.notice = notice
    elif sys.__stderr__ is not None and own is sys.__stderr__ and own.fileno() == STDERR:
        own.flush()
        sys.stderr = own = QueuedStderr(STDERR, notice)
    return own


def dropped() -> int:
    """Lines that this process did not write to stderr, because nobody read it or nobody could."""
    return sys.stderr.dropped if isinstance(sys.stderr, QueuedStderr) else 0


def drain(seconds: float = DRAIN_S) -> None:
    """Wait until all lines are written, but not for ever: for a process that ends by `os._exit`."""
    if isinstance(sys.stderr, QueuedStderr):
        sys.stderr.drain(seconds)
