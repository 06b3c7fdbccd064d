"""A Pipecat pipeline on a running `stretto serve`: speak a recording, save the answer.

    pip install "pipecat-ai[openai]" websockets
    python examples/realtime/pipecat_bot.py question.wav answer.wav      # 24 kHz, mono, 16 bits

In a bot, put a transport's input and output where `Microphone` and `Loudspeaker` are."""

import asyncio
import sys

from recording import PATIENCE_S, RATE, Arguments, read_arguments

try:
    from pipecat.frames.frames import (
        EndFrame,
        ErrorFrame,
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
except ImportError as error:
    sys.exit(f"{error}: pip install 'pipecat-ai[openai]' websockets")

PIECE_S = 0.02


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


async def main(args: Arguments) -> None:
    turns = AudioConfiguration(input=AudioInput(turn_detection=TurnDetection()))
    service = OpenAIRealtimeLLMService(
        api_key=args.key,
        base_url=args.url,
        settings=OpenAIRealtimeLLMService.Settings(
            model="default",
            system_instruction="You are a friendly assistant. Be brief.",
            session_properties=SessionProperties(audio=turns),
        ),
    )
    memory = LLMContextAggregatorPair(LLMContext([]))
    loudspeaker = Loudspeaker()
    microphone = Microphone(args.data + bytes(4 * RATE))  # two seconds of silence end the turn
    pipeline = Pipeline([microphone, memory.user(), service, loudspeaker, memory.assistant()])
    task = PipelineTask(
        pipeline, params=PipelineParams(audio_in_sample_rate=RATE, audio_out_sample_rate=RATE)
    )

    failures: list[str] = []

    @task.event_handler("on_pipeline_error")
    async def failed(_: PipelineTask, frame: ErrorFrame) -> None:
        failures.append(frame.error)
        loudspeaker.done.set()

    async def end() -> None:
        try:
            async with asyncio.timeout(args.seconds + PATIENCE_S):
                await loudspeaker.done.wait()
        except TimeoutError:
            await task.cancel()
            raise
        await task.queue_frame(EndFrame())

    ending = asyncio.create_task(end())
    await PipelineRunner(handle_sigint=False).run(task)
    await ending
    if failures:
        args.refuse(failures[0])
    print(f"\n{len(loudspeaker.sound) / 2 / RATE:.1f} s of answer")
    args.write(loudspeaker.sound)


if __name__ == "__main__":
    args = read_arguments(__doc__, "ws://127.0.0.1:8000/v1/realtime")
    try:
        asyncio.run(main(args))
    except TimeoutError:
        args.give_up()
