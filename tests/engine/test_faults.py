"""What goes wrong outside: hosts that stop, die together or talk nonsense, clients that go, memory
that is not there. Each is a typed error at the caller, leaves nothing behind, and the engine works
again afterwards."""

import asyncio
import os
import re
import signal
import struct
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from stretto.config.engine import EngineConfig, HostSettings
from stretto.engine.engine import PipelineEngine
from stretto.engine.host_handle import HostDied, HostMessage, HostReports, StagesLost
from stretto.engine.local_host import HostProcess
from stretto.engine.pipeline import Pipeline
from stretto.engine.request import RequestState
from stretto.errors import StageDead, StrettoError
from stretto.messages.hosts import LinkDown, Loading, Unlink
from stretto.messages.requests import Admit, Ended, Failed, Pcm, encode
from stretto.models.qwen3_omni.config import OmniConfig
from stretto.models.qwen3_omni.family import PIPELINE
from stretto.models.qwen3_omni.load import Models
from stretto.models.qwen3_omni.params import RESIDUAL
from stretto.models.qwen3_omni.prompts import PromptBuilder
from stretto.params import Params, RequestOptions
from stretto.preprocess.packed_prompt import PackedPrompt, pack
from stretto.stage.links.endpoints import LinkEndpoint
from stretto.transport.contract import PutFailed
from stretto.types import GREEDY, RequestId
from tests.engine.common import CHATS, Answer, HandDriven, collect, expected, freed, run, same
from tests.engine.scripted import ScriptedLauncher, read_reports, rest, start
from tests.pipeline import PROCESSES, STAGES, TWO_HOSTS, announcement, configure
from tests.solo import CODE0

PARAMS = Params(max_text_tokens=8, max_frames=10, seed=3, want_codes=True)
LONG = replace(PARAMS, max_text_tokens=24, ignore_eos=True, min_frames=30, max_frames=30)
ENDLESS = replace(PARAMS, max_text_tokens=8000, ignore_eos=True, min_frames=8000, max_frames=8000)


@pytest.fixture(scope="module")
def want(tiny_dir: Path, models: Models) -> Answer:
    return expected(
        models, PromptBuilder.open(tiny_dir, OmniConfig.read(tiny_dir)), CHATS["text"], PARAMS
    )


async def until(fulfilled) -> None:
    while not fulfilled():
        await asyncio.sleep(0.01)


async def speaking(
    engine: PipelineEngine, count: int = 2, params: Params = LONG
) -> list[asyncio.Task[Answer]]:
    """Requests of which at least one is in the middle of its sound."""
    tasks = [
        asyncio.create_task(collect(engine.generate(CHATS["text"], params=params)))
        for _ in range(count)
    ]
    await until(lambda: any(t.frames for t in engine.requests.running.values()))
    return tasks


async def back(engine: PipelineEngine, want: Answer) -> None:
    """It works again. A request that comes between a fault and the news of it may fail too, so a
    few tries."""
    for _ in range(4):
        await until(lambda: engine.pipelines[0].ready(STAGES))
        try:
            got = await collect(engine.generate(CHATS["text"], params=PARAMS))
        except StageDead:
            continue
        same(got, want)
        break
    else:
        raise AssertionError("it does not come back")
    await freed(engine)


def test_a_stopped_host_is_a_dead_one_unless_it_goes_on_in_time(
    tiny_dir: Path, want: Answer
) -> None:
    async def work() -> None:
        async with PipelineEngine.open(
            tiny_dir, EngineConfig(placement=PROCESSES, stall_s=5.0)
        ) as engine:
            pid = engine.pids[2]
            assert pid is not None
            # A short rest is nobody's business: the answer is whole.
            tasks = await speaking(engine)
            os.kill(pid, signal.SIGSTOP)
            for _ in range(20):
                await asyncio.sleep(0.01)
            os.kill(pid, signal.SIGCONT)
            assert [len(a.codes) for a in await asyncio.gather(*tasks)] == [30, 30]
            assert engine.pids[2] == pid

            # A long one fails what needs the vocoder; text goes on. The host is killed and comes
            # back.
            tasks = await speaking(engine)
            os.kill(pid, signal.SIGSTOP)
            silent = await collect(engine.generate(CHATS["text"], modalities=["text"], params=LONG))
            assert len(silent.ids) == 24
            errors = await asyncio.gather(*tasks, return_exceptions=True)
            assert all(isinstance(e, StageDead) for e in errors), errors
            await until(lambda: engine.pids[2] not in (pid, None))
            await back(engine, want)

    run(work())


