"""Errors in OpenAI's shape, as an HTTP response or as an event of a stream. Used by every route.

`Refused` is for what the server itself refuses; errors of the rest of the package are
`StrettoError`s and say their status and kind themselves. Any other exception is a bug: it is logged
with its stack, and the client gets a sentence without one."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import msgspec
from starlette.responses import Response

from stretto.errors import Busy, Gone, Invalid, StageDead, StrettoError, TooLong

log = logging.getLogger("stretto.server")

RETRY_SECONDS = {429: 1, 503: 2}


class Refused(StrettoError):
    """Turned down by the server itself, before the engine saw anything."""

    def __init__(
        self, status: int, message: str, *, kind: str = "invalid_request_error",
        code: str | None = None,
        param: str | None = None, headers: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.code = code
        self.param = param
        self.headers = dict(headers or {})


class ErrorBody(msgspec.Struct, frozen=True):
    message: str
    type: str
    param: str | None = None
    code: str | None = None


class Failure(msgspec.Struct, frozen=True):
    """The body of every error response, and of an error event in a stream."""

    error: ErrorBody


def describe(error: Exception) -> tuple[int, Failure]:
    """Status and body for whatever ended a request."""
    match error:
        case Refused():
            return error.status, Failure(ErrorBody(str(error), error.kind, error.param, error.code))
        case Invalid():
            code = "context_length_exceeded" if isinstance(error, TooLong) else "invalid_value"
            return error.status, Failure(ErrorBody(_words(error), error.kind, error.param, code))
        case Busy():
            return error.status, Failure(ErrorBody(_words(error), error.kind, None, "server_busy"))
        case Gone():  # only the engine ends a request this way while its client still listens
            message = "the request was cancelled by the server"
            return 503, Failure(ErrorBody(message, "server_error", None, "cancelled"))
        case StageDead():
            return error.status, Failure(ErrorBody(_words(error), error.kind, None, "stage_dead"))
        case StrettoError():
            log.error("request failed: %s", error, exc_info=error)
            return error.status, Failure(ErrorBody(_words(error), error.kind, None, "engine_error"))
        case _:
            log.error("request failed unexpectedly", exc_info=error)
            message = "the server failed to answer this request; its log says why"
            return 500, Failure(ErrorBody(message, "server_error", None, "internal_error"))


def _words(error: Exception) -> str:
    return str(error) or type(error).__name__


def respond(error: Exception) -> Response:
    status, body = describe(error)
    headers = dict(error.headers) if isinstance(error, Refused) else {}
    if status in RETRY_SECONDS:
        headers.setdefault("retry-after", str(RETRY_SECONDS[status]))
    return Response(msgspec.json.encode(body), status, headers, "application/json")
