"""A family in a package of its own (`examples/tiny_text`) is found, served and answers over HTTP
what its own offline model does."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import torch

from stretto.registry import open_model
from tests.families.tiny_text import put_on_path

MAX_TOKENS = 24
QUESTIONS = ["Hello", "Where is the garden?", "One two three four five. " * 12, "Why?"]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folders = put_on_path(tmp_path_factory.mktemp("installed"))
    yield os.pathsep.join([*folders, os.environ.get("PYTHONPATH", "")])
    for folder in folders:
        sys.path.remove(folder)


@pytest.fixture(scope="module")
def checkpoint(path: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tiny_text.checkpoint import write_tiny

    folder = tmp_path_factory.mktemp("checkpoints") / "tiny"
    write_tiny(folder)
    return folder


@pytest.fixture(scope="module")
def url(path: str, checkpoint: Path) -> Iterator[str]:
    # Prompts take several steps, and some requests wait for others' blocks.
    command = [sys.executable, "-m", "stretto", "serve", str(checkpoint), "--port", "0"]
    command += ["--device", "cpu", "--max-rows", "3", "--kv-blocks", "writer=16"]
    command += ["--max-model-len", "256", "--prefill-chunk", "16"]
    env = {**os.environ, "PYTHONPATH": path}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=env) as process:
        try:
            assert process.stderr is not None
            lines = []
            while not (line := process.stderr.readline()).strip().startswith("page"):
                lines.append(line)
                assert line, f"it ended before it was ready: {lines}"
            yield line.split()[1].rstrip("/")
            process.send_signal(signal.SIGTERM)
            process.stderr.read()
            assert process.wait() == 0
        finally:
            process.kill()


def offline(checkpoint: Path, question: str) -> tuple[str, str]:
    """The text of an answer, and why it ends."""
    from tiny_text.offline import answer
    from tiny_text.prompts import open_builder
    from tiny_text.stage import load_model

    model, builder = load_model(checkpoint, torch.device("cpu")), open_builder(checkpoint)
    prompt = builder.build([{"role": "user", "content": question}])
    ids = list(answer(model, prompt.ids, MAX_TOKENS))
    return builder.tokenizer.decode(ids), "stop" if ids[-1] == model.config.end else "length"


async def streamed(client: openai.AsyncOpenAI, question: str) -> tuple[str, str]:
    text, reason = "", ""
    stream = await client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": question}],
        max_tokens=MAX_TOKENS,
        stream=True,
    )
    async for chunk in stream:
        for choice in chunk.choices:
            text += choice.delta.content or ""
            reason = choice.finish_reason or reason
    return text, reason


def test_streamed_answers_equal_the_offline_model(url: str, checkpoint: Path) -> None:
    async def ask() -> list[tuple[str, str]]:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client:
            return await asyncio.gather(*(streamed(client, q) for q in QUESTIONS * 2))

    answers = asyncio.run(ask())
    assert answers == [offline(checkpoint, question) for question in QUESTIONS] * 2


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"modalities": ["text", "audio"]}, "does not offer speech"),
        ({"logprobs": True}, "takes no grammar, logit_bias, logprobs"),
        (
            {"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]},
            "input_audio",
        ),
    ],
)
def test_what_the_model_cannot_do_is_refused(
    url: str, fields: dict[str, Any], message: str
) -> None:
    body = {"messages": [{"role": "user", "content": "Hello"}], **fields}
    with (
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
        pytest.raises(openai.BadRequestError, match=message),
    ):
        client.chat.completions.create(model="tiny", extra_body=body, messages=body["messages"])


def test_the_family_is_found_by_its_entry_point(checkpoint: Path) -> None:
    model = open_model(checkpoint)
    assert type(model).__module__ == "tiny_text.family"
    assert model.pipeline.names == ("writer",)