def test_a_client_that_goes_frees_everything_and_a_broken_link_is_mended(
    tiny_dir: Path, want: Answer
) -> None:
    async def work() -> None:
        async with PipelineEngine.open(tiny_dir, EngineConfig(placement=PROCESSES)) as engine:
            leaving = await speaking(engine, 4, ENDLESS)
            await until(
                lambda: len(engine.requests.running) == 4
            )  # one that is cancelled before is not counted
            for task in leaving:
                task.cancel()
            gone = asyncio.create_task(collect(engine.generate(CHATS["audio"], params=ENDLESS)))
            await asyncio.sleep(0)
            gone.cancel()  # before it was admitted
            await asyncio.gather(gone, return_exceptions=True)
            await freed(engine)
            assert engine.metrics()["stretto_engine_cancelled_total"] == 4

            # An id may be used again, though stages ignore late chunks of requests that are over.
            for _ in range(2):
                given = engine.generate(CHATS["text"], params=PARAMS, request_id=RequestId("mine"))
                same(await collect(given), want)

            # A link that one end closes fails what needs it and is made again; no host is lost.
            pids, tasks = engine.pids, await speaking(engine)
            engine.pipelines[0].send(("code2wav",), Unlink("talker>code2wav"))
            errors = await asyncio.gather(*tasks, return_exceptions=True)
            assert all(isinstance(e, StageDead) for e in errors), errors
            await back(engine, want)
            assert engine.pids == pids

    run(work())


def test_hosts_may_die_together_while_starting_and_from_within(
    tiny_dir: Path, want: Answer
) -> None:
    async def work() -> None:
        config = EngineConfig(placement=PROCESSES)
        async with PipelineEngine.open(tiny_dir, config) as engine:
            pids = engine.pids
            tasks = await speaking(engine)
            for pid in pids[:2]:
                assert pid is not None
                os.kill(pid, signal.SIGKILL)
            errors = await asyncio.gather(*tasks, return_exceptions=True)
            assert all(isinstance(e, StageDead) for e in errors), errors
            await until(lambda: engine.pids[1] not in (pids[1], None))
            again = engine.pids[1]
            assert again is not None
            os.kill(again, signal.SIGKILL)  # it has hardly begun to load
            await until(lambda: engine.pids[1] not in (again, None))
            await back(engine, want)

            # A message that a host cannot take is a bug; it ends that host and no other.
            pids = engine.pids
            tasks = await speaking(engine)
            engine.pipelines[0].send(("talker",), configure("", (), {}))
            errors = await asyncio.gather(*tasks, return_exceptions=True)
            assert all(isinstance(e, StageDead) for e in errors), errors
            await until(lambda: engine.pids[1] not in (pids[1], None))
            await back(engine, want)
            assert engine.pids[0] == pids[0]
            assert engine.pids[2] == pids[2]

    run(work())


