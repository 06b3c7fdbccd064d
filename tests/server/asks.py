"""Requests that tests of the server send, and the sound that they get."""

from __future__ import annotations

from typing import Any

import numpy as np

CHAT, SPEECH = "/v1/chat/completions", "/v1/audio/speech"


ASK: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}]}


SOUND = [np.linspace(-1, 1, n, dtype=np.float32) for n in (1365, 1921, 1920, 7)]


ALOUD: dict[str, Any] = {**ASK, "modalities": ["text", "audio"]}
