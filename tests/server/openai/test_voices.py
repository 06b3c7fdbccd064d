"""Qwen3-TTS over HTTP: voices, instructions, languages, long texts; voices made of clips, and what
is refused."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stretto.config.engine import EngineConfig, HostSettings
from stretto.preprocess.pool.pool import PoolSettings
from stretto.server.openai import voice_store as voicestore
from stretto.testing.qwen3_tts import write_tiny
from tests.server.conftest import Reply, read_open
from tests.server.openai.clips import SPEECH, VOICES, same, sound
from tests.server.real_engine import Served, served

KEYS = ("one", "two")


def start(tmp_path_factory: pytest.TempPathFactory, kind: Any) -> Iterator[Served]:
    folder: Path = tmp_path_factory.mktemp("tts") / kind
    write_tiny(folder, 0, kind)
    config = EngineConfig(prompts=PoolSettings(), host=HostSettings(max_rows=4))
    with served(folder, config, api_key=KEYS) as it:
        yield it


@pytest.fixture(scope="module")
def custom(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    yield from start(tmp_path_factory, "custom_voice")


@pytest.fixture(scope="module")
def design(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    yield from start(tmp_path_factory, "voice_design")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    yield from start(tmp_path_factory, "base")


def speech(it: Served, text: str = "Hello, how are you?", key: int = 1, **more: Any) -> np.ndarray:
    body = {
        "response_format": "pcm",
        "greedy_speech": True,
        "min_audio_frames": 3,
        "max_audio_frames": 3,
        **more,
    }
    return np.frombuffer(it.post(SPEECH, key, input=text, **body).body, np.int16)


def refused(
    it: Served, path: str, body: Any, key: int = 1, method: str | None = None
) -> dict[str, Any]:
    headers = {"authorization": f"Bearer {KEYS[key - 1]}"}
    reply = it.running.ask(path, body, method=method, headers=headers)
    assert reply.status in (400, 404), reply.body
    return reply.error


def own_voices(it: Served) -> list[str]:
    store = it.running.server.service.voices
    return [name for i in range(len(KEYS)) for name in store.names(f"key{i + 1}")]


def test_voices_languages_and_instructions_change_what_is_heard(custom: Served) -> None:
    plain = speech(custom, voice="ryan")
    assert len(plain) == 3 * 1920
    assert same(plain, speech(custom, voice="RYAN"))
    assert same(plain, speech(custom)), "the default"
    assert same(speech(custom, voice="serena"), speech(custom, voice="alloy")), "as OpenAI calls it"
    others = [{"voice": "vivian"}, {"language": "German"}, {"instructions": "Speak slowly."}]
    for other in others:
        assert not same(plain, speech(custom, **{"voice": "ryan", **other}))
    card = custom.running.ask("/v1/models", headers={"authorization": "Bearer one"}).json["data"][0]
    assert card["output_modalities"] == ["audio"]
    assert "vivian" in card["voices"]
    assert card["instructions"]
    assert not card["cloning"]


@pytest.mark.parametrize("format", ["wav", "mp3", "opus", "flac"])
def test_formats(custom: Served, format: str) -> None:
    whole = speech(custom)
    heard, _ = read_open(custom.post(SPEECH, 1, input="Hello, how are you?", response_format=format,
                                     greedy_speech=True, min_audio_frames=3,
                                     max_audio_frames=3).body)  # fmt: skip
    if format == "wav":
        assert same(heard, whole)
    assert len(heard)


def test_the_frame_limit_counts_all_passages_of_a_text(custom: Served) -> None:
    """The first passage reaches it, so that the others are not read."""
    sentences = [
        f"{'The rain in the garden is quiet this morning, ' * 20}and number {i} ends."
        for i in range(3)
    ]
    first = speech(custom, sentences[0])
    assert same(first, speech(custom, " ".join(sentences)))
    reply = custom.post(SPEECH, 1, input=" ".join(sentences), stream_format="sse",
        response_format="pcm",
                        greedy_speech=True, min_audio_frames=3, max_audio_frames=3)  # fmt: skip
    *deltas, done = reply.events
    assert done["usage"]["output_tokens"] == 3
    assert done["finish_reason"] == "length"
    sound = np.frombuffer(b"".join(base64.b64decode(d["audio"]) for d in deltas), np.int16)
    assert same(sound, first)


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"input": ""}, "input"),
        ({"input": " \n"}, "input"),
        ({"voice": "nobody"}, "voice"),
        ({"voice": "../../etc/passwd"}, "voice"),
        ({"language": "klingon"}, "language"),
        ({"language": "beijing_dialect"}, "language"),
        ({"instructions": "x" * 5000}, "instructions"),
        ({"instructions": "漢" * 2000}, "instructions"),
    ],
)
def test_bad_speech_is_refused(custom: Served, change: dict[str, Any], param: str) -> None:
    assert refused(custom, SPEECH, {"input": "Hello", **change})["param"] == param


def test_a_voice_is_described(design: Served) -> None:
    plain, old = speech(design), speech(design, instructions="An old man, warm and unhurried.")
    assert len(plain) == len(old) == 3 * 1920, "it may say nothing of it"
    assert not same(plain, old)
    assert not same(
        old, speech(design, instructions="An old man, warm and unhurried.", language="french")
    )
    assert same(plain, speech(design, voice="alloy")), "clients that must name one"
    assert refused(design, SPEECH, {"input": "Hello", "voice": "ryan"})["param"] == "voice"


def test_no_more_voices_than_can_be_kept(base: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    base.post(VOICES, 1, name="first", audio=sound())
    for limit in ("PER_OWNER", "IN_ALL"):
        with monkeypatch.context() as m:
            m.setattr(voicestore, limit, 1)
            headers = {"authorization": "Bearer one"}
            reply = base.running.ask(VOICES, {"name": "second", "audio": sound()}, headers=headers)
            assert (reply.status, reply.error["code"]) == (429, "too_many_voices")
    base.running.ask(f"{VOICES}/first", method="DELETE", headers={"authorization": "Bearer one"})
    assert not own_voices(base)


def test_a_voice_is_made_of_a_clip_and_is_its_owners(base: Served) -> None:
    assert refused(base, SPEECH, {"input": "Hello"})["param"] == "voice", "it has none of its own"
    made = base.post(VOICES, 1, name="Granny", audio=sound()).json
    assert (made["name"], made["has_text"]) == ("Granny", False)
    base.post(
        VOICES,
        1,
        name="closer",
        audio=sound(rate=24000, format="FLAC"),
        text="hello there",
        format="flac",
    )
    one, other = speech(base, voice="granny"), speech(base, voice="closer")
    assert len(one) == len(other) == 3 * 1920
    assert not same(one, other)
    assert same(other, speech(base, voice="closer")), (
        "the second time, from what was kept of the first"
    )
    assert same(other, speech(base, voice="closer", instructions="Slowly.")), "it follows none"
    assert refused(base, SPEECH, {"input": "Hello", "voice": "granny"}, key=2)["param"] == "voice"
    base.post(VOICES, 2, name="granny", audio=sound(2.0, hz=200.0))
    assert not same(one, speech(base, key=2, voice="granny"))

    def listed(key: int) -> list[str]:
        reply = base.running.ask(VOICES, headers={"authorization": f"Bearer {KEYS[key - 1]}"})
        return [v["name"] for v in reply.json["data"]]

    assert (listed(1), listed(2)) == (["Granny", "closer"], ["granny"])
    assert refused(base, VOICES, {"name": "GRANNY", "audio": sound()})["param"] == "name", (
        "it is taken"
    )
    assert (
        refused(base, f"{VOICES}/closer", None, key=2, method="DELETE")["code"] == "voice_not_found"
    )
    reply = base.running.ask(
        f"{VOICES}/granny", method="DELETE", headers={"authorization": "Bearer one"}
    )
    assert reply.json["deleted"]
    assert (listed(1), listed(2)) == (["closer"], ["granny"])
    for key, name in ((1, "closer"), (2, "granny")):
        base.running.ask(
            f"{VOICES}/{name}",
            method="DELETE",
            headers={"authorization": f"Bearer {KEYS[key - 1]}"},
        )
    assert not own_voices(base)


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"audio": sound(0.3)}, "audio"),
        ({"audio": sound(31.0, 8000)}, "audio"),
        ({"audio": sound(loudness=1e30, subtype="FLOAT")}, "audio"),
        ({"audio": base64.b64encode(b"not a sound at all").decode()}, "audio"),
        ({"audio": "%%%"}, "audio"),
        ({"audio": ""}, "audio"),
        ({"audio": 5}, "audio"),
        ({"name": "../../x"}, "name"),
        ({"name": "a" * 65}, "name"),
        ({"name": "a\nb"}, "name"),
        ({"name": "a\n"}, "name"),
        ({"text": "x" * 3000}, "text"),
        ({"extra": 1}, "extra"),
    ],
)
def test_bad_clips_are_refused_and_nothing_is_kept(
    base: Served, change: dict[str, Any], param: str
) -> None:
    assert refused(base, VOICES, {"name": "fine", "audio": sound(), **change})["param"] == param
    assert not own_voices(base)


def test_models_without_cloning_make_no_voices(custom: Served) -> None:
    assert refused(custom, VOICES, {"name": "fine", "audio": sound()})["param"] == "model"


def form(
    fields: dict[str, str | bytes], files: tuple[str, ...] = ("file",)
) -> tuple[bytes, dict[str, str]]:
    """A body of multipart/form-data, and its headers."""
    parts = []
    for name, value in fields.items():
        extra = '; filename="../../etc/passwd"' if name in files else ""
        data = value.encode() if isinstance(value, str) else value
        parts.append(
            f'--mark\r\nContent-Disposition: form-data; name="{name}"{extra}\r\n\r\n'.encode()
            + data
            + b"\r\n"
        )
    headers = {"authorization": "Bearer one", "Content-Type": "multipart/form-data; boundary=mark"}
    return b"".join(parts) + b"--mark--\r\n", headers


CLIP = base64.b64decode(sound())


def test_a_clip_as_a_file_is_the_same_voice(base: Served) -> None:
    base.post(VOICES, 1, name="json", audio=sound(), text="hello there")
    for name, more in (
        ("form", {"file": CLIP}),
        ("stock", {"audio_sample": CLIP, "consent": "cons_1"}),
    ):
        said = {"transcript" if name == "form" else "text": "hello there"}
        body, headers = form({"name": name, **said, **more}, ("file", "audio_sample"))
        reply = base.running.ask(VOICES, body, headers=headers)
        assert (reply.status, reply.json["name"], reply.json["has_text"]) == (200, name, True)
        assert same(speech(base, voice=name), speech(base, voice="json"))
    for name in ("json", "form", "stock"):
        base.running.ask(
            f"{VOICES}/{name}", method="DELETE", headers={"authorization": "Bearer one"}
        )
    assert not own_voices(base)


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"file": b""}, "file"),
        ({"file": b"not a sound at all"}, "file"),
        ({"file": base64.b64decode(sound(0.3))}, "file"),
        ({"file": base64.b64decode(sound(31.0, 8000))}, "file"),
        ({"file": bytes((9 << 20) + 1)}, "file"),
        ({"name": "../../x"}, "name"),
        ({"name": ""}, "name"),
        ({"name": None}, "name"),
        ({"file": None}, "file"),
        ({"transcript": "x" * 3000}, "transcript"),
        ({"transcript": b"\xff\xfe"}, "transcript"),
        ({"transcript": "a", "text": "a"}, "text"),
        ({"audio_sample": "in words"}, "audio_sample"),
        ({"colour": "red"}, "colour"),
        ({"model": "other"}, "model"),
    ],
)
def test_bad_forms_are_refused_and_nothing_is_kept(
    base: Served, change: dict[str, Any], param: str
) -> None:
    fields = {k: v for k, v in {"name": "fine", "file": CLIP, **change}.items() if v is not None}
    body, headers = form(fields)
    reply = base.running.ask(VOICES, body, headers=headers)
    assert reply.status == (404 if "model" in change else 400), reply.body
    assert reply.error["param"] == param, reply.error
    assert not own_voices(base)


def test_a_clip_has_so_many_bytes(base: Served) -> None:
    body, headers = form({"name": "fine", "file": bytes((9 << 20) + 1)})
    reply = base.running.ask(VOICES, body, headers=headers)
    assert (reply.status, reply.error["param"]) == (400, "file")
    assert "at most 9 MiB" in reply.error["message"]


def test_of_two_clips_for_one_name_one_is_kept(
    base: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both find the name free; the one that is done later does not take the other's place."""
    engine = base.running.server.service.engine()
    inside: list[int] = []
    both = asyncio.Event()
    enrol = engine.enrol

    async def together(*args: Any, **more: Any) -> bytes:
        inside.append(1)
        if len(inside) == 2:
            both.set()
        await both.wait()
        return await enrol(*args, **more)

    monkeypatch.setattr(engine, "enrol", together)
    with ThreadPoolExecutor(2) as pool:
        replies = list(
            pool.map(lambda _: ask_key(base, {"name": "twin", "audio": sound()}), range(2))
        )
    assert sorted(r.status for r in replies) == [200, 400]
    assert next(r for r in replies if r.status == 400).error["param"] == "name"
    base.running.ask(f"{VOICES}/twin", method="DELETE", headers={"authorization": "Bearer one"})
    assert not own_voices(base)


def ask_key(base: Served, body: dict[str, Any]) -> Reply:
    return base.running.ask(VOICES, body, headers={"authorization": "Bearer one"})


def test_what_is_no_form_is_refused(base: Served) -> None:
    body, headers = form({"name": "fine", "file": CLIP})
    for data, type in (
        (body[:200], headers["Content-Type"]),
        (body, "multipart/form-data"),
        (body, "application/x-www-form-urlencoded"),
        (b"", headers["Content-Type"]),
    ):
        reply = base.running.ask(VOICES, data, headers={**headers, "Content-Type": type})
        assert reply.status in (400, 415), reply.body
    foreign = {**headers, "origin": "null", "authorization": "Bearer wrong"}
    assert base.running.ask(VOICES, body, headers=foreign).status in (401, 403)
    assert not own_voices(base)
