"""One question, answered in words and speech by the embedded model, or by a checkpoint:

python examples/hello.py [CHECKPOINT]"""

import sys

from stretto import Engine, StrettoError

try:
    with Engine(*sys.argv[1:2]) as engine:
        answer = engine.chat("What do you sound like?", max_text_tokens=40, max_frames=100, seed=1)
        answer.save("hello.wav")
        print(f"{answer.text!r}, {answer.seconds:.2f} s of speech in hello.wav")
except StrettoError as error:
    sys.exit(str(error))
