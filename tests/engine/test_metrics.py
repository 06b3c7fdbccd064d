"""What the hosts say of themselves, told apart: no number of one host or replica takes the place of
another's, and none of a dead host is mixed with those of its successor. One host alone has plain
names: dashboards and benchmarks know them."""

from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from stretto.config.engine import EngineConfig
from stretto.config.placement import Placement, places
from stretto.engine.engine import PipelineEngine
from stretto.engine.host_handle import HostHandle
from stretto.engine.pipeline import Pipeline
from stretto.messages.hosts import Stats
from stretto.messages.requests import encode
from stretto.models.qwen3_omni.family import PIPELINE
from stretto.observe.recorder import Histogram, Recorder, labelled
from stretto.server.metrics import Metrics
from tests.engine.common import run
from tests.pipeline import LINKS, ONE_HOST, PROCESSES, STAGES, TWO_HOSTS

PLAN = {f'stretto_stage_memory_bytes{{stage="{s}"}}' for s in STAGES}


def restarts(stages: tuple[str, ...]) -> str:
    """Counted by the engine: a host does not know of its earlier lives."""
    return f'stretto_host_restarts_total{{host="{"+".join(stages)}"}}'


def said(stages: tuple[str, ...], number: float) -> dict[str, float]:
    """As `stage/host/stats.py` names them; all of one host are the same number."""
    names = ["stretto_host_idle_seconds_total"]
    names += [f'stretto_stage_steps_total{{stage="{s}"}}' for s in stages]
    for link, ends in LINKS.items():
        ways = zip(("out", "in"), ends, strict=True)
        names += [
            f'stretto_link_chunks_total{{link="{link}",end="{way}"}}'
            for way, s in ways
            if s in stages
        ]
    return dict.fromkeys(names, number)


def pipeline(placement: Placement, first: float = 1.0) -> Pipeline:
    """Its hosts say `first`, `first + 1`, ..."""
    p = Pipeline("p", "", PIPELINE, EngineConfig(placement=placement))
    p.supervisor.make_hosts()
    for i, (host, place) in enumerate(
        zip(p.supervisor.hosts, places(placement, STAGES), strict=True)
    ):
        say(host, said(place.stages, first + i))
    return p


def say(host: HostHandle, values: dict[str, float]) -> None:
    host.receive(encode(Stats(0, values)))


def test_one_host_has_plain_names() -> None:
    async def work() -> None:
        values = pipeline(ONE_HOST).metrics()
        assert set(values) == PLAN | set(said(STAGES, 1.0)) | {restarts(STAGES)}

    run(work())


@pytest.mark.parametrize("placement", [TWO_HOSTS, PROCESSES], ids=["two", "three"])
def test_several_hosts_are_told_apart(placement: Placement) -> None:
    async def work() -> None:
        values = pipeline(placement).metrics()
        hosts = [host.stages for host in places(placement, STAGES)]
        for i, stages in enumerate(hosts):
            assert values[f'stretto_host_idle_seconds_total{{host="{"+".join(stages)}"}}'] == i + 1
            assert values[restarts(stages)] == 0
            for name, number in said(stages, i + 1).items():
                if "{" in name:
                    assert values[name] == number
        assert len(values) == len(PLAN) + sum(len(said(stages, 0.0)) + 1 for stages in hosts)

    run(work())


def test_a_host_that_comes_back_begins_anew() -> None:
    async def work() -> None:
        p = pipeline(PROCESSES)
        talker = 'stretto_stage_steps_total{stage="talker"}'
        old = p.supervisor.hosts[1]
        old.state = "dead"
        assert talker not in p.metrics()
        assert not any("talker>code2wav" in k and "out" in k for k in p.metrics())
        say(p.supervisor.replace_host(1), {talker: 0.0})  # it has no links yet
        assert p.metrics()[talker] == 0.0
        assert not any("talker>code2wav" in k and "out" in k for k in p.metrics())
        assert p.metrics()['stretto_stage_steps_total{stage="thinker"}'] == 1.0

    run(work())


def test_labels_are_in_the_form_that_the_server_shows() -> None:
    shown = {
        labelled("stretto_a_total", replica="p1"): 1.0,
        labelled('stretto_b{stage="x"}', replica="p1"): 2.0,
    }
    assert list(shown) == ['stretto_a_total{replica="p1"}', 'stretto_b{stage="x",replica="p1"}']
    told = Metrics().render(0, shown).decode()
    assert all(f"{name} {value}\n" in told for name, value in shown.items())


def test_histograms_are_shown_as_such() -> None:
    recorder, h = Recorder(), Histogram()
    recorder.histogram("stretto_t_seconds", h, stage="x")
    recorder.number("stretto_t_seconds_total", lambda: 1.0)
    h.observe(0.001)
    values = recorder.values()
    families = {
        f.name: f for f in text_string_to_metric_families(Metrics().render(0, values).decode())
    }
    told = families["stretto_t_seconds"]
    assert (told.type, len(told.samples)) == ("histogram", len(values) - 1)
    assert {s.labels["stage"] for s in told.samples} == {"x"}


def test_replicas_are_told_apart(tiny_dir: Path) -> None:
    async def work() -> None:
        name = 'stretto_stage_steps_total{stage="talker"}'
        for count in (1, 2):
            engine = PipelineEngine(tiny_dir, EngineConfig(replicas=count))
            for i, p in enumerate(engine.pipelines):
                p.supervisor.make_hosts()
                say(p.supervisor.hosts[0], {name: i + 1.0})
            told = {k: v for k, v in engine.metrics().items() if "steps_total" in k}
            assert told == (
                {name: 1.0}
                if count == 1
                else {f'{name[:-1]},replica="p{i}"}}': i + 1.0 for i in (0, 1)}
            )

    run(work())
