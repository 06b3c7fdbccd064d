"""Servers that want to be asked in words of their own: what is sent to them, and a server that
speaks vLLM-Omni's."""

from __future__ import annotations

import base64
import json
import re
import shlex
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from bench.harness.results import ROOT
from stretto.engine.events import AudioChunk
from stretto.errors import Invalid
from stretto.loadtest.dialect import Lengths, length_fields, speech_fields
from stretto.loadtest.sse import PCM_RATE, RequestFailed, Sound, wav_file
from tests.loadtest.command import run
from tests.server.scripted_server import sound

FIRST, EACH = 4, 25  # frames of a packet
CUT = 555  # samples that the first frame lacks


class OmniServer(AbstractContextManager["OmniServer"]):
    """Answers as vLLM-Omni does: text token by token, beside sound in `delta.content` of chunks
    that are marked as audio, a whole WAV file or bare samples in each."""

    text_tokens, frames = 12, 60  # where a request says nothing of them

    def __init__(self) -> None:
        chat = Route("/v1/chat/completions", self.chat, methods=["POST"])
        models = Route("/v1/models", self.models)
        config = uvicorn.Config(Starlette(routes=[chat, models]), port=0, log_level="critical")
        self.server = uvicorn.Server(config)
        self.listening = config.bind_socket()
        self.url = f"http://127.0.0.1:{self.listening.getsockname()[1]}"
        self.thread = threading.Thread(target=self.server.run, args=([self.listening],))
        self.reset()

    def reset(self) -> None:
        self.requests: list[dict[str, Any]] = []
        self.breaks = False

    def __enter__(self) -> OmniServer:
        self.thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.server.should_exit = True
        self.thread.join()
        self.listening.close()

    async def models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [{"id": "omni", "object": "model"}]})

    async def chat(self, request: Request) -> Response:
        body = await request.json()
        self.requests.append(body)
        stages = body.get("sampling_params_list")
        if stages is not None and len(stages) != 3:
            error = {"message": "one object per stage", "type": "BadRequestError"}
            return JSONResponse({"error": error | {"param": None, "code": None}}, 400)
        return StreamingResponse(self.stream(body), media_type="text/event-stream")

    async def stream(self, body: dict[str, Any]) -> AsyncIterator[bytes]:
        text, talker, _ = body.get("sampling_params_list") or [
            body,
            {"max_tokens": self.frames},
            {},
        ]
        tokens = text["max_tokens"] if text.get("ignore_eos") else self.text_tokens
        frames = talker["max_tokens"] - 1  # the last step makes no frame
        yield sse(chunk({"role": "assistant", "content": ""}, "text"))
        start = 0
        for number in range(tokens):
            yield sse(chunk({"content": f"w{number} "}, "text"))
            if number == tokens // 2 and self.breaks:
                yield sse(
                    {
                        "error": {
                            "message": "EngineCore died",
                            "type": "InternalServerError",
                            "code": 500,
                        }
                    }
                )
                yield b"data: [DONE]\n\n"
                return
        while "audio" in body["modalities"] and start < frames:
            size = min(EACH if start else FIRST, frames - start)
            samples = sound(1920 * start, 1920 * size - (0 if start else CUT))
            pcm = AudioChunk(0, samples).pcm16()
            raw = pcm if body.get("audio", {}).get("format") == "pcm" else wav_file(PCM_RATE, pcm)
            delta = {"role": "assistant", "content": base64.b64encode(raw).decode()}
            yield sse(chunk(delta, "audio") | {"usage": usage(0)})
            start += size
        if "audio" in body["modalities"]:
            yield sse(
                chunk({"role": "assistant", "content": ""}, "audio", "stop") | {"usage": usage(0)}
            )
        yield sse({"object": "chat.completion.chunk", "choices": [], "usage": usage(tokens)})
        yield b"data: [DONE]\n\n"


