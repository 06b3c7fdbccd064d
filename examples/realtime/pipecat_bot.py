"""A Pipecat pipeline on a running `stretto serve`: speak a recording, save the answer.

    pip install "pipecat-ai[openai]" websockets
    python examples/realtime/pipecat_bot.py question.wav answer.wav      # 24 kHz, mono, 16 bits

In a bot, put a transport's input and output where `Microphone` and `Loudspeaker` are."""

import argparse
import asyncio
import wave

from pipecat.frames.frames import (
    EndFrame,
    Frame,
    InputAudioRawFrame,
    LLMFullResponseEndFrame,
    StartFrame,
    TTSAudioRawFrame,
    TTSTextFrame,
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

RATE, PIECE_S = 24_000, 0.02


class Microphone(FrameProcessor):
    """Speaks a recording once the pipeline runs."""

    def __init__(self, data: bytes) -> None:
        super().__init__()
        self.data = data

    async def process_frame(self, frame: Frame, direction: FrameDirection) -> None:
        await super().process_frame(frame, direction)
        await self.push_frame(frame, direction)
        if isinstance(frame, StartFrame):
            self.create_task(self.speak())

    async def speak(self) -> None:
        await asyncio.sleep(0.5)  # until the session is there
        size = int(PIECE_S * RATE) * 2
        for i in range(0, len(self.data), size):
            await self.push_frame(InputAudioRawFrame(self.data[i : i + size], RATE, 1))
            await asyncio.sleep(PIECE_S)


class Loudspeaker(FrameProcessor):
    """Keeps what is said, until the answer is over."""

    def __init__(self) -> None:
        super().__init__()
        self.sound, self.done = b"", asyncio.Event()

    async def process_frame(self, frame: Frame, direction: FrameDirection) -> None:
        await super().process_frame(frame, direction)
        if isinstance(frame, TTSAudioRawFrame):
            self.sound += frame.audio
        elif isinstance(frame, TTSTextFrame):
            print(frame.text, end="", flush=True)
        elif isinstance(frame, LLMFullResponseEndFrame):
            self.done.set()
        await self.push_frame(frame, direction)


def read(path: str) -> bytes:
    with wave.open(path) as file:
        assert (file.getframerate(), file.getnchannels(), file.getsampwidth()) == (RATE, 1, 2), (
            "24 kHz, mono, 16 bits"
        )
        return file.readframes(file.getnframes())


async def main(question: str, answer: str, url: str, key: str) -> None:
    turns = AudioConfiguration(input=AudioInput(turn_detection=TurnDetection()))
    service = OpenAIRealtimeLLMService(
        api_key=key,
        base_url=url,
        settings=OpenAIRealtimeLLMService.Settings(
            model="default",
            system_instruction="You are a friendly assistant. Be brief.",
            session_properties=SessionProperties(audio=turns),
        ),
    )
    memory = LLMContextAggregatorPair(LLMContext([]))
    loudspeaker = Loudspeaker()
    microphone = Microphone(read(question) + bytes(4 * RATE))  # two seconds of silence end the turn
    pipeline = Pipeline([microphone, memory.user(), service, loudspeaker, memory.assistant()])
    task = PipelineTask(
        pipeline, params=PipelineParams(audio_in_sample_rate=RATE, audio_out_sample_rate=RATE)
    )

    async def end() -> None:
        await loudspeaker.done.wait()
        await task.queue_frame(EndFrame())

    ending = asyncio.create_task(end())
    await PipelineRunner(handle_sigint=False).run(task)
    await ending
    print(f"\n{len(loudspeaker.sound) / 2 / RATE:.1f} s of answer")
    with wave.open(answer, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(RATE)
        file.writeframes(loudspeaker.sound)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("question")
    parser.add_argument("answer")
    parser.add_argument("--url", default="ws://127.0.0.1:8000/v1/realtime")
    parser.add_argument("--key", default="none")
    args = parser.parse_args()
    asyncio.run(main(args.question, args.answer, args.url, args.key))
