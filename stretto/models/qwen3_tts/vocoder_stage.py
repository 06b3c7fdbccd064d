"""The vocoder's stage: the shared one, whose streams may have heard a cloned voice's reference
before."""

from __future__ import annotations

from hashlib import blake2b

import numpy as np

from stretto.errors import Invalid
from stretto.models.qwen3_tts.params import PrimedParams
from stretto.models.speech.params import VocoderParams
from stretto.models.speech.vocoder_stage import VocoderStage
from stretto.stage.vocoder import Primer


class PrimedVocoderStage(VocoderStage):
    params = PrimedParams

    def primer(self, params: VocoderParams) -> Primer | None:
        assert isinstance(params, PrimedParams)
        if not params.codes:
            return None
        groups = self.core.model.config.num_quantizers
        if len(params.codes) % (2 * groups):
            raise Invalid("this voice was made by another model", "voice")
        codes = np.frombuffer(params.codes, np.int16).astype(np.int64).reshape(-1, groups)
        return Primer(blake2b(params.codes, digest_size=16).digest(), codes)
