"""The prompt worker: the same prompts as in this process, within limits, and nothing left when a
caller goes."""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import json
import os
import resource
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stretto.errors import Busy, CheckpointError, Invalid, MediaError, StageDead, TooLong, WireError
from stretto.models.qwen3_omni.config import OmniConfig
from stretto.models.qwen3_omni.prompts import PromptBuilder
from stretto.preprocess.packed_prompt import (
    PackedPiece,
    PackedPrompt,
    PromptFeatures,
    pack,
    pack_ids,
)
from stretto.preprocess.pool import job_process
from stretto.preprocess.pool import pool as pool_module
from stretto.preprocess.pool.fair_queue import FairQueue
from stretto.preprocess.pool.job_process import (
    BURST_S,
    SHARE,
    SHORT_S,
    Children,
    Credit,
    WorkerLimits,
)
from stretto.preprocess.pool.jobs import (
    MAX_DATAGRAM,
    Conversation,
    Cut,
    FromWorker,
    Job,
    JobFailed,
    decode_from_worker,
)
from stretto.preprocess.pool.memfile import MemFile
from stretto.preprocess.pool.pool import PromptPool
from stretto.preprocess.pool.threads import InThreads
from stretto.preprocess.prepared import prepared
from stretto.preprocess.prompt import DIGEST_BYTES
from stretto.preprocess.text_chunks import Passages
from tests.preprocess.pool.workers import (
    HELLO,
    TOOLS,
    heavy,
    picture,
    processes,
    sound,
    talk,
    until,
    with_pool,
)
from tests.preprocess.samples import video_file


def film() -> dict[str, Any]:
    url = "data:video/mp4;base64," + base64.b64encode(video_file()).decode()
    return {"type": "video_url", "video_url": {"url": url}}


def same(a: PackedPrompt, b: PackedPrompt) -> None:
    assert a.for_host(with_features=True) == b.for_host(with_features=True)
    assert a.feature_bytes() == b.feature_bytes()


def test_the_same_prompts_as_in_this_process(tiny_dir: Path) -> None:
    threads = InThreads(PromptBuilder.open(tiny_dir, OmniConfig.read(tiny_dir)))
    said = {"role": "assistant", "audio": {"id": "audio_1"}}
    recalled = {"audio_1": "Good day."}
    asked = [
        talk(HELLO),
        talk(HELLO, TOOLS),
        talk([*HELLO, said, *HELLO], recalled=recalled),
        talk([{"role": "user", "content": "long " * 4000}], TOOLS),  # too long to be done at once
        talk([{"role": "user", "content": "word " * 4000}, said, *HELLO], recalled=recalled),
        talk([{"role": "user", "content": [picture(64), {"type": "text", "text": "?"}]}]),
        talk([{"role": "user", "content": [sound(), picture(90), film(), {"type": "text",
        "text": "?"}]}]),
    ]  # fmt: skip
    assert len(asked) > 6

    async def test(pool: PromptPool) -> None:
        built = await asyncio.gather(*(pool.build(a) for a in asked))
        for a, b in zip(asked, built, strict=True):
            same(b, (await threads.build(a)))
            assert b.tts_ids is None
        for text in ("Read me.", "word " * 4000):  # the second is too long to be done at once
            ours, theirs = await threads.read(text), await pool.read(text)
            same(theirs, ours)
            assert theirs.tts_ids == ours.tts_ids
            assert ours.tts_ids
        rules = Passages.by_sentence(20, "en")
        for text in ("Dr. Ash has 3 cats, and they are small.", "你好", "word " * 4000):
            divided = await pool.divide(text, rules)
            assert divided == await threads.divide(text, rules)
            assert bool(divided) == (text != "你好")

    with_pool(tiny_dir, test)


