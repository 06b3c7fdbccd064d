"""LiveKit Agents: speech of a text, and a typed answer."""

import asyncio
import sys

import aiohttp
from livekit.agents import llm
from livekit.agents.utils import http_context
from livekit.plugins import openai


async def main(url: str) -> None:
    http_context._new_session_ctx()
    voice = openai.TTS(model="default", voice="alloy", base_url=url, api_key="none")
    size = 0
    async with voice.synthesize("Hello there.") as stream:
        async for event in stream:
            size += len(bytes(event.frame.data))
    assert size > 4800, size
    print("ok: speech")
    model = openai.LLM(model="default", base_url=url, api_key="none")
    context = llm.ChatContext.empty()
    context.add_message(role="user", content="What is seven plus eight?")
    words = ""
    async with model.chat(chat_ctx=context) as answer:
        async for chunk in answer:
            words += (chunk.delta.content or "") if chunk.delta else ""
    assert words
    print("ok: chat, streamed")
    await voice.aclose()
    await model.aclose()
    await http_context._close_http_ctx()


if __name__ == "__main__":
    assert aiohttp
    asyncio.run(main(sys.argv[1]))
