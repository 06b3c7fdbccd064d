"""Alerts ask for numbers that the server exposes, are the same for compose and Kubernetes, and each
has its line in docs/operate.md."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any, Literal

import msgspec
import pytest
import yaml

from stretto.server.metrics import Metrics
from tests.server.conftest import Running

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
METRIC = re.compile(r"\b((?:stretto|process)_\w+|up)\b(?:\{([^}]*)\})?")


class AlertLabels(msgspec.Struct, forbid_unknown_fields=True):
    severity: Literal["page", "ticket"]


class AlertText(msgspec.Struct, forbid_unknown_fields=True):
    summary: str


class AlertRule(msgspec.Struct, forbid_unknown_fields=True):
    alert: str
    expr: str
    labels: AlertLabels
    annotations: AlertText
    for_: str = msgspec.field(name="for", default="0s")


class RuleGroup(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    rules: list[AlertRule]


class RuleFile(msgspec.Struct, forbid_unknown_fields=True):
    groups: list[RuleGroup]


def load(name: str) -> Any:
    return yaml.safe_load((DEPLOY / name).read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def alerts() -> list[AlertRule]:
    [group] = msgspec.convert(load("alerts.yaml"), RuleFile).groups
    return group.rules


def test_they_ask_for_numbers_that_exist(alerts: list[AlertRule], real_server: Running) -> None:
    page = real_server.ask("/metrics").body.decode()
    kinds = dict(re.findall(r"^# TYPE (\S+) (\w+)", page, re.M))
    known = {"up", *kinds}
    known |= {f"{n}_bucket" for n, kind in kinds.items() if kind == "histogram"}
    for rule in alerts:
        asked = [name for name, _ in METRIC.findall(rule.expr)]
        assert asked, rule.alert
        assert set(asked) <= known, rule.alert
        counters = [n for n in asked if kinds.get(n) == "counter"]
        assert all(re.search(rf"(rate|increase)\({n}\b", rule.expr) for n in counters), rule.alert


def test_they_ask_by_labels_that_exist(alerts: list[AlertRule]) -> None:
    metrics = Metrics()
    labelled = {
        "stretto_requests_total": (metrics.requests, ("route", "status")),
        "stretto_realtime_responses_total": (metrics.realtime.responses, ("status",)),
        "stretto_transcriptions_total": (metrics.realtime.transcriptions, ("how",)),
        "stretto_connections_refused_total": (metrics.refused, ("reason",)),
    }
    for counter, names in labelled.values():
        counter.labels(**dict.fromkeys(names, "x"))  # raises for other names
    labels = {name: set(names) for name, (_, names) in labelled.items()}
    labels |= {"stretto_otlp_traces_total": {"outcome"}, "up": set(), "process_open_fds": set()}
    for rule in alerts:
        for name, selector in METRIC.findall(rule.expr):
            asked = set(re.findall(r"(\w+)[!=]", selector))
            assert asked <= labels.get(name, set()) | {"job"}, rule.alert


def test_each_has_a_line_in_the_runbook(alerts: list[AlertRule]) -> None:
    page = (ROOT / "docs" / "operate.md").read_text(encoding="utf-8")
    names = [rule.alert for rule in alerts]
    assert re.findall(r"^\| `(Stretto\w+)` \|", page, re.M) == names
    assert len(set(names)) == len(names)


def test_compose_and_kubernetes_have_the_same() -> None:
    told = load("kubernetes/prometheusrule.yaml")
    assert (told["apiVersion"], told["kind"]) == ("monitoring.coreos.com/v1", "PrometheusRule")
    assert told["spec"] == load("alerts.yaml")
    volumes = load("compose.yaml")["services"]["prometheus"]["volumes"]
    mounted = {v["target"]: v["source"] for v in volumes}
    [config] = [t for t, source in mounted.items() if source == "./prometheus.yaml"]
    for name in load("prometheus.yaml")["rule_files"]:
        assert (DEPLOY / mounted[str(Path(config).parent / name)]).is_file()


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool, of Prometheus")
@pytest.mark.parametrize(
    "words", ["check rules ../../deploy/alerts.yaml", "test rules alerts_test.yaml"]
)
def test_promtool_is_content(words: str) -> None:
    done = subprocess.run(
        ["promtool", *words.split()],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
