"""Which of the model's voices a client means. Stock clients know OpenAI's names only, so these mean something too."""

from __future__ import annotations

from stretto.errors import Invalid
from stretto.orchestrator.api import ModelInfo
from stretto.server.schema import VoiceId

_HIGH, _LOW = ("chelsie",), ("ethan", "aiden")
ALIASES = {
    **dict.fromkeys(("alloy", "coral", "fable", "marin", "nova", "sage", "shimmer"), _HIGH),
    **dict.fromkeys(("ash", "ballad", "cedar", "echo", "onyx", "verse"), _LOW),
}


def find_voice(asked: str | VoiceId | None, info: ModelInfo, param: str) -> str | None:
    """The model's spelling of a voice; None is its default one."""
    if asked is None:
        return None
    name = asked.id if isinstance(asked, VoiceId) else asked
    known = {v.lower(): v for v in info.voices}
    if name.lower() in known:
        return known[name.lower()]
    if name.lower() in ALIASES:
        return next((known[v] for v in ALIASES[name.lower()] if v in known), info.default_voice)
    raise Invalid(f"there is no voice {name!r}; the model has {', '.join(info.voices)}", param)
