"""Speech of a text that is still being written: pieces go out as they come, sound comes back
meanwhile, into a file. Needs a server with a speech model (`stretto serve`) and `pip install
websockets`:

python examples/client_live_speech.py [URL [KEY]] < text"""

import asyncio
import contextlib
import json
import sys
import wave

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, WebSocketException

url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
key = sys.argv[2] if len(sys.argv) > 2 else "none"


async def write(socket: ClientConnection) -> None:
    """Word by word, as a language model would write it."""
    with contextlib.suppress(
        ConnectionClosed
    ):  # the speech has met its limit before the text ended
        await socket.send(
            json.dumps({"type": "session.config", "response_format": "pcm", "max_audio_frames": 60})
        )
        for word in sys.stdin.read().split(" "):
            await socket.send(json.dumps({"type": "input.text", "text": f"{word} "}))
        await socket.send(json.dumps({"type": "input.done"}))


async def main() -> None:
    address = url.replace("http", "ws", 1) + "/v1/audio/speech/stream"
    async with connect(address, additional_headers={"Authorization": f"Bearer {key}"}) as socket:
        done = False
        writing = asyncio.create_task(write(socket))
        with wave.open("speech.wav", "wb") as file:
            file.setnchannels(1)
            file.setsampwidth(2)
            file.setframerate(24_000)
            async for message in socket:
                if isinstance(message, bytes):
                    file.writeframes(message)
                    continue
                event = json.loads(message)
                if event["type"] == "error":
                    sys.exit(event["message"])
                done = done or event["type"] == "session.done"
            if not done:
                sys.exit("the server ended the connection before the speech was complete")
            print(f"{file.getnframes() / 24_000:.2f} s of speech in speech.wav")
        await writing


try:
    asyncio.run(main())
except (WebSocketException, OSError, ValueError) as error:
    sys.exit(f"{url}: {error} (is `stretto serve` running there, and is the key right?)")