def test_sessions_have_the_same_prompts_and_their_features_stay_here(tiny_dir: Path) -> None:
    builder = PromptBuilder.open(tiny_dir, OmniConfig.read(tiny_dir))
    threads = InThreads(builder)
    seen = prepared(
        builder,
        {"role": "user", "content": [sound(), {"type": "text", "text": "?"}, picture(64), film()]},
    )
    heard = prepared(builder, {"role": "user", "content": [sound()]})
    asked: list[tuple[list[Any], Any]] = [
        (HELLO, None),
        (
            [
                {"role": "system", "content": "Be brief."},
                heard,
                {"role": "assistant", "content": "Oh."},
                seen,
            ],
            TOOLS,
        ),
        (
            [seen, *HELLO, heard, {"role": "user", "content": "word " * 4000}],
            None,
        ),  # in a process of its own
        ([{"role": "user", "content": "half a pair: \ud83d"}], None),
    ]

    async def test(pool: PromptPool) -> None:
        for messages, tools in asked:
            ours, theirs = (
                await threads.build_for("s", messages, tools),
                await pool.build_for("s", messages, tools),
            )
            assert theirs.ids == ours.ids
            assert [id(p) for p in theirs.pieces()] == [id(p) for p in ours.pieces()]
            same(pack(theirs), pack(ours))
        with pytest.raises(TooLong):
            await pool.build_for("s", [{"role": "user", "content": "word " * 190_000}])
        with pytest.raises(Invalid, match="role"):
            await pool.build_for("s", [{"role": "nobody", "content": "Hello"}])
        with pytest.raises(Invalid):
            await pool.build_for("s", [{"role": "user", "content": object()}])

    with_pool(tiny_dir, test)


def test_short_conversations_wait_neither_for_long_ones_nor_for_media(roomy_dir: Path) -> None:
    def said(count: int, turns: int = 1) -> list[Any]:
        return [{"role": "user", "content": "word " * count}] * turns

    async def test(pool: PromptPool) -> None:
        media = [asyncio.create_task(pool.build(heavy(client=s))) for s in "ab"]
        await until(lambda: pool.queue.running == 2 and len(processes(pool)) == 2)
        decoding = processes(pool)
        for pid in decoding:
            os.kill(pid, signal.SIGSTOP)  # they take as long as this test
        long = [asyncio.create_task(pool.build_for("c", said(1000, turns=150))) for _ in range(3)]
        await until(
            lambda: pool.metrics()["stretto_prompts_running"] == 3 and len(processes(pool)) == 3
        )
        assert pool.metrics()["stretto_prompts_waiting"] == 2  # one long one at a time
        [talking] = set(processes(pool)) - set(decoding)
        await until(lambda: worked(talking) > 2 * SHORT_S)
        os.kill(talking, signal.SIGSTOP)
        assert os.sched_getscheduler(talking) == os.SCHED_BATCH  # whatever the machine has to do
        for count in (5, 5000):
            assert len((await pool.build_for("c", said(count))).ids) > count
        assert not any(task.done() for task in (*media, *long))
        for task in (*media, *long):
            task.cancel()
        await asyncio.gather(*media, *long, return_exceptions=True)
        await until(lambda: not pool.metrics()["stretto_prompts_running"])

    with_pool(roomy_dir, test)


