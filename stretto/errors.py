"""The exception tree. Each class says whose fault it is and what a client is told (HTTP status,
error type).

Catch where you can act. Everything that leaves the package on purpose is one of these."""

from __future__ import annotations


class StrettoError(Exception):
    """Root of everything raised on purpose."""

    status = 500
    kind = "server_error"


class Invalid(StrettoError):
    """The client's fault: bad input that will never work as sent. `param` names the offending
    field."""

    status = 400
    kind = "invalid_request_error"

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class MediaError(Invalid):
    """Audio, image or video that cannot be decoded or is outside the limits."""


class TooLong(Invalid):
    """The prompt (or prompt plus answer) does not fit the model."""


class Busy(StrettoError):
    """No capacity now; the same request may work later."""

    status = 429
    kind = "rate_limit_error"


class Gone(StrettoError):
    """The peer closed the stream or the request was cancelled."""

    status = 499
    kind = "cancelled"


class StageDead(StrettoError):
    """A stage (or its host) died or stalled with this request on it."""

    status = 503
    kind = "server_error"


class WireError(StrettoError):
    """A chunk that cannot be trusted: corrupt, out of order, of an unknown version."""

    status = 502
    kind = "server_error"


class CheckpointError(StrettoError):
    """A checkpoint that cannot be used; the message names the file and the tensor or field."""


class CpuError(StrettoError):
    """This machine's CPU cannot compute what was asked for."""


class Bug(StrettoError):
    """An invariant broke."""
