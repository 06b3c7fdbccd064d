"""Stretto: a serving engine for omni-modal models, all stages streamed and overlapped.

    from stretto import Engine

    with Engine() as engine:
        engine.chat("Hello!").save("hello.wav")

Names are loaded when they are first used: importing the package alone takes no time."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from stretto.api import Answer, AsyncEngine, Engine
    from stretto.config.engine import EngineConfig, HostSettings
    from stretto.config.placement import HostPlace
    from stretto.engine.events import (
        AudioChunk,
        CodeFrames,
        Event,
        Finished,
        TextDelta,
        TimelineSpan,
        TokenLogprob,
        Usage,
    )
    from stretto.engine.session import Item, Session
    from stretto.errors import (
        Busy,
        CheckpointError,
        Gone,
        Invalid,
        MediaError,
        StageDead,
        StrettoError,
        TooLong,
    )
    from stretto.family import ModelInfo
    from stretto.params import ChunkSizes, Params, SpeechStyle

_WHERE = {
    "stretto.api": ("Answer", "AsyncEngine", "Engine"),
    "stretto.params": ("ChunkSizes", "SpeechStyle", "Params"),
    "stretto.config.engine": ("EngineConfig", "HostSettings"),
    "stretto.config.placement": ("HostPlace",),
    "stretto.errors": (
        "Busy", "CheckpointError", "Gone", "Invalid", "MediaError", "StageDead", "StrettoError",
        "TooLong"
    ),
    "stretto.family": ("ModelInfo",),
    "stretto.engine.events": (
        "AudioChunk", "CodeFrames", "Event", "Finished", "TextDelta", "TimelineSpan",
        "TokenLogprob", "Usage"
    ),
    "stretto.engine.session": ("Item", "Session"),
}  # fmt: skip
_MODULES = {name: module for module, names in _WHERE.items() for name in names}

__all__ = [
    "Answer",
    "AsyncEngine",
    "AudioChunk",
    "Busy",
    "CheckpointError",
    "ChunkSizes",
    "CodeFrames",
    "Engine",
    "EngineConfig",
    "Event",
    "Finished",
    "Gone",
    "HostPlace",
    "HostSettings",
    "Invalid",
    "Item",
    "MediaError",
    "ModelInfo",
    "Params",
    "Session",
    "SpeechStyle",
    "StageDead",
    "StrettoError",
    "TextDelta",
    "TimelineSpan",
    "TokenLogprob",
    "TooLong",
    "Usage",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return __all__
