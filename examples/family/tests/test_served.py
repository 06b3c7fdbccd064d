"""What the engine serves equals the model without an engine: prompts in several steps, and more
requests than the KV cache has blocks for. Copy this test with the family; it needs the package
installed (`pip install -e '.[test]'`) and no GPU."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from tiny_text.checkpoint import write_tiny
from tiny_text.config import TinyTextConfig
from tiny_text.load import Source
from tiny_text.offline import answer
from tiny_text.prompts import open_builder

from stretto import AsyncEngine, EngineConfig, HostSettings, Invalid

MAX_TOKENS = 12
QUESTIONS = ["Hello", "Where is the garden?", "One two three four five. " * 12, "Why?"]
SMALL = HostSettings(
    device="cpu", max_rows=3, max_context=256, prefill_chunk=16, blocks={"writer": 16}
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoints") / "tiny"
    write_tiny(folder)
    return folder


def offline(checkpoint: Path, question: str) -> str:
    model = Source.of(TinyTextConfig.read(checkpoint), checkpoint, progress=False).model()
    builder = open_builder(checkpoint)
    prompt = builder.build([{"role": "user", "content": question}])
    return builder.tokenizer.decode(list(answer(model, prompt.ids, MAX_TOKENS)))


def test_answers_equal_the_offline_model_and_speech_is_refused(checkpoint: Path) -> None:
    async def ask(engine: AsyncEngine, question: str) -> str:
        options = {"modalities": ["text"], "max_text_tokens": MAX_TOKENS}
        return (await engine.chat(question, **options)).text

    async def run() -> list[str]:
        async with AsyncEngine(checkpoint, config=EngineConfig(host=SMALL)) as engine:
            with pytest.raises(Invalid, match="does not offer speech"):
                await engine.chat("Hello", modalities=["text", "audio"])
            return await asyncio.gather(*(ask(engine, q) for q in QUESTIONS))

    assert asyncio.run(run()) == [offline(checkpoint, q) for q in QUESTIONS]
