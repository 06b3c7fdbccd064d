"""One question, answered in words and speech. The built-in model's words mean nothing; name a checkpoint for others:

python examples/hello.py [CHECKPOINT]"""

import sys

from stretto import Engine

with Engine(*sys.argv[1:2]) as engine:
    answer = engine.chat("Hello! What do you sound like?", max_text_tokens=20, max_frames=25, seed=1)
    answer.save("hello.wav")
    print(f"{answer.text!r}, {answer.seconds:.2f} s of speech in hello.wav")
