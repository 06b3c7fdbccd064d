"""The benchmark of a server: what is asked, what a listener notes, and how a first packet's time is
split."""

import argparse
import asyncio
import base64
import json
import time
from pathlib import Path

import msgspec
import pytest

from bench import serve
from bench.harness.checkpoint import checkpoint, host_fields
from bench.harness.crowd import Questions, came, delta
from bench.harness.listener import Heard, Job, run
from bench.harness.workload import WORKLOADS
from bench.serve import PHASES, begin, phases, run_part, server_flags
from stretto.loadtest.player import Packet
from stretto.loadtest.runner import Level, Open, Sample
from stretto.models.qwen3_omni.config import OmniConfig
from stretto.models.qwen3_omni.prompts import PromptBuilder
from stretto.server.openai.schema import ChatRequest


def test_questions_are_exact_differ_and_are_accepted() -> None:
    with checkpoint("released") as directory:
        builder = PromptBuilder.open(directory, OmniConfig.read(directory))
        questions = Questions(directory.name, builder.tokenizer)
        sizes = {}
        for name in ("text-100", "text-2000"):
            bodies = questions.bodies(WORKLOADS[name], 3)
            assert len(set(bodies)) == 3
            requests = [msgspec.json.decode(b, type=ChatRequest) for b in bodies]
            assert all(b"\n" not in b for b in bodies), "one a line"
            assert requests[0].min_audio_frames == requests[0].max_audio_frames == 125
            raw = [json.loads(b)["messages"] for b in bodies]
            sizes[name] = {len(builder.build(m).ids) for m in raw}
        (short,), (long,) = sizes["text-100"], sizes["text-2000"]
        assert long - short == 1900, "the template around them is the same"
        # Any token that a random model may say is a word, so that text is on its way for each.
        assert all(builder.tokenizer.token_bytes(i) for i in (0, 1234, 99_999, 152_063))


def event(**delta: object) -> bytes:
    data = b"data: " + json.dumps({"choices": [{"delta": delta}]}).encode() + b"\n\n"
    return b"%x\r\n%b\r\n" % (len(data), data)


async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    head = await reader.readuntil(b"\r\n\r\n")
    size = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
    body = json.loads(await reader.readexactly(size))
    if body.get("refuse"):
        writer.write(b"HTTP/1.1 429 Too Many\r\nContent-Length: 4\r\n\r\nfull")
    else:
        sound = base64.b64encode(bytes(3840)).decode()
        report = b'data: {"choices":[{"delta":{},"finish_reason":"stop"}],"stretto":{"seed":7}}\n\ndata: [DONE]\n\n'  # noqa: E501
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        writer.write(
            event(audio={"transcript": "so"}) + event(audio={"data": sound}) * body["packets"]
        )
        writer.write(b"%x\r\n%b\r\n0\r\n\r\n" % (len(report), report))
    await writer.drain()
    writer.close()


def test_a_listener_notes_every_piece_and_every_failure() -> None:
    async def work() -> list[Heard]:
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        bodies = [json.dumps({"packets": n}).encode() for n in (1, 3, 0)] + [b'{"refuse": true}']
        async with server:
            return await run(Job(port, "", "", streams=2, warmup=1), bodies, time.monotonic())

    heard = {h.sample.index: h for h in asyncio.run(work())}
    assert [heard[i].counts for i in range(4)] == [False, True, True, True]
    assert [len(heard[i].sample.packets) for i in range(4)] == [1, 3, 0, 0]
    assert heard[1].sample.audio_seconds == pytest.approx(0.24)
    assert heard[1].report == {"seed": 7}
    assert [heard[i].sample.error for i in range(4)] == [None, None, "no audio", "http 429"]
    again = msgspec.json.decode(msgspec.json.encode(list(heard.values())), type=list[Heard])
    assert [h.sample for h in again] == [h.sample for h in heard.values()]


