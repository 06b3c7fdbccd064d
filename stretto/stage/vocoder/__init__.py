"""The core of a vocoder's stage: `core.py`."""

from stretto.stage.vocoder.config import CodecConfig
from stretto.stage.vocoder.core import AudioOutput, VocoderCore
from stretto.stage.vocoder.streams import Primer

__all__ = ["AudioOutput", "CodecConfig", "Primer", "VocoderCore"]
