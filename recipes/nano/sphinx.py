"""A second opinion on what is heard: pocketsphinx (BSD) with the English model of its own wheel,
open vocabulary.

It shares nothing with Moonshine: other features, a dictionary and a trigram model instead of one
network. It mishears several times as much, so only comparisons with the teacher's own rate mean
something. Called by `score.py`."""

from __future__ import annotations

import numpy as np

from recipes.nano.audio import RATE, Floats, resample

HEARD_RATE = 16000


class Sphinx:
    def __init__(self) -> None:
        from pocketsphinx import Decoder

        self.decoder = Decoder(samprate=HEARD_RATE, loglevel="FATAL")

    def hear(self, samples: Floats) -> str:
        """What was said, from 24 kHz samples."""
        loud = resample(samples, HEARD_RATE, RATE)
        quiet = np.zeros(HEARD_RATE // 4, np.float32)
        loud = np.concatenate((quiet, loud / max(1e-6, float(np.abs(loud).max())) * 0.7, quiet))
        self.decoder.start_utt()
        self.decoder.process_raw((loud * 32767).astype(np.int16).tobytes(), full_utt=True)
        self.decoder.end_utt()
        found = self.decoder.hyp()
        return "" if found is None else str(found.hypstr)