GOOD = encode(Loading("thinker", "loading"))


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (struct.pack("<II", 0xFFFFFFFF, 0), r"a control frame of 4294967295 \+ 0 bytes"),
        (struct.pack("<II", 4, 0xFFFFFFFF), r"a control frame of 4 \+ 4294967295 bytes"),
        (struct.pack("<II", 4, 0) + b"\xc1\xff\x00\x01", "not a control message"),
        (struct.pack("<II", 1, 0) + b"\x80", "not a control message"),
        (GOOD[:-3], None),
        (b"", None),
    ],
    ids=["huge header", "huge blob", "no message", "no kind", "cut off", "gone"],
)
def test_a_host_that_talks_nonsense_is_a_dead_one(data: bytes, words: str | None) -> None:
    """At once: nobody collects the gigabytes that it announces. (`words` is None for what may yet
    go on.)"""

    async def work() -> None:
        reports: HostReports = asyncio.Queue()
        host = HostProcess("h", reports)
        for i in range(0, len(GOOD + data), 5):  # in pieces that fit no frame
            host.receive((GOOD + data)[i : i + 5])
        assert host.state == ("starting" if words is None else "dead")
        assert words is None or re.search(words, str(host.exit_error()))
        host.mark_dead()
        assert host.state == "dead"
        assert isinstance(host.exit_error(), StageDead)
        host.send(configure("", (), {}))  # dropped
        first, last = reports.get_nowait(), reports.get_nowait()
        assert isinstance(first, HostMessage)
        assert first.message == Loading("thinker", "loading")
        assert isinstance(last, HostDied)
        assert reports.empty()

    run(work())


def test_a_message_that_fits_nothing_ends_its_host_and_not_the_reader(tiny_dir: Path) -> None:
    """What it sent behind that message counts no more; other hosts' messages do."""

    async def work() -> None:
        launcher = ScriptedLauncher()
        engine = PipelineEngine(tiny_dir, EngineConfig(placement=TWO_HOSTS), launcher)
        await start(engine, launcher)
        asked = asyncio.create_task(collect(engine.generate(CHATS["text"], params=PARAMS)))
        await until(lambda: any(isinstance(m, Admit) for m in launcher.hosts[0].heard()))
        [admit] = [m for m in launcher.hosts[0].heard() if isinstance(m, Admit)]
        front, back = launcher.hosts
        half_a_sample = encode(Pcm(admit.request, 0, 1), b"12") + b"12"
        back.receive(half_a_sample + encode(Loading("talker", "ignored")))
        await rest()
        assert back.state == "dead"
        assert "buffer size" in str(back.exit_error())
        with pytest.raises(StageDead, match="cannot be understood"):
            await asked
        assert engine.progress.stages["talker"] == "dead"
        front.say(Loading("thinker", "read"))
        await rest()
        assert engine.progress.stages["thinker"] == "read"
        await engine.close()

    run(work())


class Nowhere:
    """A pipeline that swallows what it is sent."""

    def send(self, *message: object) -> None:
        pass


def test_a_request_in_line_waits_longer_than_one_that_stopped(tiny_dir: Path) -> None:
    """By their times of progress alone: the clock is theirs."""

    async def work() -> None:
        engine = PipelineEngine(tiny_dir, EngineConfig(stall_s=100.0))
        now = asyncio.get_running_loop().time()  # the same monotonic clock
        pipeline = Nowhere()

        def request(
            name: str, rest: float, samples: int, pipeline: Nowhere = pipeline
        ) -> RequestState:
            prompt, options = PackedPrompt.of_ids((1,)), RequestOptions("speech", PARAMS)
            nothing: Any = None
            t = RequestState(
                RequestId(name), pipeline, engine.model, STAGES, prompt, options, nothing, 0.0, 1.0
            )  # type: ignore[arg-type]
            t.progressed_at = now - rest
            t.samples = samples
            engine.requests.running[t.id] = t
            return t

        lively = request("lively", 1, 100)
        stopped = request("stopped", 150, 100)
        in_line = request("in line", 150, 0)
        too_long = request("in line too long", 450, 0)
        alone = request("alone", 150, 0, Nowhere())
        slow = request("slow listener", 500, 100)
        slow.throttled = True
        unread = request("unread", 500, 100)
        unread.events.put_nowait(StageDead("any event"))
        engine.requests.fail_stalled()
        failed = {t.id for t in engine.requests.running.values() if t.failed}
        assert failed == {stopped.id, too_long.id, alone.id}
        assert not lively.failed
        assert not in_line.failed

    run(work())


