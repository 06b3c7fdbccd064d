"""A spoken answer, written to a WAV file as it comes, with OpenAI's own client. Needs a server
(`stretto serve`) and `pip install openai`:

python examples/client_speech.py [URL [KEY]]"""

import base64
import sys
import wave

try:
    from openai import OpenAI, OpenAIError
except ImportError as error:
    sys.exit(f"{error}: pip install openai")

url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
key = sys.argv[2] if len(sys.argv) > 2 else "none"


def main() -> None:
    with OpenAI(base_url=f"{url}/v1", api_key=key) as client:
        answer = client.chat.completions.create(
            model="default",
            messages=[{"role": "user", "content": "What is a stretto?"}],
            modalities=["text", "audio"],
            audio={"voice": "alloy", "format": "pcm16"},  # OpenAI's names of voices work too
            max_tokens=40,
            extra_body={"max_audio_frames": 60},  # of 80 ms
            stream=True,
        )
        with wave.open("answer.wav", "wb") as file:
            file.setnchannels(1)
            file.setsampwidth(2)
            file.setframerate(24_000)
            for chunk in answer:
                audio = chunk.choices[0].delta.to_dict().get("audio", {})
                print(audio.get("transcript", ""), end="", flush=True)
                file.writeframes(base64.b64decode(audio.get("data", "")))
            print(f"\n{file.getnframes() / 24_000:.2f} s of speech in answer.wav")


try:
    main()
except OpenAIError as error:
    sys.exit(f"{url}: {error} (is `stretto serve` running there, and is the key right?)")