def worked(pid: int) -> float:
    """CPU time of its own, in seconds."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) / os.sysconf("SC_CLK_TCK")


def test_large_bodies_are_cut_as_a_decoder_would(tiny_dir: Path) -> None:
    body = {
        "model": "m",
        "messages": HELLO * 800,
        "stream": True,
        "tools": TOOLS,
        "x": {"y": [1, None]},
    }

    async def test(pool: PromptPool) -> None:
        memfile = MemFile.of(json.dumps(body).encode())
        outlined, file = await pool.outline(memfile, ("messages", "tools"), 1000)
        view = file.view()
        assert json.loads(bytes(view[: outlined.short])) == {
            k: body[k] for k in ("model", "stream", "x")
        }
        for name, (a, b) in outlined.long.items():
            assert json.loads(bytes(view[a:b])) == body[name]
        built = await pool.build(
            Conversation(file, outlined.long["messages"], outlined.long["tools"])
        )
        same(built, (await pool.build(talk(body["messages"], TOOLS))))
        file.close()
        with pytest.raises(Invalid, match="x is too large") as caught:
            await pool.outline(memfile, ("messages", "tools"), 12)
        assert caught.value.param == "x"
        fields = {"x": "y" * 900, "messages": HELLO, "logit_bias": dict.fromkeys(range(300), 1)}
        biased = MemFile.of(json.dumps(fields).encode())
        with pytest.raises(
            Invalid, match=r"logit_bias is too large: [\d,]+ bytes; all fields but messages"
        ) as caught:
            await pool.outline(biased, ("messages", "tools"), 1000)
        assert caught.value.param == "logit_bias"
        for bad in (b"[1]", b'{"messages":', b"\xff", b"[" * 100_000):
            with pytest.raises(Invalid):
                await pool.outline(MemFile.of(bad), ("messages",), 1000)
        ids = [f"audio_{i:032x}" for i in range(3)]
        with_ids = MemFile.of(
            json.dumps(
                {"messages": [{"role": "assistant", "audio": {"id": i}} for i in ids]}
            ).encode()
        )
        assert list((await pool.outline(with_ids, ("messages",), 1000))[0].references) == ids

    with_pool(tiny_dir, test)


def test_errors_are_the_workers_own(tiny_dir: Path) -> None:
    bad_picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    cases: list[tuple[Any, type[Exception], str]] = [
        ([{"role": "user"}], Invalid, "messages[0].content"),
        ([{"role": "user", "content": [bad_picture]}], MediaError, "messages[0].content[0]"),
        ([{"role": "user", "content": "word " * 190_000}], TooLong, "messages"),
        ([{"role": "assistant", "audio": {"id": "gone"}}], Invalid, "messages[0].audio"),
        ([{"role": "user", "content": [{"type": "image", "path": str(tiny_dir / "config.json")}]}],
        Invalid,
         "messages[0].content[0].path"),
    ]  # fmt: skip

    async def test(pool: PromptPool) -> None:
        for messages, kind, param in cases:
            with pytest.raises(kind) as caught:
                await pool.build(talk(messages))
            assert type(caught.value) is kind
            assert caught.value.param == param  # type: ignore[attr-defined]
        for broken in (b"[", b"\xff\xff", b"[" * 3000):
            with pytest.raises(Invalid, match="not valid JSON"):
                await pool.build(Conversation.of(broken))
        assert pool.metrics()["stretto_prompt_worker_restarts_total"] == 0

    with_pool(tiny_dir, test)


def test_a_checkpoint_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")

    async def test(pool: PromptPool) -> None:
        pass

    with pytest.raises(CheckpointError):
        with_pool(tmp_path, test)


def test_a_start_that_cannot_succeed_ends_with_one_sentence(
    roomy_dir: Path, tmp_path: Path
) -> None:
    async def test(pool: PromptPool) -> None:
        pass

    for file in roomy_dir.iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "chat_template.jinja").unlink(missing_ok=True)
    loop = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    (tmp_path / "chat_template.jinja").write_text(loop)
    with pytest.raises(CheckpointError, match="does not come to an end"):
        with_pool(tmp_path, test)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        with pytest.raises(StageDead, match="ulimit -f"):
            with_pool(roomy_dir, test)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_limits_of_time_and_memory(roomy_dir: Path) -> None:
    async def time(pool: PromptPool) -> None:
        with pytest.raises(Invalid, match="1 s of CPU time"):
            await pool.build(heavy())
        assert len((await pool.build(talk(HELLO))).ids) > 3
        assert pool.metrics()["stretto_prompts_over_limit_total"] == 1

    async def memory(pool: PromptPool) -> None:
        with pytest.raises(MediaError, match=r"[Mm]emory"):
            await pool.build(heavy(1))
        assert (await pool.build(talk([{"role": "user", "content": [picture(64)]}]))).images

    with_pool(roomy_dir, time, cpu_s=1)
    with_pool(roomy_dir, memory, memory_mb=40)


def test_a_caller_that_leaves_ends_its_process(roomy_dir: Path) -> None:
    async def test(pool: PromptPool) -> None:
        running = [asyncio.create_task(pool.build(heavy(client=s))) for s in "abcd"]
        await until(lambda: pool.queue.running == 2 and pool.queue.waiting == 2)
        await until(lambda: len(processes(pool)) == 2)
        children = processes(pool)
        for pid in children:
            os.kill(pid, signal.SIGSTOP)  # they do not end by themselves
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        await until(lambda: not pool.queue.running)  # and that is not before the processes are gone
        assert not pool.queue.waiting
        assert not [pid for pid in children if Path(f"/proc/{pid}").exists()]
        assert pool.metrics()["stretto_prompts_killed_total"] == 2
        assert (await pool.build(talk([{"role": "user", "content": [picture(64)]}]))).images

    with_pool(roomy_dir, test)


def test_children_wait_for_the_next_jobs(roomy_dir: Path) -> None:
    """They take them; the next ones are forked when no job runs. One that was killed meanwhile is
    replaced."""
    asked = talk([{"role": "user", "content": [picture(64)]}])

    async def test(pool: PromptPool) -> None:
        def spares() -> set[int]:
            return set(processes(pool, "prompt spare"))

        await until(lambda: len(spares()) == 2)
        first = spares()
        await until(lambda: {os.sched_getscheduler(pid) for pid in first} == {os.SCHED_BATCH})
        long = asyncio.create_task(pool.build(heavy(client="a")))
        await until(lambda: len(processes(pool)) == 1)
        assert set(processes(pool)) | spares() == first
        await pool.build(dataclasses.replace(asked, client="b"))
        await until(lambda: not spares())  # no other while a job runs
        assert first & set(processes(pool))
        long.cancel()
        await asyncio.gather(long, return_exceptions=True)
        await until(lambda: len(spares()) == 2)
        second = spares()
        assert not first & second
        for pid in second:
            os.kill(pid, signal.SIGKILL)
        for pid in second:
            await until(lambda pid=pid: "State:\tZ" in Path(f"/proc/{pid}/status").read_text())
        assert (await pool.build(asked)).images

    with_pool(roomy_dir, test)


def test_the_worker_has_one_thread_and_has_met_all_media(roomy_dir: Path) -> None:
    """So that its children need not import what they decode with, and forking is safe."""

    async def test(pool: PromptPool) -> None:
        assert pool.worker.process is not None
        here = Path(f"/proc/{pool.worker.process.pid}")
        assert len(list((here / "task").iterdir())) == 1
        mapped = (here / "maps").read_text()
        assert all(name in mapped for name in ("_pocketfft", "_imaging", "soxr"))

    with_pool(roomy_dir, test)


def test_long_work_has_the_cores_that_nobody_needs(roomy_dir: Path) -> None:
    async def test(pool: PromptPool) -> None:
        long = asyncio.create_task(pool.build(heavy()))
        idle = lambda: any(os.sched_getscheduler(pid) == os.SCHED_IDLE for pid in processes(pool))  # noqa: E731
        await until(lambda: long.done() or idle())
        assert not long.done()
        assert pool.worker.process is not None
        assert (
            os.sched_getscheduler(pool.worker.process.pid) == os.SCHED_OTHER
        )  # which does short texts
        long.cancel()
        await asyncio.gather(long, return_exceptions=True)
        await until(lambda: not pool.queue.running)

    with_pool(roomy_dir, test)


def test_jobs_that_are_never_short_use_up_their_credit() -> None:
    now = 100.0
    credit = Credit(lambda: now)
    assert [credit.take() for _ in range(6)] == [SHORT_S] * 5 + [0.0]  # five at once
    now += SHORT_S / SHARE
    assert [credit.take(), credit.take()] == [SHORT_S, 0.0]
    for used in (0.01, 0.2):
        now += SHORT_S / SHARE
        credit.give_back(credit.take() - used)
    assert credit.left == pytest.approx(SHORT_S - 0.01)
    now += 1e6
    assert [credit.take() for _ in range(6)] == [SHORT_S] * 5 + [0.0]


def report_policy(job: Job, files: list[MemFile]) -> tuple[FromWorker, MemFile | None]:
    return JobFailed("MediaError", str(os.sched_getscheduler(0)), "messages"), None


def policy_of_job(children: Children, number: int) -> int:
    """The scheduling policy under which the next job is done."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours:
        children.start(Job(number, Cut(1.0), True), theirs, [])
        assert list(children.wait()) == [number]
        children.reap(number)
        answer = decode_from_worker(ours.recv(MAX_DATAGRAM))
        assert isinstance(answer, JobFailed)
        return int(answer.message)


