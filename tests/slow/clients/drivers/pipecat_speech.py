"""Pipecat: speech of a text."""

import asyncio
import sys

from pipecat.frames.frames import EndFrame, ErrorFrame, Frame, TTSAudioRawFrame, TTSSpeakFrame
from pipecat.pipeline.pipeline import Pipeline
from pipecat.pipeline.runner import PipelineRunner
from pipecat.pipeline.task import PipelineParams, PipelineTask
from pipecat.processors.frame_processor import FrameDirection, FrameProcessor
from pipecat.services.openai.tts import OpenAITTSService

PATIENCE_S = 120  # Pipecat's own is 3 s, which a busy machine may need for the first sound


class Ear(FrameProcessor):
    def __init__(self) -> None:
        super().__init__()
        self.size = 0

    async def process_frame(self, frame: Frame, direction: FrameDirection) -> None:
        await super().process_frame(frame, direction)
        if isinstance(frame, TTSAudioRawFrame):
            self.size += len(frame.audio)
        await self.push_frame(frame, direction)


async def main(url: str) -> None:
    settings = OpenAITTSService.Settings(model="default", voice="alloy")
    service = OpenAITTSService(
        base_url=url, api_key="none", settings=settings, stop_frame_timeout_s=PATIENCE_S
    )
    ear = Ear()
    params = PipelineParams(audio_out_sample_rate=24_000)
    task = PipelineTask(Pipeline([service, ear]), params=params)
    failures: list[str] = []

    @task.event_handler("on_pipeline_error")
    async def failed(_: PipelineTask, frame: ErrorFrame) -> None:
        failures.append(frame.error)

    await task.queue_frames([TTSSpeakFrame("Hello there."), EndFrame()])
    await PipelineRunner(handle_sigint=False).run(task)
    assert not failures, failures
    assert ear.size > 4800, ear.size
    print("ok: speech")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
