"""The server's parts on their own: codecs, the tool parser, the memory, settings, keys."""

from __future__ import annotations

import base64
import json
import logging
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.datastructures import Headers

from stretto.commands.serve import describe
from stretto.errors import Invalid
from stretto.observe.logs import JsonLines
from stretto.preprocess.audio_references import recall
from stretto.server.http.exchange import CutConnection
from stretto.server.keys import NOBODY, Keys
from stretto.server.openai import codecs
from stretto.server.openai.answer_store import AudioMemory
from stretto.server.openai.error_body import Refused
from stretto.server.openai.tools import Call, ToolParser
from stretto.server.request_log import RequestLog
from stretto.server.run import CutConnectionFilter
from stretto.types import RequestId
from tests.server.conftest import read_file, read_open


def test_the_server_needs_no_torch() -> None:
    modules = (
        "stretto.server.run, stretto.commands.serve, stretto.models.qwen3_omni.prompts, "
        "stretto.registry"
    )
    code = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# ---- codecs


@given(st.lists(st.binary(max_size=40), max_size=12))
def test_pieces_join_as_base64(parts: list[bytes]) -> None:
    pieces = codecs.Pieces()
    cut = [pieces.feed(p) for p in parts] + [pieces.finish()]
    assert base64.b64decode("".join(base64.b64encode(p).decode() for p in cut)) == b"".join(parts)


@pytest.mark.parametrize("format", ["pcm", "wav", "flac", "mp3", "opus"])
@pytest.mark.parametrize("sizes", [[1365, 1920, 3840, 15360], [1] * 9, [24000]])
def test_streamed_files_can_be_read(format: str, sizes: list[int]) -> None:
    n = sum(sizes)
    samples = (9000 * np.sin(np.arange(n) * 0.07)).astype("<i2")
    encoder = codecs.streamed(format, 24_000)
    ends = np.cumsum(sizes)
    data = b"".join(
        encoder.feed(samples[e - s : e].tobytes()) for e, s in zip(ends, sizes, strict=True)
    )
    data += encoder.finish()
    if format == "pcm":
        assert data == samples.tobytes()
        return
    got, rate = (read_open if format == "flac" else read_file)(data)
    assert rate == 24_000
    if format in ("wav", "flac"):
        np.testing.assert_array_equal(got, samples)
    else:
        assert n <= len(got) + (1 if n < 100 else 0) <= n + 4 * 1152


def test_streamed_flac_is_whole_but_for_its_length() -> None:
    """A reader that wants a length, such as libsndfile, finds the rest in order once it is written
    in."""
    samples = (9000 * np.sin(np.arange(50_000) * 0.07)).astype("<i2")
    encoder = codecs.streamed("flac", 24_000)
    data = bytearray(encoder.feed(samples.tobytes()) + encoder.finish())
    length = int.from_bytes(data[21:26], "big")  # the last 36 bits, in the header of the stream
    assert length & ((1 << 36) - 1) == 0, "unknown"
    data[21:26] = (length | len(samples)).to_bytes(5, "big")
    np.testing.assert_array_equal(read_file(bytes(data))[0], samples)


def test_a_whole_flac_file_says_how_long_it_is() -> None:
    samples = (9000 * np.sin(np.arange(50_000) * 0.07)).astype("<i2")
    np.testing.assert_array_equal(
        read_file(codecs.encode("flac", samples.tobytes(), 24_000))[0], samples
    )


@pytest.mark.parametrize("format", ["flac", "mp3", "opus"])
def test_compressed_sound_is_not_held_back(format: str) -> None:
    """After half a second of sound, some of it is on its way."""
    encoder = codecs.streamed(format, 24_000)
    start = len(encoder.feed(bytes(2 * 960)))
    rng = np.random.default_rng(0)
    later = [
        len(encoder.feed(rng.integers(-3000, 3000, 1920).astype("<i2").tobytes())) for _ in range(6)
    ]
    assert start >= 0
    assert sum(later) > 600


@pytest.mark.parametrize("format", ["wav", "flac", "mp3", "opus"])
def test_whole_files_of_nothing(format: str) -> None:
    assert codecs.encode(format, b"", 24_000)


# ---- tools

CALL = '<tool_call>\n{"name": "f", "arguments": {"x": [1, "}"]}}\n</tool_call>'


def parse(pieces: list[str]) -> tuple[str, list[Call]]:
    parser, out = ToolParser(), []
    for p in pieces:
        out += parser.feed(p)
    out += parser.finish()
    return "".join(o for o in out if isinstance(o, str)), [o for o in out if isinstance(o, Call)]


@given(
    st.lists(st.integers(1, len(CALL)), max_size=20),
    st.sampled_from(["", "Hi! ", "a < b <tool", " \n"]),
)
def test_calls_are_found_however_the_text_is_cut(cuts: list[int], before: str) -> None:
    text, at, pieces = f"{before}{CALL}\n{CALL}", 0, []
    for n in cuts:
        pieces.append(text[at : at + n])
        at += n
    said, calls = parse([*pieces, text[at:]])
    assert said == before.rstrip()
    assert [(c.name, json.loads(c.arguments)) for c in calls] == [("f", {"x": [1, "}"]})] * 2


