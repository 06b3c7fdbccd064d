"""Forms and clips on their way in: how they are cut, what is refused, and that the event loop
copies nothing large."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import random
import threading
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

from stretto.errors import Invalid
from stretto.preprocess.pool.jobs import Outlined
from stretto.preprocess.pool.memfile import MemFile
from stretto.preprocess.pool.worker import do_outline
from stretto.server.http import forms
from stretto.server.http.forms import MAX_FIELD, MAX_PARTS, boundary, in_thread, parse_form, part_of
from tests.server.conftest import Running, serve
from tests.server.scripted_engine import ScriptedEngine

SOUNDS, VOICES = "/v1/audio/transcriptions", "/v1/audio/voices"
FORM = {"Content-Type": "multipart/form-data; boundary=mark"}
LARGE = 3 << 20


@pytest.fixture
def running() -> Iterator[Running]:
    with serve(Elsewhere(), drain_timeout=1.0) as it:
        yield it


class Elsewhere(ScriptedEngine):
    """Cuts large bodies in a thread, as a real engine does in another process."""

    async def outline(
        self, body: MemFile, long: tuple[str, ...], most: int, client: str = ""
    ) -> tuple[Outlined, MemFile]:
        return await asyncio.to_thread(lambda: do_outline(body.view(), long, most))


def part(name: str, data: bytes, file: bool = False) -> bytes:
    extra = '; filename="a"' if file else ""
    return (
        f'--mark\r\nContent-Disposition: form-data; name="{name}"{extra}\r\n\r\n'.encode()
        + data
        + b"\r\n"
    )


def form(*parts: bytes) -> bytes:
    return b"".join(parts) + b"--mark--\r\n"


def descriptors() -> set[str]:
    """The memory files of this process."""
    found = set()
    for fd in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{fd}")
        except OSError:
            continue
        if "memfd:stretto" in target:
            found.add(fd)
    return found


def test_a_form_has_so_many_fields(running: Running) -> None:
    parts = [part(f"f{i}", b"x") for i in range(MAX_PARTS)]
    reply = running.ask(SOUNDS, form(*parts), headers=FORM)
    assert reply.status == 400
    assert f"at most {MAX_PARTS} fields" in reply.error["message"]
    parts[0] = part("file", b"x", file=True)
    reply = running.ask(SOUNDS, form(*parts[:-1]), headers=FORM)
    assert "unknown field" in reply.error["message"], "so many are read"


def test_a_field_stands_in_a_form_once(running: Running) -> None:
    file = part("file", b"x", file=True)
    for twice in (part("model", b"a") * 2, file * 2, part("file", b"x") + file):
        reply = running.ask(SOUNDS, form(file if b"model" in twice else b"", twice), headers=FORM)
        assert reply.status == 400
        assert "is there twice" in reply.error["message"]
        assert reply.error["param"] == ("model" if b"model" in twice else "file")


def test_a_field_that_is_no_file_is_short(running: Running) -> None:
    file = part("file", b"x", file=True)
    reply = running.ask(SOUNDS, form(file, part("prompt", b"x" * (MAX_FIELD + 1))), headers=FORM)
    assert (reply.status, reply.error["param"]) == (400, "prompt")
    assert "no file" in reply.error["message"]


def test_a_form_is_the_same_however_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(3)
    for _ in range(40):
        noise = bytes(rng.choice(b"\r\n-mark") for _ in range(rng.randrange(200)))
        body = form(part("a", b"\r\n--mar"), part("file", noise, file=True), part("b", b""))
        if b"\r\n--mark" in b"\r\n" + noise:
            continue
        expected = parse_form(body, b"mark")
        assert body[slice(*expected.files["file"])] == noise
        with closing(MemFile.of(body)) as file:
            for window in (12, 13, 50, 1 << 20):
                monkeypatch.setattr(forms, "WINDOW", window)
                assert parse_form(file, b"mark") == expected
            with closing(part_of(file, expected.files["file"])) as copied:
                assert copied.read(0, copied.size) == noise


@pytest.mark.parametrize("kind", ["sound", "clip in a form", "clip in JSON"])
def test_the_loop_copies_nothing_large(
    kind: str, running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a request of megabytes, the event loop's thread touches what arrives, part by part, and
    the short fields."""
    sizes: list[int] = []
    loop = running.thread

    def watched(name: str, size: Any) -> None:
        method = getattr(MemFile, name)

        def call(self: MemFile, *args: Any) -> Any:
            if threading.current_thread() is loop:
                sizes.append(size(self, *args))
            return method(self, *args)

        monkeypatch.setattr(MemFile, name, call)

    watched("read", lambda self, start, stop: stop - start)
    watched("append", lambda self, data: len(data))
    before = descriptors()
    clip = bytes(LARGE)
    if kind == "clip in JSON":
        body, headers = (
            json.dumps({"name": "a", "audio": base64.b64encode(clip).decode()}).encode(),
            {},
        )
    else:
        body, headers = form(part("file", clip, file=True), part("name", b"a")), FORM
        if kind == "sound":
            body = form(part("file", clip, file=True), part("model", b"nobody"))
    reply = running.ask(SOUNDS if kind == "sound" else VOICES, body, headers=headers)
    assert (reply.status, reply.error["param"]) == (404 if kind == "sound" else 400, "model")
    assert sizes
    assert max(sizes) <= 1 << 19
    while not descriptors() <= before:  # large files are closed in a thread
        os.sched_yield()


