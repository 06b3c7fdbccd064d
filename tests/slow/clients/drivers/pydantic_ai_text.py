"""pydantic-ai with a model named `openai:default`, which is the Responses API."""

import asyncio
import os
import sys
from typing import Literal

from pydantic import BaseModel


class Sum(BaseModel):
    answer: Literal["fifteen", "sixteen"]


async def main(url: str) -> None:
    os.environ |= {"OPENAI_BASE_URL": url, "OPENAI_API_KEY": "none"}
    from pydantic_ai import Agent, NativeOutput

    question = "What is seven plus eight?"
    agent = Agent("openai:default")
    told = await agent.run(question)
    assert told.output
    print("ok: openai:default answers")
    async with agent.run_stream(question) as stream:
        assert "".join([t async for t in stream.stream_text(delta=True)])
    print("ok: openai:default, streamed")
    sums = await Agent("openai:default", output_type=Sum).run(question)
    assert isinstance(sums.output, Sum)
    print("ok: structured output by a function")
    sums = await Agent("openai:default", output_type=NativeOutput(Sum)).run(question)
    assert isinstance(sums.output, Sum)
    print("ok: structured output by a schema")
    assert (await Agent("openai-chat:default").run(question)).output
    print("ok: openai-chat:default answers")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
