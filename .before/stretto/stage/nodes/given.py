"""What an announcement may say, checked before anything on the device looks it up: there, one id that is in no table
would end all requests. Called by the thinker's and the talker's node, on the loop thread."""

from __future__ import annotations

from stretto.errors import Invalid
from stretto.orchestrator.messages import Admit


def check_ids(a: Admit, vocab: int) -> None:
    """Are all token ids of this vocabulary: the prompt's, those to be read aloud, and those with a bias?"""
    for ids in (a.prompt.ids, a.spoken or (), tuple(i for i, _ in a.logit_bias)):
        if ids and (min(ids) < 0 or max(ids) >= vocab):
            raise Invalid(f"{a.request}: token ids beyond the vocabulary of {vocab}", "messages")
