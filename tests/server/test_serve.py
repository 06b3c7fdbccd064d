"""`stretto serve` with the real engine, as a user starts it: one process to talk to, hosts behind
it."""

from __future__ import annotations

import asyncio
import base64
import json
import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest

from tests.server.conftest import HEAD, read_until

STRETTO = [sys.executable, "-m", "stretto", "serve"]


def number(metrics: str, name: str) -> float:
    return next(
        float(line.split()[1]) for line in metrics.splitlines() if line.startswith(f"{name} ")
    )


def test_serve_answers_cancels_and_ends(tiny_dir: Path) -> None:
    # Here 32 streams share a core or two: how fast they are made is not the matter.
    command = [*STRETTO, str(tiny_dir), "--port", "0", "--device", "cpu", "--min-pace", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            url = ""
            while "print(m" not in (line := process.stderr.readline()):
                assert line, "it ended before it was ready"
                url = line.split()[1].rstrip("/") if line.strip().startswith("page") else url
            check(url, tiny_dir.name)
            asyncio.run(check_together(url, tiny_dir.name))
            process.send_signal(signal.SIGTERM)
            process.stderr.read()
            assert process.wait() == 0
        finally:
            process.kill()


def check(url: str, model: str) -> None:
    question = [{"role": "user", "content": "Hello"}]
    aloud = {"modalities": ["text", "audio"], "audio": {"voice": "ethan", "format": "pcm16"}}
    fixed = {"ignore_eos": True, "min_audio_frames": 4, "max_audio_frames": 4, "timeline": True}
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        answer = client.chat.completions.create(
            model=model, messages=question, max_tokens=3, seed=1, extra_body=fixed, **aloud
        )  # type: ignore[call-overload]
        assert answer.usage.completion_tokens_details.audio_tokens == 4
        whole = base64.b64decode(answer.choices[0].message.audio.data)
        pieces = [
            c.choices[0].delta.audio.data
            for c in client.chat.completions.create(
                model=model,
                messages=question,
                max_tokens=3,
                seed=1,
                stream=True,
                extra_body=fixed,
                **aloud,
            )  # type: ignore[call-overload]
            if c.choices[0].delta.audio and c.choices[0].delta.audio.data
        ]
        # Packets may be grouped otherwise, and sums in another order round a sample to its
        # neighbour.
        streamed, at_once = (
            np.frombuffer(data, "<i2").astype(int)
            for data in (base64.b64decode("".join(pieces)), whole)
        )
        np.testing.assert_allclose(streamed, at_once, atol=1)
        assert len(whole) == 2 * (4 * 1920 - 555)
        lanes = {s["lane"] for s in answer.to_dict()["stretto"]["timeline"]}
        assert {"thinker", "talker", "code2wav"} <= lanes
        sound = client.audio.speech.create(
            model=model, input="Hi.", voice="ethan", extra_body={"max_audio_frames": 3}
        )
        assert sound.content

    body = {
        "messages": question,
        "stream": True,
        "ignore_eos": True,
        "max_tokens": 3000,
        "max_audio_frames": 3000,
    }
    data = json.dumps({**body, "min_audio_frames": 3000, **aloud}).encode()
    with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2]))) as s:
        s.sendall(
            f"POST /v1/chat/completions {HEAD}Content-Length: {len(data)}\r\n\r\n".encode() + data
        )
        read_until(s, b'"data"')
    while True:  # the cancel is on its way through the stages
        metrics = urllib.request.urlopen(f"{url}/metrics").read().decode()
        if (
            number(metrics, "stretto_engine_running") == 0
            and number(metrics, "stretto_num_requests_running") == 0
        ):
            break
    assert number(metrics, "stretto_engine_cancelled_total") == 1


async def check_together(url: str, model: str) -> None:
    """32 streams at once, in shared batches of all stages: each is the answer that its question
    gets alone."""
    options: Any = {
        "model": model,
        "max_tokens": 4,
        "modalities": ["text", "audio"],
        "stream": True,
    }
    options |= {
        "audio": {"voice": "ethan", "format": "pcm16"},
        "extra_body": {"max_audio_frames": 3},
    }

    async def one(client: openai.AsyncOpenAI, i: int) -> tuple[str, np.ndarray]:
        question, text, data = (
            [{"role": "user", "content": f"Question {i}: {'why ' * (i % 5)}?"}],
            "",
            "",
        )
        async for chunk in await client.chat.completions.create(
            messages=question, seed=i, **options
        ):
            audio = chunk.choices[0].delta.audio
            if audio is not None:
                text += audio.transcript or ""
                data += audio.data or ""
        return text, np.frombuffer(base64.b64decode(data), "<i2")

    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        alone = [await one(client, i) for i in range(8)]
        together = await asyncio.gather(*(one(client, i % 8) for i in range(32)))
    for i, (text, pcm) in enumerate(together):
        assert text == alone[i % 8][0]
        # Sums in another order may round a sample to its neighbour; another code would be far off.
        np.testing.assert_allclose(pcm, alone[i % 8][1], atol=1)


def test_serve_says_why_it_cannot(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    ended = subprocess.run(
        [*STRETTO, str(empty), "--port", "0", "--device", "cpu"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ended.returncode == 1
    assert "config.json" in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize(
    "words",
    [
        ["--port", "99999"],
        ["--placement", "nowhere"],
        ["--kv-blocks", "nowhere=3"],
        ["/nonexistent-checkpoint"],
    ],
)
def test_bad_flags(words: list[str]) -> None:
    ended = subprocess.run([*STRETTO, *words], capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert ended.stderr.startswith("stretto: ")
    assert "Traceback" not in ended.stderr
