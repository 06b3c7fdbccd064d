"""A question about a sound and a picture that are in memory.

python examples/hear_and_see.py [CHECKPOINT]"""

import sys

import numpy as np
from PIL import Image

from stretto import Engine, StrettoError

tone = np.sin(2 * np.pi * 440 * np.arange(16_000) / 16_000).astype(np.float32)
picture = Image.linear_gradient("L").convert("RGB")
question = [
    {"type": "audio", "data": tone, "sample_rate": 16_000},
    {"type": "image", "data": picture},
    {"type": "text", "text": "What do you hear and see?"},
]

try:
    with Engine(*sys.argv[1:2]) as engine:
        answer = engine.chat(
            [{"role": "user", "content": question}], modalities=["text"], max_text_tokens=20
        )
        used = answer.finished.usage
        sound, picture = used.audio_prompt_tokens, used.image_prompt_tokens
        print(f"{answer.text!r} ({sound} tokens of sound, {picture} of picture)")
except StrettoError as error:
    sys.exit(str(error))