def test_leaving_while_a_form_is_read_closes_its_files() -> None:
    """The request's own file is closed at once, the thread reads on in its copy of the descriptor,
    and what it made is closed when it is done."""
    before = descriptors()
    begun, go_on, done = threading.Event(), threading.Event(), asyncio.Event()

    def work(source: forms.Source) -> MemFile:
        assert isinstance(source, MemFile)
        begun.set()
        assert go_on.wait()
        assert source.read(0, 5) == b"hello"
        return part_of(source, (0, 5))

    async def main() -> None:
        loop = asyncio.get_running_loop()
        file = MemFile.of(b"hello")

        def discard(made: MemFile) -> None:
            made.close()
            loop.call_soon(done.set)

        task = asyncio.create_task(in_thread(file, work, discard))
        await asyncio.to_thread(begun.wait, 60)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        file.close()
        go_on.set()
        await done.wait()

    asyncio.run(main())
    assert descriptors() <= before


def test_forms() -> None:
    mark = boundary('multipart/form-data; boundary="a b"')
    body = (
        b'--a b\r\nContent-Disposition: form-data; name="model"\r\n\r\nx\r\n'
        b'--a b\r\nContent-Disposition: form-data; name="file"; '
        b'filename="../../etc"\r\n\r\n\r\n\r\n\x00--a\r\n'
        b"--a b--\r\n"
    )
    form = parse_form(body, mark)
    assert form.fields == {"model": "x"}
    assert body[slice(*form.files["file"])] == b"\r\n\r\n\x00--a"
    for i in range(len(body) - 4):
        with pytest.raises(Invalid):
            parse_form(body[:i], mark)
    with pytest.raises(Invalid, match="twice"):
        parse_form(body[:-9] + b"\r\n" + body, mark)
    with pytest.raises(Invalid, match="boundary"):
        boundary("multipart/form-data")
    assert json.dumps(form.fields)


def test_a_list_comes_as_several_fields_of_one_name() -> None:
    body = b"".join(
        b'--a b\r\nContent-Disposition: form-data; name="%s"\r\n\r\n%s\r\n' % field
        for field in ((b"x[]", b"1"), (b"y[]", b"7"), (b"x[]", b"2"), (b"x[]", b"3"))
    )
    form = parse_form(body + b"--a b--\r\n", boundary('multipart/form-data; boundary="a b"'))
    assert form.fields == {"x[]": "1,2,3", "y[]": "7"}