@pytest.mark.parametrize(
    "text",
    [
        "plain words\n",
        "a < b",
        "<tool_call>not json</tool_call>",
        "<tool_call>{}</tool_call> after",
        '<tool_call>{"name": 3}</tool_call>',
        '<tool_call>{"name": "f", "arguments": 7}</tool_call>',
        "<tool_call>" + "[" * 100_000 + "</tool_call>",
        "<tool_call>{",
        "<tool_call",
        "  ",
        "",
    ],
)
def test_what_is_no_call_is_text(text: str) -> None:
    for pieces in ([text], [*text[:300], text[300:]]):
        assert parse(pieces) == (text, [])


def test_an_unclosed_call_counts() -> None:
    assert parse(['<tool_call>{"name": "f"}']) == ("", [Call("f", "{}")])
    assert parse(['<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}']) == (
        "",
        [Call("f", '{"a": 1}')],
    )


@pytest.mark.parametrize(
    ("text", "said", "calls"),
    [
        ('<tool_call>\n{"name": "f", "arguments": {"city": "Ro', "", [("f", '{"city": "Ro')]),
        ('Hi! <tool_call>{"name": "f", "argu', "Hi!", [("f", "")]),
        ('<tool_call>{"name": "f", "arguments": {"a": 1}', "", [("f", '{"a": 1}')]),
        ('<tool_call>{"na', "", []),
        ("Hi! <tool_ca", "Hi!", []),
        ("a <", "a <", []),
        ("plain words\n", "plain words\n", []),
    ],
)
def test_a_call_that_is_cut_is_a_call(text: str, said: str, calls: list[tuple[str, str]]) -> None:
    for pieces in ([text], list(text)):
        parser, out = ToolParser(), []
        for p in pieces:
            out += parser.feed(p)
        out += parser.finish(cut=True)
        assert "".join(o for o in out if isinstance(o, str)) == said
        assert [o for o in out if isinstance(o, Call)] == [Call(*c, complete=False) for c in calls]
        assert parser.num_calls == len(calls)


# ---- memory


def test_memory_is_bounded_and_forgets() -> None:
    now = [100.0]
    memory = AudioMemory(3, 10.0, clock=lambda: now[0])
    assert [memory.keep(f"a{i}", "me", f"words {i}") for i in range(4)] == [110] * 4

    # The fourth pushed the first out.
    assert memory.recall(["a0", "a1", "a3", "a9"], "me") == {"a1": "words 1", "a3": "words 3"}
    assert memory.recall(["a1"], "someone else") == {}
    now[0] = 110.0
    assert memory.recall(["a1", "a2", "a3"], "me") == {}


def test_references_become_words() -> None:
    said: dict[str, Any] = {"role": "assistant", "audio": {"id": "a"}}
    assert recall([said], {"a": "words"}) == [{"role": "assistant", "content": "words"}]
    with pytest.raises(Invalid, match="no answer 'a'"):
        recall([said], {})
    for bad in ({}, {"id": 3}, "a1", [1]):
        with pytest.raises(Invalid) as caught:
            recall([{"role": "user"}, {"role": "assistant", "audio": bad}], {"a": "words"})
        assert caught.value.param == "messages[1].audio"
    untouched: list[Any] = [
        {"role": "user", "audio": {"id": "x"}},
        {"role": "assistant", "content": "y", "audio": None},
        7,
    ]
    assert recall(untouched, {"x": "words"}) == untouched


# ---- access


def test_keys() -> None:
    assert Keys.of(()).owner(Headers({})) == NOBODY
    keys = Keys.of(("a", "b"))
    assert keys.owner(Headers({"Authorization": "bearer b"})) == "key2"
    with pytest.raises(Refused):
        keys.owner(Headers({"Authorization": "Bearer ab"}))


# ---- the playback clock


def test_underruns_are_counted_as_a_player_hears_them() -> None:
    now = [0.0]

    class Clocked(RequestLog):
        def elapsed(self) -> float:
            return now[0]

    request_log = Clocked(RequestId("r"), "r", arrived=0.0, sample_rate=1000)
    for now[0] in (1.0, 1.4, 2.0, 2.2):  # packets of 0.5 s; the third comes just in time
        request_log.saw_audio(500)
    assert request_log.underrun == pytest.approx(0.0)
    now[0] = 4.0  # what there was, 2.0 s from 1.0 on, had been played at 3.0
    request_log.saw_audio(500)
    assert request_log.underrun == pytest.approx(1.0)
    assert request_log.rtf == pytest.approx(4.0 / 2.5)


def test_env_says_what_is_installed() -> None:
    facts = describe()
    assert facts["uvicorn"][0].isdigit()
    assert {"stretto", "python", "torch", "cpus"} <= set(facts)


def test_json_log_lines() -> None:
    record = logging.LogRecord("stretto.access", logging.INFO, "", 1, "a=%s", ("b",), None)
    assert json.loads(JsonLines().format(record))["message"] == "a=b"
    record.fields = {"id": "req-1", "ms": 2.5}
    line = json.loads(JsonLines().format(record))
    assert (line["id"], line["ms"], line["level"]) == ("req-1", 2.5, "info")
    try:
        raise ValueError("why")
    except ValueError:
        record.exc_info = sys.exc_info()
    assert "ValueError: why" in json.loads(JsonLines().format(record))["stack"]
    assert CutConnectionFilter().filter(record)
    record.exc_info = (CutConnection, CutConnection("cut"), None)
    assert not CutConnectionFilter().filter(record)
