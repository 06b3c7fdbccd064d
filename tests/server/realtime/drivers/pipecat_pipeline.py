"""Run by test_clients.py and by `python -m tests.slow clients` in an interpreter that has
Pipecat: turns, a function, an interruption, memory."""

import asyncio
import sys
import wave
from typing import Any

from pipecat.adapters.schemas.function_schema import FunctionSchema
from pipecat.adapters.schemas.tools_schema import ToolsSchema
from pipecat.frames.frames import (
    EndFrame,
    Frame,
    InputAudioRawFrame,
    InterruptionFrame,
    LLMFullResponseEndFrame,
    LLMRunFrame,
    TTSAudioRawFrame,
)
from pipecat.pipeline.pipeline import Pipeline
from pipecat.pipeline.runner import PipelineRunner
from pipecat.pipeline.task import PipelineParams, PipelineTask
from pipecat.processors.aggregators.llm_context import LLMContext
from pipecat.processors.aggregators.llm_response_universal import LLMContextAggregatorPair
from pipecat.processors.frame_processor import FrameDirection, FrameProcessor
from pipecat.services.openai.realtime.events import (
    AudioConfiguration,
    AudioInput,
    SessionProperties,
    TurnDetection,
)
from pipecat.services.openai.realtime.llm import OpenAIRealtimeLLMService

RATE, PIECE = 24_000, 960


class Ear(FrameProcessor):
    def __init__(self) -> None:
        super().__init__()
        self.frames: asyncio.Queue[Frame] = asyncio.Queue()

    async def process_frame(self, frame: Frame, direction: FrameDirection) -> None:
        await super().process_frame(frame, direction)
        if isinstance(frame, TTSAudioRawFrame | LLMFullResponseEndFrame | InterruptionFrame):
            self.frames.put_nowait(frame)
        await self.push_frame(frame, direction)

    async def ends(self) -> int:
        """Bytes of sound until an answer is over."""
        size = 0
        while not isinstance(frame := await self.frames.get(), LLMFullResponseEndFrame):
            size += len(frame.audio) if isinstance(frame, TTSAudioRawFrame) else 0
        return size

    async def until(self, kind: type[Frame]) -> None:
        while not isinstance(await self.frames.get(), kind):
            pass


async def main(url: str, sound: bytes) -> None:
    turns = AudioConfiguration(
        input=AudioInput(turn_detection=TurnDetection(silence_duration_ms=500))
    )
    tools = ToolsSchema(
        [FunctionSchema("weather", "The weather", {"city": {"type": "string"}}, ["city"])]
    )
    service = OpenAIRealtimeLLMService(
        api_key="none",
        base_url=url,
        settings=OpenAIRealtimeLLMService.Settings(
            model="default",
            system_instruction="Be brief.",
            session_properties=SessionProperties(audio=turns),
        ),
    )
    called: list[str] = []

    async def weather(params: Any) -> None:
        called.append(params.arguments["city"])
        await params.result_callback({"sky": "sunny"})

    service.register_function("weather", weather)
    memory = LLMContextAggregatorPair(LLMContext([], tools=tools))
    ear = Ear()
    pipeline = Pipeline([memory.user(), service, ear, memory.assistant()])
    task = PipelineTask(
        pipeline, params=PipelineParams(audio_in_sample_rate=RATE, audio_out_sample_rate=RATE)
    )

    async def say() -> None:
        """At the pace of a microphone: Pipecat cancels a function that is called while it still
        handles the beginning of the turn."""
        for i in range(0, len(sound), PIECE):
            await task.queue_frame(InputAudioRawFrame(sound[i : i + PIECE], RATE, 1))
            await asyncio.sleep(PIECE / 2 / RATE)

    async def talk() -> None:
        await task.queue_frame(LLMRunFrame())  # bots speak first
        assert await ear.ends() > 20_000
        await say()
        assert await ear.ends() > 20_000
        sys.stdout.write("ok: a spoken turn and its spoken answer\n")
        await say()
        await ear.ends()
        assert await ear.ends() > 20_000
        assert called == ["Bonn"], called
        sys.stdout.write("ok: a spoken turn that calls a function\n")
        await say()
        await ear.until(TTSAudioRawFrame)
        await say()
        await ear.until(InterruptionFrame)
        sys.stdout.write("ok: barge-in\n")
        while await ear.ends() < 20_000:
            pass
        sys.stdout.write("ok: a turn after it, with the conversation's memory\n")
        await task.queue_frame(EndFrame())

    talking = asyncio.create_task(talk())
    talking.add_done_callback(
        lambda t: asyncio.ensure_future(task.cancel()) if t.exception() else None
    )
    await PipelineRunner(handle_sigint=False).run(task)
    await talking


if __name__ == "__main__":
    with wave.open(sys.argv[2]) as file:
        spoken = file.readframes(file.getnframes())
    asyncio.run(main(sys.argv[1].replace("http", "ws") + "/realtime", spoken))
