"""A family in a package of its own (`examples/family`) is found, served and answers over HTTP
what its own offline model does."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest

from stretto.registry import open_model
from tests.family.tiny_text import PROJECT, put_on_path

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


@dataclass(frozen=True)
class Served:
    url: str
    example: str  # the command that the server prints for people to try it


@pytest.fixture(scope="module")
def served(path: str, checkpoint: Path) -> Iterator[Served]:
    # Prompts take several steps, and some requests wait for others' blocks.
    command = [sys.executable, "-m", "stretto", "serve", str(checkpoint), "--port", "0"]
    command += ["--device", "cpu", "--max-rows", "3", "--kv-blocks", "writer=16"]
    command += ["--max-model-len", "256", "--prefill-chunk", "16"]
    env = {**os.environ, "PYTHONPATH": path}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=env) as process:
        try:
            assert process.stderr is not None
            printed: list[str] = []
            while not (line := process.stderr.readline()).strip().startswith("curl"):
                assert line, f"it ended before it was ready: {printed}"
                printed.append(line)
            url = next(text.split()[1] for text in printed if text.strip().startswith("page"))
            yield Served(url.rstrip("/"), line.strip())
            process.send_signal(signal.SIGTERM)
            process.stderr.read()
            assert process.wait() == 0
        finally:
            process.kill()


def offline(checkpoint: Path, question: str, most: int = MAX_TOKENS) -> tuple[str, str]:
    """The text of an answer, and why it ends."""
    from tiny_text.config import TinyTextConfig
    from tiny_text.load import Source
    from tiny_text.offline import answer
    from tiny_text.prompts import open_builder

    model = Source.of(TinyTextConfig.read(checkpoint), checkpoint, progress=False).model()
    builder = open_builder(checkpoint)
    prompt = builder.build([{"role": "user", "content": question}])
    ids = list(answer(model, prompt.ids, most))
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


def test_streamed_answers_equal_the_offline_model(served: Served, checkpoint: Path) -> None:
    async def ask() -> list[tuple[str, str]]:
        async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none") as client:
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
    served: Served, fields: dict[str, Any], message: str
) -> None:
    body = {"messages": [{"role": "user", "content": "Hello"}], **fields}
    with (
        openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client,
        pytest.raises(openai.BadRequestError, match=message),
    ):
        client.chat.completions.create(model="tiny", extra_body=body, messages=body["messages"])


def test_the_printed_example_is_answered(served: Served, checkpoint: Path) -> None:
    done = subprocess.run(shlex.split(served.example), capture_output=True, check=True)
    [choice] = json.loads(done.stdout)["choices"]
    text, reason = offline(checkpoint, "Hello!", most=60)
    assert (choice["message"]["content"], choice["finish_reason"]) == (text, reason)


def test_the_family_is_found_by_its_entry_point(checkpoint: Path) -> None:
    model = open_model(checkpoint)
    assert type(model).__module__ == "tiny_text.family"
    assert model.pipeline.names == ("writer",)


def test_the_page_shows_what_is_in_the_files() -> None:
    """`docs/add-a-model.md` is written of this package; each of its blocks is a part of a file."""
    page = (PROJECT.parents[1] / "docs" / "add-a-model.md").read_text(encoding="utf-8")
    files = [p for p in PROJECT.rglob("*") if p.suffix in (".py", ".toml")]
    sources = [p.read_text(encoding="utf-8") for p in files]
    blocks = re.findall(r"```(?:python|toml)\n(.*?)```", page, re.DOTALL)
    assert len(blocks) > 8
    for block in blocks:
        assert any(block in source for source in sources), block


def test_the_commands_of_the_page_are_there(path: str, tmp_path: Path) -> None:
    folder = tmp_path / "tiny"
    command = [sys.executable, "-m", "tiny_text.checkpoint", str(folder)]
    subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": path})
    assert open_model(folder).info.name == "tiny"


def test_the_familys_own_test_passes_where_it_is_installed(path: str, tmp_path: Path) -> None:
    """As somebody runs it who copied the folder."""
    shutil.copytree(PROJECT / "tests", tmp_path / "tests")
    words = ["-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path / "tests")]
    done = subprocess.run(
        [sys.executable, *words],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert done.returncode == 0, done.stdout
    assert "1 passed" in done.stdout
