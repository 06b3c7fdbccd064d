"""A text read aloud in each of the model's voices.

python examples/read_aloud.py [CHECKPOINT]"""

import sys

from stretto import Engine, StrettoError

try:
    with Engine(*sys.argv[1:2]) as engine:
        for voice in engine.info.voices:
            answer = engine.read_aloud(
                "Each voice enters before the last one has finished.", voice=voice, max_frames=100
            )
            answer.save(f"{voice}.wav")
            print(f"{voice}.wav: {answer.seconds:.2f} s")
except StrettoError as error:
    sys.exit(str(error))
