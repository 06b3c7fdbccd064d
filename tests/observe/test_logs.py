"""Log lines as text and as JSON; warnings and uncaught exceptions are log lines too."""

from __future__ import annotations

import io
import json
import logging
import re
import sys
import warnings

import pytest

from stretto.observe import logs
from stretto.observe.logs import JsonLines
from stretto.server.http.exchange import CutConnection
from stretto.server.run import CutConnectionFilter


def test_lines_have_dates_and_warnings_are_lines_too(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    monkeypatch.setattr(sys, "stderr", out)
    logs.set_up("text", "info")
    logging.getLogger("stretto.x").info("hello")
    assert re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d INFO    stretto.x: hello", out.getvalue())
    logs.set_up("json", "info")
    out.truncate(0)
    out.seek(0)
    warnings.warn("careful", stacklevel=1)
    try:
        raise ValueError("the end")
    except ValueError:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
    first, second = (json.loads(line) for line in out.getvalue().splitlines())
    assert "careful" in first["message"]
    assert "the end" in second["stack"]


def test_json_log_lines() -> None:
    record = logging.LogRecord("stretto.access", logging.INFO, "", 1, "a=%s", ("b",), None)
    assert json.loads(JsonLines().format(record))["message"] == "a=b"
    record.fields = {"id": "req-1", "ms": 2.5}
    line = json.loads(JsonLines().format(record))
    assert (line["id"], line["ms"], line["level"]) == ("req-1", 2.5, "info")
    try:
        raise ValueError("why")
    except ValueError:
        record.exc_info = sys.exc_info()
    assert "ValueError: why" in json.loads(JsonLines().format(record))["stack"]
    assert CutConnectionFilter().filter(record)
    record.exc_info = (CutConnection, CutConnection("cut"), None)
    assert not CutConnectionFilter().filter(record)
