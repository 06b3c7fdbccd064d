"""Pipecat: transcription by segments, and by a realtime transcription session."""

import asyncio
import sys
import wave
from typing import Any

from pipecat.frames.frames import (
    EndFrame,
    ErrorFrame,
    Frame,
    InputAudioRawFrame,
    StartFrame,
    TranscriptionFrame,
    VADUserStartedSpeakingFrame,
    VADUserStoppedSpeakingFrame,
)
from pipecat.pipeline.pipeline import Pipeline
from pipecat.pipeline.runner import PipelineRunner
from pipecat.pipeline.task import PipelineParams, PipelineTask
from pipecat.processors.frame_processor import FrameDirection, FrameProcessor
from pipecat.services.openai.stt import OpenAIRealtimeSTTService, OpenAISTTService

RATE, PIECE = 24_000, 960
PATIENCE_S = 120


class Ear(FrameProcessor):
    def __init__(self) -> None:
        super().__init__()
        self.started = asyncio.Event()
        self.words: asyncio.Queue[str] = asyncio.Queue()

    async def process_frame(self, frame: Frame, direction: FrameDirection) -> None:
        await super().process_frame(frame, direction)
        if isinstance(frame, StartFrame):
            self.started.set()
        elif isinstance(frame, TranscriptionFrame):
            self.words.put_nowait(frame.text)
        await self.push_frame(frame, direction)


async def hear(service: Any, data: bytes, marks: bool) -> None:
    """`marks`: the pipeline says where speech begins and ends."""
    ear = Ear()
    params = PipelineParams(audio_in_sample_rate=RATE)
    task = PipelineTask(Pipeline([service, ear]), params=params)
    failures: list[str] = []

    @task.event_handler("on_pipeline_error")
    async def failed(_: PipelineTask, frame: ErrorFrame) -> None:
        failures.append(frame.error)
        ear.words.put_nowait("")

    async def speak() -> None:
        try:
            await ear.started.wait()
            await asyncio.sleep(1)  # until its session is there
            if marks:
                await task.queue_frame(VADUserStartedSpeakingFrame())
            for i in range(0, len(data), PIECE):
                await task.queue_frame(InputAudioRawFrame(data[i : i + PIECE], RATE, 1))
                await asyncio.sleep(PIECE / 2 / RATE)
            if marks:
                await task.queue_frame(VADUserStoppedSpeakingFrame())
            async with asyncio.timeout(PATIENCE_S):
                await ear.words.get()
        except TimeoutError:
            failures.append("no transcript came")
        await task.queue_frame(EndFrame())

    speaking = asyncio.create_task(speak())
    await PipelineRunner(handle_sigint=False).run(task)
    await speaking
    assert not failures, failures


async def main(url: str, question: str) -> None:
    with wave.open(question) as file:
        data = file.readframes(file.getnframes()) + bytes(4 * RATE)
    plain = OpenAISTTService(
        base_url=url, api_key="none", settings=OpenAISTTService.Settings(model="default")
    )
    await hear(plain, data, marks=True)
    print("ok: transcription")
    live = OpenAIRealtimeSTTService(
        base_url=url.replace("http", "ws") + "/realtime",
        api_key="none",
        settings=OpenAIRealtimeSTTService.Settings(model="gpt-4o-transcribe"),
        turn_detection=None,  # the server finds the turns
    )
    await hear(live, data, marks=False)
    print("ok: realtime transcription, turns by the server")
    marked = OpenAIRealtimeSTTService(
        base_url=url.replace("http", "ws") + "/realtime",
        api_key="none",
        settings=OpenAIRealtimeSTTService.Settings(model="gpt-4o-transcribe"),
        turn_detection=False,
    )
    await hear(marked, data, marks=True)
    print("ok: realtime transcription, turns by the pipeline")


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:3]))
