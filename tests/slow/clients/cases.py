"""The clients that are tried: what each installs, and what it runs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tests.server.realtime import conversation

DRIVERS = Path(__file__).parent / "drivers"
EXAMPLES = Path(__file__).resolve().parents[3] / "examples" / "realtime"

Which = Literal["nano", "nano over TLS", "tiny", "scripted"]
"""Nano answers and speaks; the tiny model, whose words mean nothing, transcribes; the scripted
engine of the tests holds whole conversations."""
Arguments = Literal["url", "url question", "url turn", "question answer url", "question answer ws"]


@dataclass(frozen=True, slots=True)
class Exchange:
    """One program with the client in it. It prints `ok: ...` for each thing that worked."""

    program: Path
    server: Which = "nano"
    arguments: Arguments = "url"

    @property
    def name(self) -> str:
        return self.program.stem


@dataclass(frozen=True, slots=True)
class ClientCase:
    """`packages`: what pip or npm installs, of which the first is the client."""

    name: str
    tool: Literal["pip", "npm"]
    packages: tuple[str, ...]
    exchanges: tuple[Exchange, ...]

    @property
    def package(self) -> str:
        return self.packages[0].partition("[")[0]


def _driver(name: str, server: Which = "nano", arguments: Arguments = "url question") -> Exchange:
    return Exchange(DRIVERS / name, server, arguments)


def _example(name: str, arguments: Arguments) -> Exchange:
    return Exchange(EXAMPLES / name, "nano", arguments)


def _conversation(name: str) -> Exchange:
    return Exchange(conversation.DRIVERS / name, "scripted", "url turn")


CASES = (
    ClientCase(
        "openai",
        "pip",
        ("openai[realtime]",),
        (
            _driver("openai_python.py"),
            _driver("openai_transcribes.py", "tiny"),
            _example("openai_client.py", "question answer url"),
        ),
    ),
    ClientCase(
        "agents",
        "pip",
        ("openai-agents",),
        (
            _driver("agents_text.py", arguments="url"),
            _example("openai_agent.py", "question answer ws"),
            _conversation("agents_sdk.py"),
        ),
    ),
    ClientCase(
        "pipecat",
        "pip",
        ("pipecat-ai[openai]", "websockets"),
        (
            _example("pipecat_bot.py", "question answer ws"),
            _conversation("pipecat_pipeline.py"),
            _driver("pipecat_speech.py", arguments="url"),
            _driver("pipecat_transcribes.py", "tiny"),
        ),
    ),
    ClientCase(
        "livekit",
        "pip",
        ("livekit-agents", "livekit-plugins-openai"),
        (
            _example("livekit_agent.py", "question answer url"),
            _conversation("livekit_plugin.py"),
            _driver("livekit_speech.py", arguments="url"),
            _driver("livekit_transcribes.py", "tiny"),
        ),
    ),
    ClientCase(
        "litellm", "pip", ("litellm[proxy]",), (_driver("litellm_proxy.py", arguments="url"),)
    ),
    ClientCase(
        "langchain",
        "pip",
        ("langchain-openai", "langchain"),
        (_driver("langchain_text.py", arguments="url"),),
    ),
    ClientCase(
        "pydantic-ai",
        "pip",
        ("pydantic-ai-slim[openai]",),
        (_driver("pydantic_ai_text.py", arguments="url"),),
    ),
    ClientCase(
        "instructor", "pip", ("instructor",), (_driver("instructor_text.py", arguments="url"),)
    ),
    ClientCase(
        "openai-js", "npm", ("openai", "ws"), (_driver("openai.mjs", "nano over TLS", "url"),)
    ),
    ClientCase(
        "agents-js", "npm", ("@openai/agents", "zod"), (_driver("agents.mjs", arguments="url"),)
    ),
    ClientCase(
        "ai-sdk",
        "npm",
        ("@ai-sdk/openai", "ai", "zod"),
        (_driver("ai_sdk.mjs", arguments="url"),),
    ),
)
