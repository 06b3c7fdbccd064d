"""The OpenAI Agents SDK with its default, the Responses API: an answer, a stream, a function."""

import asyncio
import sys
from typing import Literal

from agents import Agent, ModelSettings, Runner, function_tool, set_tracing_disabled
from agents.models.openai_responses import OpenAIResponsesModel
from openai import AsyncOpenAI

called: list[str] = []


@function_tool
def weather(city: Literal["Bonn", "Rome"]) -> str:
    """How the weather is in a city."""
    called.append(city)
    return "It is sunny."


async def main(url: str) -> None:
    set_tracing_disabled(True)
    model = OpenAIResponsesModel("default", AsyncOpenAI(base_url=url, api_key="none"))
    agent = Agent(name="Helper", instructions="Be brief.", model=model)
    told = await Runner.run(agent, "What is seven plus eight?")
    assert told.final_output
    print("ok: an agent answers")
    stream = Runner.run_streamed(agent, "Hello")
    kinds = {e.type async for e in stream.stream_events()}
    assert "raw_response_event" in kinds, kinds
    print("ok: an agent answers, streamed")
    settings = ModelSettings(tool_choice="required")
    caller = Agent(name="Caller", model=model, tools=[weather], model_settings=settings)
    told = await Runner.run(caller, "How is the weather in Bonn?")
    assert called, "the function was not called"
    print("ok: an agent calls a function and goes on")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