@contextmanager
def children_without_work(credit: Credit) -> Iterator[Children]:
    control, server = socket.socketpair()
    limits = WorkerLimits(10, 100)
    with control, server:
        children = Children(control, limits, report_policy, lambda: None, credit=credit)
        try:
            yield children
        finally:
            children.close()


def test_without_credit_a_job_has_the_cores_that_nobody_needs() -> None:
    with children_without_work(Credit(lambda: 0.0)) as children:
        assert policy_of_job(children, 1) == os.SCHED_BATCH
        # what it used; the rest went back
        assert 1e-6 < BURST_S - children.credit.left < SHORT_S - 1e-6
        children.credit.left = 0.0
        assert policy_of_job(children, 2) == os.SCHED_IDLE


def test_a_child_that_starts_late_stays_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is forked for its job, and made idle before it has run at all."""
    late = [True]

    def wait_until_idle(parent: int) -> None:
        while late and os.sched_getscheduler(0) != os.SCHED_IDLE:
            os.sched_yield()

    monkeypatch.setattr(job_process, "die_with_parent", wait_until_idle)
    with children_without_work(Credit(lambda: 0.0, left=0.0)) as children:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with ours:
            children.start(Job(1, Cut(1.0), True), theirs, [])
            late.clear()  # of the children that are forked from now on
            answer = decode_from_worker(ours.recv(MAX_DATAGRAM))
        assert isinstance(answer, JobFailed)
        assert int(answer.message) == os.SCHED_IDLE
        assert list(children.wait()) == [1]
        children.reap(1)


def test_short_texts_do_not_wait_for_long_work(roomy_dir: Path) -> None:
    async def test(pool: PromptPool) -> None:
        long = [asyncio.create_task(pool.build(heavy(client="a"))) for _ in range(4)]
        await until(lambda: pool.queue.running == 1 and pool.queue.waiting == 3)
        for _ in range(5):
            await pool.build(talk(HELLO, client="a"))
        # Nor does somebody else's picture: one client never has all places.
        await pool.build(talk([{"role": "user", "content": [picture(64)]}], client="b"))
        assert not any(t.done() for t in long)
        for t in long:
            t.cancel()
        await asyncio.gather(*long, return_exceptions=True)
        await until(lambda: not pool.queue.running)

    with_pool(roomy_dir, test)


def test_media_are_decoded_apart_however_small_their_file(tiny_dir: Path) -> None:
    async def test(pool: PromptPool) -> None:
        for content, apart in (
            ([picture(500)], True),
            ("Hello", False),
            ([{"type": "text", "text": "Hello"}], False),
        ):
            asked = talk([{"role": "user", "content": content}])
            assert isinstance(asked.body, bytes)
            assert len(asked.body) < pool_module.AT_ONCE_BYTES
            await until(lambda: len(processes(pool, "prompt spare")) == 2)
            waiting = processes(pool, "prompt spare")
            await pool.build(asked)
            assert (waiting == processes(pool, "prompt spare")) == (not apart)

    with_pool(tiny_dir, test)


def test_a_worker_that_dies_comes_back(roomy_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(pool: PromptPool) -> None:
        long = asyncio.create_task(pool.build(heavy()))
        await until(lambda: pool.queue.running == 1)
        await until(lambda: len(processes(pool)) == 1)
        [child] = processes(pool)
        assert pool.worker.process is not None
        first = pool.worker.process.pid
        os.kill(first, signal.SIGKILL)
        with pytest.raises(StageDead):
            await long
        await until(lambda: not Path(f"/proc/{child}").exists())
        await until(lambda: not pool.queue.running)
        assert len((await pool.build(talk(HELLO))).ids) > 3
        assert pool.worker.process.pid != first
        # One that is stopped does not answer: it is ended, and the next one does.
        monkeypatch.setattr(pool_module, "PATIENCE_S", 0.05)
        os.kill(pool.worker.process.pid, signal.SIGSTOP)
        with pytest.raises(Busy):
            await pool.build(talk(HELLO))
        monkeypatch.setattr(pool_module, "PATIENCE_S", 60.0)
        await until(lambda: pool.metrics()["stretto_prompt_worker_restarts_total"] == 2)
        assert len((await pool.build(talk(HELLO))).ids) > 3

    with_pool(roomy_dir, test)


def test_what_a_worker_says_is_checked(tiny_dir: Path) -> None:
    """It decodes what strangers send, so it may not be itself any more."""
    with pytest.raises(WireError, match="can still change"):
        MemFile.received(MemFile.of(b"soft").fd)
    sealed = MemFile.sealed(b"hard")
    assert bytes(MemFile.received(os.dup(sealed.fd)).view()) == b"hard"
    with pytest.raises(OSError, match="not permitted"):
        sealed.append(b"!")
    with_clip(features(4, 0)).check()
    for shape, offset in ((5, 0), (4, 4), (4, -4), (-1, 0), (2, 2)):
        with pytest.raises(WireError):
            with_clip(features(shape, offset)).check()


def with_clip(piece: PackedPiece) -> PackedPrompt:
    """With 16 bytes of features."""
    return PackedPrompt(pack_ids((1,)), ((piece,),), features=PromptFeatures(bytes(16)))


def features(count: int, offset: int) -> PackedPiece:
    return PackedPiece((count,), bytes(DIGEST_BYTES), offset)


# ---- places


def test_clients_take_turns() -> None:
    async def run() -> None:
        lane, order = FairQueue(2), []

        async def work(client: str, i: int) -> None:
            await lane.enter(client)
            order.append(f"{client}{i}")

        tasks = [asyncio.create_task(work("a", i)) for i in range(4)]
        await asyncio.sleep(0)
        tasks += [asyncio.create_task(work("b", i)) for i in range(2)]
        await asyncio.sleep(0)
        assert order == ["a0", "b0"]  # a has one place of two
        lane.leave("a")
        await asyncio.sleep(0)
        lane.leave("b")
        await asyncio.sleep(0)
        assert order == ["a0", "b0", "a1", "b1"]
        tasks[2].cancel()
        await asyncio.gather(tasks[2], return_exceptions=True)
        lane.leave("a")
        await asyncio.sleep(0)
        assert order[-1] == "a3"  # a2 has left
        lane.leave("a")
        lane.leave("b")
        await asyncio.gather(*tasks, return_exceptions=True)
        assert (lane.running, lane.waiting) == (0, 0)

    asyncio.run(run())


def test_a_place_that_comes_as_its_owner_leaves_is_passed_on() -> None:
    async def run() -> None:
        lane = FairQueue(1)
        await lane.enter("a")
        second, third = (asyncio.create_task(lane.enter(s)) for s in "bc")
        await asyncio.sleep(0)
        lane.leave("a")  # b's turn
        second.cancel()
        await asyncio.gather(second, return_exceptions=True)
        await third
        lane.leave("c")
        assert (lane.running, lane.waiting) == (0, 0)

    asyncio.run(run())


def test_many_at_random() -> None:
    """Never more than there are places, and everybody gets one, whoever leaves meanwhile."""

    async def run(seed: int) -> None:
        rng = np.random.default_rng(seed)
        lane = FairQueue(int(rng.integers(1, 4)))
        inside: list[str] = []

        async def work(client: str, turns: int) -> None:
            await lane.enter(client)
            inside.append(client)
            try:
                assert len(inside) == lane.running <= lane.places
                assert inside.count(client) <= max(1, lane.places - 1)
                for _ in range(turns):
                    await asyncio.sleep(0)
            finally:
                inside.remove(client)
                lane.leave(client)

        tasks: list[asyncio.Task[None]] = []
        for _ in range(60):
            tasks.append(asyncio.create_task(work("abc"[rng.integers(3)], int(rng.integers(5)))))
            if rng.integers(4) == 0:
                tasks[rng.integers(len(tasks))].cancel()
            await asyncio.sleep(0)
        await asyncio.gather(*tasks, return_exceptions=True)
        assert (lane.running, lane.waiting) == (0, 0)

    for seed in range(20):
        asyncio.run(run(seed))
