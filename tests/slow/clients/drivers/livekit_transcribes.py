"""LiveKit Agents: transcription of a recording, and a realtime transcription session."""

import asyncio
import sys
import wave

from livekit import rtc
from livekit.agents import stt
from livekit.agents.utils import http_context
from livekit.plugins import openai

RATE, PIECE = 24_000, 4800
PATIENCE_S = 120


async def main(url: str, question: str) -> None:
    http_context._new_session_ctx()
    with wave.open(question) as file:
        data = file.readframes(file.getnframes()) + bytes(4 * RATE)
    frames = [
        rtc.AudioFrame(piece, RATE, 1, len(piece) // 2)
        for piece in (data[i : i + PIECE] for i in range(0, len(data), PIECE))
    ]
    plain = openai.STT(model="default", base_url=url, api_key="none", use_realtime=False)
    told = await plain.recognize(rtc.combine_audio_frames(frames))
    assert told.type == stt.SpeechEventType.FINAL_TRANSCRIPT
    print("ok: transcription")
    live = openai.STT(model="gpt-4o-transcribe", base_url=url, api_key="none", use_realtime=True)
    async with asyncio.timeout(PATIENCE_S), live.stream() as stream:

        async def speak() -> None:
            for frame in frames:
                stream.push_frame(frame)
                await asyncio.sleep(PIECE / 2 / RATE)

        speaking = asyncio.create_task(speak())
        async for event in stream:
            if event.type == stt.SpeechEventType.FINAL_TRANSCRIPT:
                break
        await speaking
    print("ok: realtime transcription")
    await plain.aclose()
    await live.aclose()
    await http_context._close_http_ctx()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:3]))
