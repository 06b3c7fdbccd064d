"""The prompt worker behind a real server: seen when it cannot build prompts, and nothing of a
request left in it or in any other process."""

from __future__ import annotations

import asyncio
import itertools
import os
import re
import resource
import signal
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from stretto.config.engine import EngineConfig, HostSettings
from stretto.preprocess.pool.pool import PoolSettings, PromptPool
from tests.preprocess.pool.files import descriptors, has_two_spares, until_all_are_closed
from tests.preprocess.pool.workers import picture, processes, sound, until
from tests.server.real_engine import Served, served

CHAT, SPEECH = "/v1/chat/completions", "/v1/audio/speech"
HELLO: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1}
MANY = 300


@pytest.fixture(scope="module")
def real(tiny_dir: Path) -> Iterator[Served]:
    with served(
        tiny_dir, EngineConfig(prompts=PoolSettings(), host=HostSettings(max_rows=4))
    ) as real:
        yield real


def pool_of(real: Served) -> PromptPool:
    assert isinstance(real.engine.prompts, PromptPool)
    return real.engine.prompts


def census(real: Served) -> dict[str, Any]:
    """Descriptors of every process by what they are, when nothing is under way."""
    pool = pool_of(real)

    async def idle() -> None:
        await until(
            lambda: (
                not pool.metrics()["stretto_prompts_running"]
                and not real.running.server.service.bodies.held
            )
        )
        await until(lambda: len(processes(pool, "prompt spare")) == 2 and not processes(pool))
        await until(lambda: has_two_spares(pool.pid or 0))
        await until(lambda: not real.engine.metrics()["stretto_engine_running"])

    real.do(idle())
    until_all_are_closed()
    own = descriptors("self")
    return {
        "server": Counter(
            {kind: n for kind, n in own.items() if kind != "socket"}
        ),  # connections of clients come and go
        "worker": descriptors(pool.pid or 0),
        "children": [descriptors(pid) for pid in processes(pool, "prompt spare")],
        "hosts": [descriptors(pid) for pid in real.engine.pids if pid is not None],
    }


def test_no_process_keeps_anything_of_a_request(real: Served) -> None:
    media = {"messages": [{"role": "user", "content": [sound(), picture(64)]}], "max_tokens": 1}
    bad = {
        "messages": [
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}
        ]
    }
    large = {**HELLO, "stop": "x", "metadata": {"note": "y" * 600_000}}

    def all_kinds(count: int) -> None:
        for i in range(count):
            assert real.running.ask(CHAT, HELLO).status == 200
            if i % 30 == 0:
                assert real.running.ask(CHAT, media).status == 200
                assert real.running.ask(CHAT, bad).status == 400
                assert real.running.ask(CHAT, large).status == 400
                assert real.running.ask(SPEECH, {"input": "Hi", "max_audio_frames": 2}).status in (
                    200,
                    400,
                )

    all_kinds(31)
    before = census(real)
    all_kinds(MANY)
    assert census(real) == before


def test_open_descriptors_of_every_process_are_shown(real: Served) -> None:
    told = real.running.ask("/metrics").body.decode()
    shown = dict(re.findall(r'^stretto_process_open_fds\{process="([^"]+)"\} (\S+)$', told, re.M))
    assert set(shown) == {"server", "prompt worker", "host thinker+talker+code2wav"}
    assert float(shown["prompt worker"]) == len(os.listdir(f"/proc/{pool_of(real).pid}/fd"))
    assert all(float(count) > 3 for count in shown.values())


def test_a_worker_that_can_build_no_prompt_is_restarted_and_seen(real: Served) -> None:
    pool = pool_of(real)
    first = pool.pid
    assert first is not None
    used = {int(fd) for fd in os.listdir(f"/proc/{first}/fd")}
    most = next(n for n in itertools.count() if n - len([fd for fd in used if fd < n]) == 2)
    resource.prlimit(
        first, resource.RLIMIT_NOFILE, (most, most)
    )  # it can take a job, and open nothing for it

    async def stop_the_next() -> int:
        """It is started and gets no further."""
        await until(lambda: pool.pid not in (None, first))
        assert pool.pid is not None
        os.kill(pool.pid, signal.SIGSTOP)
        return pool.pid

    refused = real.running.ask(CHAT, HELLO)
    assert (refused.status, refused.error["message"]) == (500, "the prompt cannot be built")
    second = real.do(stop_the_next())
    health = real.running.ask("/health")
    assert (health.status, health.json["status"]) == (503, "loading")
    assert (
        health.json["error"]
        == "the prompt worker is being started again: it could build no prompt any more"
    )
    assert b"stretto_prompt_worker_ready 0.0" in real.running.ask("/metrics").body
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(real.running.ask, CHAT, HELLO)
        real.do(
            asyncio.wait_for(
                until(lambda: real.engine.metrics()["stretto_engine_running"] == 1), 60
            )
        )
        os.kill(second, signal.SIGCONT)
        assert waiting.result().status == 200
    assert real.running.ask("/health").json["status"] == "ready"
    told = real.running.ask("/metrics").body
    assert b"stretto_prompt_worker_restarts_total 1.0" in told
    assert b"stretto_prompt_worker_ready 1.0" in told
