"""Parameters of a request for a talker and a vocoder, whatever their family. Imports no torch."""

from __future__ import annotations

import msgspec

from stretto.messages.requests import Positive, TokenId
from stretto.types import SamplingParams


class StageParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    pass


class FrameParams(StageParams, frozen=True):
    code0: SamplingParams
    residual: SamplingParams
    max_frames: Positive
    voice: str | None = None
    min_frames: int = 0
    first_frames: Positive = 1
    each_frames: Positive = 1
    ramp: int | None = 2
    want_codes: bool = False
    # read these tokens aloud; no other stage writes the text
    spoken: tuple[TokenId, ...] | None = None
    live: bool = False  # these are the first; others follow as messages


class VocoderParams(StageParams, frozen=True):
    pass