def test_requests_are_sent_at_their_scheduled_times() -> None:
    """Nobody is answered before all have asked: in a closed loop that would never end."""

    async def work() -> list[Heard]:
        asked, all_there = 0, asyncio.Event()

        async def late(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal asked
            asked += 1
            if asked == 3:
                all_there.set()
            await all_there.wait()
            await answer(reader, writer)

        server = await asyncio.start_server(late, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        bodies = [json.dumps({"packets": 1}).encode()] * 3
        async with server:
            job = Job(port, "", "", streams=1, arrivals=[0.0, 0.01, 0.02], lead=0.0)
            return await run(job, bodies, time.monotonic())

    heard = asyncio.run(work())
    assert sorted(h.sample.index for h in heard) == [0, 1, 2]
    assert all(h.sample.error is None for h in heard)
    for h in heard:
        assert h.sample.sent >= [0.0, 0.01, 0.02][h.sample.index]


def test_what_is_told_of_arrivals() -> None:
    samples = [
        Sample(i, sent, end=end)
        for i, (sent, end) in enumerate([(0.1, 5.0), (1.0, 1.0), (2.0, 1.0), (9.0, 1.0)])
    ]
    told = came([0.0, 1.0, 2.0, 8.5], Level(Open(1.0), samples))
    assert told["sent_late_s"] == pytest.approx(0.5)
    assert told["most_at_once"] == 2
    assert told["arrivals"] == [0.0, 1.0, 2.0, 8.5]


def test_parts_of_a_file_are_measured_one_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With --add, what is there stays with the commit that it was measured at; without it, nothing
    stays."""
    monkeypatch.setattr(serve, "described", lambda: {"commit": "new", "clean": True})
    out = tmp_path / "h200.json"
    out.write_text(
        json.dumps({"parts": {"host": {"env": {"commit": "old"}}}, "start": {"ready_s": 47.0}})
    )
    args = argparse.Namespace(add=True, out=out)
    result = begin(args)
    run_part("latency", lambda: iter([{"one": 1}]), result, out)
    saved = json.loads(out.read_text())
    assert [saved["parts"][name]["env"]["commit"] for name in ("host", "latency")] == ["old", "new"]
    assert [s["ready_s"] for s in saved["starts"]] == [47.0]
    fresh = begin(argparse.Namespace(add=False, out=out))
    assert fresh["parts"] == {}
    assert fresh["starts"] == []


def test_the_time_to_the_first_packet_is_split_without_a_rest() -> None:
    spans = [
        ("thinker", "prompt", 0.002, 0.012), ("thinker", "prompt", 0.012, 0.020), ("thinker",
        "token", 0.020, 0.022),
        ("talker", "prompt", 0.002, 0.009), ("talker", "prompt", 0.009, 0.025), ("talker", "frame",
        0.025, 0.028),
        ("code2wav", "first frame", 0.002, 0.027), ("packets", "packet", 0.0275, 0.0275),
        ("packets", "packet", 0.09, 0.09),
    ]  # fmt: skip
    report = {
        "timeline": [dict(zip(("lane", "name", "start", "stop"), s, strict=True)) for s in spans]
    }
    heard = Heard(Sample(0, 0.0, packets=[Packet(0.030, 0.05)]), True, report)
    split = phases(heard)
    assert split is not None
    assert list(split) == list(PHASES)
    assert sum(split.values()) == pytest.approx(0.030)
    assert list(split.values()) == pytest.approx([0.002, 0.018, 0.005, 0.002, 0.0005, 0.0025])
    assert phases(Heard(Sample(0, 0.0), True, report)) is None
    assert phases(Heard(heard.sample, True, None)) is None


def test_a_part_that_fails_keeps_what_it_found() -> None:
    def part():
        yield {"one": 1}
        raise RuntimeError("no more")

    result = {"parts": {}, "env": {"commit": "abc"}}
    run_part("x", part, result)
    assert result["parts"]["x"]["found"] == [{"one": 1}]
    assert result["parts"]["x"]["error"] == "RuntimeError: no more"


def test_counters_are_told_as_what_they_grew_by() -> None:
    name = 'stretto_stage_steps_total{stage="talker"}'
    told = {
        "stretto_host_idle_seconds_total": 2.0,
        'stretto_stage_device_seconds_sum{stage="talker"}': 4.0,
    }
    before, after = {name: 3.0}, {name: 10.0, **told, "stretto_stage_waiting": 5.0}
    assert delta(before, after) == {name: 7.0, **told}


def test_the_host_alone_runs_the_model_that_is_served() -> None:
    given = ['expert_weights="float8"', "max_rows=4", "graphs=false"]
    assert server_flags(given) == ["--expert-weights", "float8", "--max-rows", "4", "--no-graphs"]
    assert host_fields(given) == {"expert_weights": "float8", "max_rows": 4, "graphs": False}
    assert server_flags([]) == []
