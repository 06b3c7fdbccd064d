"""What an announcement may say, checked before anything on the device looks it up: there, one id
that is in no table would end all requests. Called by the thinker's and the talker's stage, on the
loop thread."""

from __future__ import annotations

from collections.abc import Sequence

from stretto.errors import Invalid
from stretto.types import RequestId


def check_ids(request: RequestId, vocab: int, *sequences: Sequence[int]) -> None:
    """Are all these token ids of this vocabulary?"""
    for ids in sequences:
        if ids and (min(ids) < 0 or max(ids) >= vocab):
            raise Invalid(f"{request}: token ids beyond the vocabulary of {vocab}", "messages")
