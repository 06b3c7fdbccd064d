"""The core of a vocoder's stage: `core.py`."""

from stretto.stage.vocoder.config import CodecConfig
from stretto.stage.vocoder.core import VocoderCore, VocoderOutput
from stretto.stage.vocoder.streams import Primer

__all__ = ["CodecConfig", "Primer", "VocoderCore", "VocoderOutput"]
