"""The core of a vocoder's stage: `core.py`."""

from stretto.stage.codec.config import CodecConfig
from stretto.stage.codec.core import AudioOutput, VocoderCore
from stretto.stage.codec.primers import Primer

__all__ = ["AudioOutput", "CodecConfig", "Primer", "VocoderCore"]
