"""A spoken question from a sound file, answered in words, with OpenAI's own client. Needs a server
(`stretto serve`) and `pip install openai`:

python examples/client_spoken_question.py QUESTION.wav [URL [KEY]]"""

import base64
import sys
from pathlib import Path

try:
    from openai import OpenAI, OpenAIError
except ImportError as error:
    sys.exit(f"{error}: pip install openai")

if len(sys.argv) < 2:
    sys.exit(
        "name a sound file: python examples/client_spoken_question.py QUESTION.wav [URL [KEY]]"
    )
question = Path(sys.argv[1])
url = sys.argv[2] if len(sys.argv) > 2 else "http://127.0.0.1:8000"
key = sys.argv[3] if len(sys.argv) > 3 else "none"


def main() -> None:
    sound = {
        "data": base64.b64encode(question.read_bytes()).decode(),
        "format": question.suffix[1:],
    }
    with OpenAI(base_url=f"{url}/v1", api_key=key) as client:
        answer = client.chat.completions.create(
            model="default",
            messages=[{"role": "user", "content": [{"type": "input_audio", "input_audio": sound}]}],
            max_tokens=40,
        )
        print(answer.choices[0].message.content)
        print(f"({answer.usage.prompt_tokens_details.audio_tokens} tokens of sound)")


try:
    main()
except OSError as error:
    sys.exit(f"{question}: cannot be read ({error.strerror})")
except OpenAIError as error:
    sys.exit(f"{url}: {error} (is `stretto serve` running there, and is the key right?)")