def sse(event: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(event).encode() + b"\n\n"


def chunk(delta: dict[str, Any], modality: str, finish: str | None = None) -> dict[str, Any]:
    choice = {
        "index": 0,
        "delta": delta,
        "logprobs": None,
        "finish_reason": finish,
        "stop_reason": None,
    }
    return {
        "id": "chatcmpl-1",
        "object": "chat.completion.chunk",
        "choices": [choice],
        "modality": modality,
    }


def usage(tokens: int) -> dict[str, int]:
    return {"prompt_tokens": 100, "completion_tokens": tokens, "total_tokens": 100 + tokens}


@pytest.fixture(scope="module")
def running() -> Iterator[OmniServer]:
    with OmniServer() as server:
        yield server


@pytest.fixture
def omni(running: OmniServer) -> OmniServer:
    running.reset()
    return running


FIXED = (
    "--prompt-tokens",
    "80",
    "--max-tokens",
    "64",
    "--exact-tokens",
    "--frames",
    "125",
    "--temperature",
    "1",
)


def measure(server: OmniServer, tmp_path: Path, *argv: str) -> list[dict[str, Any]]:
    out = tmp_path / "run.json"
    command = (
        "bench",
        server.url,
        "--dialect",
        "vllm-omni",
        "-n",
        "3",
        "--warmup",
        "0",
        "--quiet",
        *argv,
    )
    assert run(*command, "--json", str(out)) == 0
    samples: list[dict[str, Any]] = json.loads(out.read_text())["levels"][0]["samples"]
    return samples


@pytest.mark.parametrize("packets", ["wav", "pcm"])
def test_fixed_lengths_on_vllm_omni(omni: OmniServer, tmp_path: Path, packets: str) -> None:
    argv = ("--audio-format", "pcm") if packets == "pcm" else ()
    samples = measure(omni, tmp_path, "-c", "2", *FIXED, *argv)
    assert len(samples) == 3
    for sample in samples:
        seconds = [seconds for _, seconds in sample["packets"]]
        assert seconds[0] == pytest.approx((FIRST * 1920 - CUT) / PCM_RATE)
        assert sum(seconds) == pytest.approx((124 * 1920 - CUT) / PCM_RATE), (
            "9.897 s, as in the published table"
        )
        assert len(sample["words"]) == 64
        assert (sample["text_tokens"], sample["prompt_tokens"]) == (64, 100)
        assert (sample["finish"], sample["error"]) == ("stop", None)
        assert sample["words"][0] <= sample["packets"][0][0]
    for body in omni.requests:
        text, talker, _ = body["sampling_params_list"]
        assert text == {"temperature": 1.0, "max_tokens": 64, "min_tokens": 64, "ignore_eos": True}
        assert (talker["max_tokens"], talker["min_tokens"], talker["ignore_eos"]) == (
            125,
            125,
            True,
        )
        assert body.get("audio") == ({"format": "pcm"} if argv else None)


def test_the_documents_command_for_vllm_omni(omni: OmniServer, tmp_path: Path) -> None:
    """Word for word, but for the address, the file and the number of requests."""
    page = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
    [load] = re.findall(r'^LOAD="(.*)"$', page, re.MULTILINE)
    [line] = re.findall(r"^stretto (bench \S+ --dialect vllm-omni .*)$", page, re.MULTILINE)
    out = tmp_path / "run.json"
    words = shlex.split(line.replace("$LOAD", load))
    words[1] = omni.url
    words[words.index("--json") + 1] = str(out)
    assert run(*words, "-n", "1", "--warmup", "0", "--quiet") == 0
    levels = json.loads(out.read_text())["levels"]
    assert [level["load"]["streams"] for level in levels] == [1, 4, 8, 16, 32]
    for level in levels:
        [sample] = level["samples"]
        assert sample["error"] is None
        seconds = sum(seconds for _, seconds in sample["packets"])
        assert seconds == pytest.approx((124 * 1920 - CUT) / PCM_RATE)
    text, frames, _ = omni.requests[0]["sampling_params_list"]
    assert (text["max_tokens"], text["min_tokens"], text["temperature"]) == (64, 64, 1.0)
    assert (frames["min_tokens"], frames["max_tokens"]) == (125, 125)


def test_a_usual_answer_of_vllm_omni(omni: OmniServer, tmp_path: Path) -> None:
    (sample, *_) = measure(omni, tmp_path, "--voice", "chelsie")
    assert (len(sample["words"]), sample["text_tokens"]) == (12, 12)
    body = omni.requests[0]
    assert body["speaker"] == "chelsie"
    assert {"sampling_params_list", "audio"} & set(body) == set(), (
        "the server's own deploy file decides"
    )


def test_text_of_vllm_omni(omni: OmniServer, tmp_path: Path) -> None:
    (sample, *_) = measure(omni, tmp_path, "--text-only", "--exact-tokens", "--max-tokens", "7")
    assert (len(sample["words"]), sample["packets"]) == (7, [])
    assert omni.requests[0]["modalities"] == ["text"]
    assert "sampling_params_list" not in omni.requests[0]


def test_an_error_within_an_answer_of_vllm_omni(
    omni: OmniServer, capsys: pytest.CaptureFixture[str]
) -> None:
    omni.breaks = True
    assert (
        run("bench", omni.url, "--dialect", "vllm-omni", "-n", "2", "--warmup", "0", "--quiet") == 1
    )
    printed = capsys.readouterr().out
    assert "2 failed: 2 error in stream" in printed
    assert "EngineCore died" in printed


def test_limits_of_vllm_omni_are_found(
    omni: OmniServer, capsys: pytest.CaptureFixture[str]
) -> None:
    late = ("--underrun-ms", "60000", "--quiet", "-n", "1", "--warmup", "0")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("stretto.loadtest.find.MOST", 2)
        assert (
            run("bench", omni.url, "--dialect", "vllm-omni", "--find", "-c", "1", *late, *FIXED)
            == 0
        )
    assert ": 2 listeners or more" in capsys.readouterr().out


# --- what is sent


def test_lengths_by_dialect() -> None:
    fixed = Lengths(64, exact=True, frames=125)
    assert length_fields("stretto", fixed, 1.0) == {
        "ignore_eos": True, "min_tokens": 64, "min_audio_frames": 125, "max_audio_frames": 125,
    }  # fmt: skip
    text, talker, vocoder = length_fields("vllm-omni", fixed, None)["sampling_params_list"]
    assert "temperature" not in text
    assert (talker["temperature"], talker["detokenize"], vocoder["detokenize"]) == (
        0.9,
        False,
        True,
    )
    assert length_fields("vllm-omni", Lengths(64, exact=True), 1.0) == {
        "ignore_eos": True,
        "min_tokens": 64,
    }
    text, *_ = length_fields("vllm-omni", Lengths(64, frames=125), 0.5)["sampling_params_list"]
    assert text == {"max_tokens": 64, "temperature": 0.5}, "the text ends where it ends"
    assert length_fields("openai", Lengths(64), 1.0) == {}
    for lengths in (Lengths(64, exact=True), Lengths(64, frames=125)):
        with pytest.raises(Invalid, match="--dialect"):
            length_fields("openai", lengths, None)


def test_speech_by_dialect() -> None:
    assert speech_fields("openai", None, None) == {"audio": {"format": "pcm16"}}
    assert speech_fields("stretto", "wav", "ethan") == {
        "audio": {"format": "wav", "voice": "ethan"}
    }
    assert speech_fields("vllm-omni", None, None) == {}
    assert speech_fields("vllm-omni", "pcm", "ethan") == {
        "speaker": "ethan",
        "audio": {"format": "pcm"},
    }


@pytest.mark.parametrize("argv", [["--frames", "0"], ["--frames", "9", "--text-only"]])
def test_lengths_that_make_no_sense(argv: list[str]) -> None:
    with pytest.raises(Invalid):
        run("bench", "http://127.0.0.1:9", "--dialect", "vllm-omni", *argv)


# --- WAV files are measured without their samples being decoded


def encoded(raw: bytes) -> str:
    return base64.b64encode(raw).decode()


@pytest.mark.parametrize("samples", [0, 1, 170, 171, 172, 192, 193, 24000])
@pytest.mark.parametrize("rate", [24000, 44100])
def test_seconds_of_wav_files(samples: int, rate: int) -> None:
    raw = wav_file(rate, bytes(2 * samples))
    assert Sound(encoded(raw)).seconds() == samples / rate
    streamed = raw.replace(b"data" + (2 * samples).to_bytes(4, "little"), b"data\xff\xff\xff\xff")
    assert Sound(encoded(streamed)).seconds() == samples / rate, (
        "a streamed file does not know its length"
    )


def test_a_long_header_is_read_whole() -> None:
    raw = wav_file(24000, bytes(480))
    notes = b"LIST" + (1000).to_bytes(4, "little") + bytes(1000)
    assert Sound(encoded(raw[:12] + notes + raw[12:])).seconds() == 240 / 24000


@pytest.mark.parametrize(
    "raw", [b"RIFF", wav_file(24000, b"")[:30], b"RIFF0000WAVELIST" + bytes(900)]
)
def test_files_without_samples(raw: bytes) -> None:
    with pytest.raises(RequestFailed, match="without samples"):
        Sound(encoded(raw)).seconds()


def test_what_is_not_base64() -> None:
    with pytest.raises(RequestFailed, match="not base64"):
        Sound("UklGR!!!").seconds()