@pytest.mark.parametrize(
    ("index", "lost"), [(0, {"thinker", "talker"}), (1, {"talker", "code2wav"}), (2, {"code2wav"})]
)
def test_what_was_on_its_way_from_a_dead_host_is_lost_too(index: int, lost: set[str]) -> None:
    """A stage that had ended may still have chunks in the link: the stage behind it must not wait
    for them."""

    async def work() -> None:
        config = EngineConfig(placement=PROCESSES, restart=False)
        launcher = ScriptedLauncher()
        pipeline = Pipeline("p", "", PIPELINE, config, launcher=launcher)
        pipeline.supervisor.make_hosts()
        async with read_reports(pipeline) as reports:
            launcher.hosts[index].mark_dead()
            await rest()
            [report] = reports
            assert isinstance(report, StagesLost)
            assert report.stages == lost
            await pipeline.close()

    run(work())


PARENT = """
import asyncio
from stretto.engine.local_host import HostProcess

async def work():
    host = HostProcess("h", asyncio.Queue())
    await host.start()
    print(host.pid, flush=True)
    await asyncio.sleep(1000)

asyncio.run(work())
"""


def test_hosts_end_with_their_engine() -> None:
    def alive(pid: int) -> bool:
        stat = Path(f"/proc/{pid}/stat")
        return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] not in "ZX"

    async def work() -> None:
        parent = await asyncio.create_subprocess_exec(
            sys.executable, "-c", PARENT, stdout=asyncio.subprocess.PIPE
        )
        assert parent.stdout is not None
        pid = int(await parent.stdout.readline())
        assert alive(pid)
        parent.kill()
        await parent.wait()
        await until(lambda: not alive(pid))

    run(work())


def test_what_does_not_fit_is_refused_before_it_is_loaded(tiny_dir: Path) -> None:
    async def work() -> None:
        config = EngineConfig(host=HostSettings(blocks={"thinker": 10**9}))
        with pytest.raises(
            StrettoError, match=r"thinker .* GiB .*weights .*lower --kv-blocks thinker=N"
        ) as e:
            async with PipelineEngine.open(tiny_dir, config):
                pass
        assert isinstance(e.value, StageDead)
        async with PipelineEngine.open(tiny_dir) as engine:
            for stage in ("thinker", "talker", "code2wav"):
                assert engine.metrics()[f'stretto_stage_memory_bytes{{stage="{stage}"}}'] > 0

    run(work())


def test_a_chunk_that_cannot_be_sent_fails_its_request_and_no_other(tiny_dir: Path) -> None:
    """A failed put is a fault of the link that names its request: told at once, freed everywhere;
    the link lives."""
    builder = PromptBuilder.open(tiny_dir, OmniConfig.read(tiny_dir))
    packed = pack(builder.build(CHATS["text"]))
    greedy = [replace(s, temperature=0.0) for s in (GREEDY, CODE0, RESIDUAL)]
    driven = HandDriven(tiny_dir, HostSettings())
    try:
        for name in ("doomed", "other"):
            driven.host.handle(
                announcement(RequestId(name), packed, True, None, *greedy, 6, 7),
                packed.feature_bytes(),
            )
        driven.host.loop.round()
        faults: list[StrettoError] = [
            PutFailed("injected", link="talker>code2wav", request=RequestId("doomed"))
        ]
        link = SimpleNamespace(faults=lambda: [faults.pop()] if faults else [], ended=False)
        end = driven.host.endpoints.ends["talker>code2wav"] = LinkEndpoint(1, outgoing=link)  # type: ignore[arg-type]
        while sum(isinstance(m, Ended) for m, _ in driven.reports) < len(STAGES):
            assert driven.host.loop.round(), "nothing to do, but the other answer is not complete"
        failed = [m for m, _ in driven.reports if isinstance(m, Failed)]
        assert [m.request for m in failed] == ["doomed"]
        assert failed[0].kind == "PutFailed"
        assert {m.request for m, _ in driven.reports if isinstance(m, Ended)} == {"other"}
        assert not any(isinstance(m, LinkDown) for m, _ in driven.reports)
        assert all(len(node.core) == 0 for node in driven.host.stages.values())
        assert not end.down
    finally:
        driven.host.endpoints.ends.clear()
        driven.host.close()
