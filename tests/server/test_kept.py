"""What the server keeps for later is bounded, and what it needs for one request goes with it."""

from __future__ import annotations

import json
import os
from typing import Any

import numpy as np
import pytest

from stretto.errors import Busy
from stretto.family import Transcription
from stretto.server.http.body import ON_THE_LOOP
from stretto.server.openai import answer_store
from stretto.server.openai.answer_store import AnswerStore
from tests.preprocess.samples import sound_file, tone
from tests.server.asks import ALOUD, CHAT
from tests.server.conftest import Running, serve
from tests.server.scripted_engine import ScriptedEngine


def spoken(running: Running) -> str:
    return str(running.ask(CHAT, ALOUD).json["choices"][0]["message"]["audio"]["id"])


def test_so_many_answers_can_be_referred_to() -> None:
    engine = ScriptedEngine(packets=[np.zeros(1920, np.float32)])
    with serve(engine, audio_kept=2) as running:
        first, second, third = (spoken(running) for _ in range(3))
        store = running.server.service.answers
        assert len(store.find((first, second, third), "anyone")) == 2
        assert store.find((first,), "anyone") == {}
        assert store.find((third,), "anyone") == {third: "Hello there."}


def test_their_words_are_bounded_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answer_store, "MAX_CHARS", 10)
    store = AnswerStore(max_answers=100, lifetime=3600.0)
    for i, words in enumerate(("four", "five5", "six6", "x" * 10)):
        store.add(str(i), "me", words)
        assert sum(len(w) for w in store.find("0123", "me").values()) <= 10
    assert store.find("0123", "me") == {"3": "x" * 10}
    store.add("4", "me", "x" * 11)
    assert store.find("01234", "me") == {}


# ---- memory files


def files() -> int:
    """Memory files that this process, which is the server, has open or mapped."""
    count = 0
    for fd in os.listdir("/proc/self/fd"):
        try:
            count += os.readlink(f"/proc/self/fd/{fd}").startswith("/memfd:stretto")
        except OSError:
            continue
    return count


def form(**fields: Any) -> tuple[bytes, str]:
    parts = [
        f'--x\r\nContent-Disposition: form-data; name="{k}"\r\n\r\n{v}\r\n'.encode()
        for k, v in fields.items()
    ]
    head = b'--x\r\nContent-Disposition: form-data; name="file"; filename="a.wav"\r\n\r\n'
    return b"".join(parts) + head + sound_file(
        tone(0.5)
    ) + b"\r\n--x--\r\n", "multipart/form-data; boundary=x"


SCRIBE = Transcription("Write.", "Write in {language}.", "Translate.", {"en": "English"})


@pytest.mark.parametrize(
    ("path", "fields", "status"),
    [
        ("transcriptions", {}, 200),
        ("transcriptions", {"stream": "true"}, 200),
        ("translations", {"response_format": "verbose_json"}, 200),
        ("transcriptions", {"model": "unknown"}, 404),
        ("transcriptions", {"language": "xx"}, 400),
    ],
)
def test_files_of_a_transcription_go_with_it(
    path: str, fields: dict[str, str], status: int
) -> None:
    body, kind = form(**fields)
    with serve(ScriptedEngine(transcription=SCRIBE)) as running:
        before = files()
        for _ in range(5):
            reply = running.ask(f"/v1/audio/{path}", body, headers={"Content-Type": kind})
            assert reply.status == status, reply.body
        running.do(running.server.service.admission.idle.wait())
        assert files() == before


def test_files_of_a_large_request_that_is_wrong_go_with_it() -> None:
    body = json.dumps({**ALOUD, "modle": 1}).encode() + b" " * ON_THE_LOOP
    with serve(ScriptedEngine()) as running:
        before = files()
        for _ in range(5):
            assert running.ask(CHAT, body).status == 400
        running.do(running.server.service.admission.idle.wait())
        assert files() == before


def test_files_of_a_transcription_that_fails_go_too() -> None:
    full = ScriptedEngine(transcription=SCRIBE, fail_at=1, error=Busy("no row is free"))
    body, kind = form()
    with serve(full) as running:
        before = files()
        for _ in range(5):
            assert (
                running.ask("/v1/audio/transcriptions", body, headers={"Content-Type": kind}).status
                == 429
            )
        running.do(running.server.service.admission.idle.wait())
        assert files() == before
