"""Features of prompts on their way into a host, piece by piece. Kept by its channel, on the thread
that reads it."""

from __future__ import annotations

import numpy as np

from stretto.errors import WireError
from stretto.messages.requests import MAX_BLOB, Features
from stretto.types import RequestId


class FeatureBuffer:
    """Features that came ahead of their requests, by request."""

    def __init__(self) -> None:
        # all of them, and how much has come
        self._parts: dict[RequestId, tuple[memoryview, int]] = {}

    def add(self, message: Features, piece: bytearray) -> None:
        if message.size > MAX_BLOB:
            raise WireError(f"{message.request}: {message.size} bytes of features")
        # Memory that is not cleared first: clearing hundreds of MiB would keep the stages' thread
        # from running.
        whole, at = self._parts.get(message.request) or (np.empty(message.size, np.uint8).data, 0)
        if len(whole) != message.size or at + len(piece) > len(whole):
            raise WireError(
                f"{message.request}: {at} + {len(piece)} bytes of features, of {message.size}"
            )
        whole[at : at + len(piece)] = piece
        self._parts[message.request] = (whole, at + len(piece))

    def take(self, request: RequestId) -> memoryview:
        whole, at = self._parts.pop(request, (memoryview(b""), 0))
        if at != len(whole):
            raise WireError(f"{request}: announced with {at} of {len(whole)} bytes of features")
        return whole

    def drop(self, request: RequestId) -> None:
        self._parts.pop(request, None)
