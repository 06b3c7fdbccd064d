"""The vocoder's stage: `stage.py`."""

from stretto.stage.codec.config import CodecConfig
from stretto.stage.codec.primers import Primer
from stretto.stage.codec.stage import AudioEmit, AudioOutput, CodecStage

__all__ = ["AudioEmit", "AudioOutput", "CodecConfig", "CodecStage", "Primer"]
