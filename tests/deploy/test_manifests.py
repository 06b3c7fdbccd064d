"""The files under deploy/ parse, name only fields that their formats have, agree with each other
and with the code."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any, Literal

import msgspec
import pytest
import yaml

from stretto import __version__
from stretto.config.cluster import check_cluster
from stretto.config.loader import load_settings
from stretto.ray.dependency import SERIES

ROOT = Path(__file__).parent.parent.parent
DEPLOY = ROOT / "deploy"


class Known(msgspec.Struct, forbid_unknown_fields=True, rename="camel"):
    """Fields of a format, as far as we use them."""


class Metadata(Known):
    name: str = ""
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}


# ---- pods


class Port(Known):
    name: str
    container_port: int


class KeyRef(Known):
    name: str
    key: str


class ValueFrom(Known):
    secret_key_ref: KeyRef


class Variable(Known):
    name: str
    value: str | None = None
    value_from: ValueFrom | None = None


class Mount(Known):
    name: str
    mount_path: str
    read_only: bool = False


class Resources(Known):
    requests: dict[str, str]
    limits: dict[str, str]


class Capabilities(Known):
    drop: list[str]
    add: list[str] = []


class Rights(Known):
    """Of a container."""

    allow_privilege_escalation: bool
    capabilities: Capabilities
    read_only_root_filesystem: bool = False


class Container(Known):
    name: str
    image: str
    security_context: Rights
    resources: Resources
    ports: list[Port]
    env: list[Variable]
    volume_mounts: list[Mount]


class Claim(Known):
    claim_name: str
    read_only: bool


class Item(Known):
    key: str
    path: str


class SecretVolume(Known):
    secret_name: str
    items: list[Item]


class EmptyDir(Known):
    medium: Literal["", "Memory"] = ""
    size_limit: str = ""


class Volume(Known):
    name: str
    persistent_volume_claim: Claim | None = None
    secret: SecretVolume | None = None
    empty_dir: EmptyDir | None = None


class Seccomp(Known):
    type: Literal["RuntimeDefault", "Unconfined", "Localhost"]


class Security(Known):
    """Of a pod."""

    run_as_non_root: bool
    run_as_user: int
    fs_group: int
    seccomp_profile: Seccomp


class PodSpec(Known):
    security_context: Security
    containers: list[Container]
    volumes: list[Volume]
    termination_grace_period_seconds: int = 30
    automount_service_account_token: bool = True


class Template(Known):
    metadata: Metadata
    spec: PodSpec


# ---- Ray


class Head(Known):
    ray_start_params: dict[str, str]
    template: Template


class Workers(Known):
    group_name: str
    replicas: int
    min_replicas: int
    max_replicas: int
    ray_start_params: dict[str, str]
    template: Template


class Auth(Known):
    mode: Literal["token"]


class Autoscaler(Known):
    security_context: Rights


class ClusterSpec(Known):
    ray_version: str
    auth_options: Auth
    enable_in_tree_autoscaling: bool
    autoscaler_options: Autoscaler
    head_group_spec: Head
    worker_group_specs: list[Workers]


class RayServiceSpec(Known):
    serve_config_v2: str = msgspec.field(name="serveConfigV2")
    ray_cluster_config: ClusterSpec


class RayService(Known):
    api_version: Literal["ray.io/v1"]
    kind: Literal["RayService"]
    metadata: Metadata
    spec: RayServiceSpec


# ---- network, ingress, numbers


class Selector(Known):
    match_labels: dict[str, str] = {}


class Block(Known):
    cidr: str
    except_: list[str] = msgspec.field(name="except", default=[])


class Peer(Known):
    pod_selector: Selector | None = None
    namespace_selector: Selector | None = None
    ip_block: Block | None = None


class PolicyPort(Known):
    protocol: Literal["TCP", "UDP"]
    port: int


class Inward(Known):
    from_: list[Peer] = msgspec.field(name="from")
    ports: list[PolicyPort] = []


class Outward(Known):
    to: list[Peer]
    ports: list[PolicyPort] = []


class PolicySpec(Known):
    pod_selector: Selector
    policy_types: list[Literal["Ingress", "Egress"]]
    ingress: list[Inward] = []
    egress: list[Outward] = []


class NetworkPolicy(Known):
    api_version: Literal["networking.k8s.io/v1"]
    kind: Literal["NetworkPolicy"]
    metadata: Metadata
    spec: PolicySpec


class Relabel(Known):
    source_labels: list[str]
    regex: str
    target_label: str
    replacement: str


class Scraped(Known):
    port: str
    interval: str
    metric_relabelings: list[Relabel]


class MonitorSpec(Known):
    selector: Selector
    pod_metrics_endpoints: list[Scraped]


class PodMonitor(Known):
    api_version: Literal["monitoring.coreos.com/v1"]
    kind: Literal["PodMonitor"]
    metadata: Metadata
    spec: MonitorSpec


def read(name: str, kind: type[Any]) -> Any:
    return msgspec.convert(yaml.safe_load((DEPLOY / name).read_text()), kind)


def policies() -> tuple[NetworkPolicy, NetworkPolicy]:
    """For all pods, and what the head may do besides."""
    told = yaml.safe_load_all((DEPLOY / "kubernetes/networkpolicy.yaml").read_text())
    everyone, head = (msgspec.convert(one, NetworkPolicy) for one in told)
    return everyone, head


@pytest.fixture(scope="module")
def service() -> RayService:
    it: RayService = read("kubernetes/rayservice.yaml", RayService)
    return it


def test_the_service_is_what_the_code_serves(service: RayService) -> None:
    cluster = service.spec.ray_cluster_config
    assert cluster.ray_version.startswith(SERIES)
    [pinned] = re.findall(
        r'^ray = \["ray\[default,serve\]==(\S+)\.\*"\]', (ROOT / "pyproject.toml").read_text(), re.M
    )
    assert cluster.ray_version.startswith(pinned)
    [app] = yaml.safe_load(service.spec.serve_config_v2)["applications"]
    assert app["import_path"] == "stretto.ray.app:build"
    assert "def build(" in (ROOT / "stretto" / "ray" / "app.py").read_text()
    settings = load_settings({}, {}, {**app["args"], "backend": "ray"})
    model, server, ours = settings.model, settings.server, settings.cluster
    assert not settings.warnings
    check_cluster(ours, settings.engine)
    [workers] = cluster.worker_group_specs
    assert settings.engine.replica_range == (workers.min_replicas, workers.max_replicas)
    pod = workers.template.spec
    assert pod.termination_grace_period_seconds > server.drain_timeout, "answers can end"
    [worker] = pod.containers
    assert float(worker.resources.limits["nvidia.com/gpu"]) == ours.host_gpus
    assert float(worker.resources.requests["cpu"]) >= ours.host_cpus
    for container in (worker, *cluster.head_group_spec.template.spec.containers):
        assert container.image == f"stretto:{__version__}"
        mounted = {m.mount_path: m.name for m in container.volume_mounts}
        assert mounted["/models"] == "models"
        assert str(model).startswith("/models/")
        assert str(ours.cluster_secret_file).rpartition("/")[0] in mounted
        given = {v.name: v.value for v in container.env}
        assert given["RAY_SERVE_ENABLE_HA_PROXY"] == "1"
        assert given["RAY_SERVE_HAPROXY_BALANCE_ALGORITHM"] == "hdr(x-session-id)"
        assert given["RAY_worker_niceness"] == "0", "as in docs/deploy.md"
    [secret] = [v.secret for v in pod.volumes if v.secret]
    assert {i.path for i in secret.items} == {str(ours.cluster_secret_file).rpartition("/")[2]}


def test_ray_accepts_the_application(service: RayService) -> None:
    schema = pytest.importorskip(
        "ray.serve.schema", reason="needs Ray: `make ray` installs it and runs this"
    )
    schema.ServeDeploySchema(**yaml.safe_load(service.spec.serve_config_v2))


def test_only_the_right_ones_reach_the_pods(service: RayService) -> None:
    policy, _ = policies()
    cluster = service.spec.ray_cluster_config
    for template in (cluster.head_group_spec.template, cluster.worker_group_specs[0].template):
        assert policy.spec.pod_selector.match_labels.items() <= template.metadata.labels.items()
    assert set(policy.spec.policy_types) == {"Ingress", "Egress"}
    for rule in policy.spec.ingress:
        own = [
            p
            for p in rule.from_
            if p.pod_selector and p.pod_selector.match_labels == {"app": "stretto"}
        ]
        assert own == rule.from_ or rule.ports, "others reach named ports alone"
        assert all(p.ip_block is None for p in rule.from_)
        assert all(
            p.pod_selector or (p.namespace_selector and p.namespace_selector.match_labels)
            for p in rule.from_
        )
    outside = {p.port for rule in policy.spec.ingress for p in rule.ports}
    assert outside == {8000, 8080, 8265}


def test_pods_reach_each_other_and_names_and_the_head_kubernetes(service: RayService) -> None:
    everyone, head = policies()
    own, names = everyone.spec.egress
    assert [p.pod_selector and p.pod_selector.match_labels for p in own.to] == [{"app": "stretto"}]
    [resolver] = names.to
    assert resolver.namespace_selector is not None
    assert resolver.pod_selector is not None, "not all of kube-system"
    assert resolver.pod_selector.match_labels == {"k8s-app": "kube-dns"}
    assert {p.port for p in names.ports} == {53}
    assert head.spec.policy_types == ["Egress"]
    # KubeRay gives the head's pod this label; workers have another.
    assert head.spec.pod_selector.match_labels == {"app": "stretto", "ray.io/node-type": "head"}
    [api] = head.spec.egress
    assert {p.port for p in api.ports} == {443, 6443}
    assert all(p.ip_block is not None and "169.254.0.0/16" in p.ip_block.except_ for p in api.to), (
        "no credentials"
    )


def test_pods_have_no_rights_that_they_do_not_need(service: RayService) -> None:
    cluster = service.spec.ray_cluster_config
    [workers] = cluster.worker_group_specs
    pods = cluster.head_group_spec.template.spec, workers.template.spec
    assert not pods[1].automount_service_account_token
    user = re.search(r"^USER (\d+)$", (DEPLOY / "Containerfile").read_text(), re.M)
    assert user is not None
    for pod in pods:
        assert pod.security_context.run_as_non_root
        assert pod.security_context.run_as_user == pod.security_context.fs_group == int(user[1])
        assert pod.security_context.seccomp_profile.type == "RuntimeDefault"
        volumes = {v.name: v for v in pod.volumes}
        for container in pod.containers:
            assert container.security_context.read_only_root_filesystem
            writable = {m.mount_path for m in container.volume_mounts if not m.read_only}
            assert writable == {"/tmp", "/home/stretto", "/dev/shm"}
            for mount in container.volume_mounts:
                kind = volumes[mount.name].empty_dir
                assert (kind is not None) == (mount.mount_path in writable)
                assert kind is None or kind.size_limit
                assert kind is None or (kind.medium == "Memory") == (mount.mount_path == "/dev/shm")
    rights = [c.security_context for pod in pods for c in pod.containers]
    for one in (*rights, cluster.autoscaler_options.security_context):
        assert not one.allow_privilege_escalation
        assert one.capabilities.drop == ["ALL"]
        assert not one.capabilities.add


def test_numbers_get_the_names_that_the_dashboard_knows(service: RayService) -> None:
    monitor = read("kubernetes/podmonitor.yaml", PodMonitor)
    template = service.spec.ray_cluster_config.worker_group_specs[0].template
    assert monitor.spec.selector.match_labels.items() <= template.metadata.labels.items()
    [scraped] = monitor.spec.pod_metrics_endpoints
    assert scraped.port in {p.name for p in template.spec.containers[0].ports}
    [rule] = scraped.metric_relabelings
    panels = json.loads((ROOT / "docs" / "grafana.json").read_text())["panels"]
    asked = {
        n
        for p in panels
        for t in p["targets"]
        for n in re.findall(r"(?:stretto|process)_\w+", t["expr"])
    }
    assert {"stretto_stage_waiting", "process_resident_memory_bytes"} <= asked
    for name in asked:  # as Ray calls them
        assert re.sub(f"^{rule.regex}$", rule.replacement.replace("$", "\\"), f"ray_{name}") == name


def test_the_ingress_streams_and_keeps_sessions() -> None:
    told = yaml.safe_load((DEPLOY / "kubernetes/ingress.yaml").read_text())
    assert told["kind"] == "Ingress"
    notes = told["metadata"]["annotations"]
    assert notes["nginx.ingress.kubernetes.io/proxy-buffering"] == "off"
    assert "X-Session-Id" in notes["nginx.ingress.kubernetes.io/configuration-snippet"]
    [path] = told["spec"]["rules"][0]["http"]["paths"]
    assert path["backend"]["service"] == {"name": "stretto-serve-svc", "port": {"number": 8000}}


def test_the_compose_file_serves_as_the_command_does() -> None:
    told = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    assert set(told) == {"x-common", "services", "volumes"}
    for name in ("stretto", "stretto-cpu"):
        service = told["services"][name]
        suffix = name.removeprefix("stretto")
        assert service["image"] == f"${{STRETTO_IMAGE:-stretto:{__version__}{suffix}}}"
        assert (DEPLOY / service["build"]["context"] / service["build"]["dockerfile"]).is_file()
        assert service["read_only"]
        assert service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]
        assert all(p.startswith("127.0.0.1:") for p in service["ports"]), "TLS comes before it"
        words = [re.sub(r"\$\{\w+:-(\w+)\}", r"\1", w) for w in service["command"]]
        from stretto.cli import parser

        args = parser().parse_args(words)
        # Without MODEL the variable is empty, which is the embedded model.
        assert (args.model, args.host, args.replicas) == (None, "0.0.0.0", "1")
        variables = {n: re.sub(r"\$\{.*\}", "", v) for n, v in service["environment"].items()}
        assert variables.pop("STRETTO_ALLOWED_HOSTS") == ""
        config = load_settings(vars(args), variables)
        assert not config.model
        assert not config.server.needs_key
        given = {
            n: re.sub(r"\$\{\w+:\+(.*)\}", r"\1", v) for n, v in service["environment"].items()
        }
        assert given["STRETTO_MODEL"] in {v["target"] for v in service["volumes"]}
        [default] = re.findall(r":-(.*)\}", service["volumes"][0]["source"])
        assert (DEPLOY / default / "config.json").is_file(), "there is something to mount"
        metrics = args.metrics_port
        assert not any(p.endswith(f":{metrics}") for p in service["ports"]), "it is not published"
    for service in told["services"].values():
        assert service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]
    grafana = next(v["source"] for v in told["services"]["grafana"]["volumes"])
    assert (DEPLOY / grafana).resolve() == ROOT / "docs" / "grafana.json"
    mounted = {v["target"]: DEPLOY / v["source"] for v in told["services"]["grafana"]["volumes"]}
    [source] = yaml.safe_load(
        mounted["/etc/grafana/provisioning/datasources/stretto.yaml"].read_text()
    )["datasources"]
    assert (source["type"], source["url"]) == ("prometheus", "http://prometheus:9090"), (
        "or the dashboard is empty"
    )
    assert "prometheus" in told["services"]
    scraped = yaml.safe_load((DEPLOY / "prometheus.yaml").read_text())["scrape_configs"][0][
        "static_configs"
    ][0]
    assert scraped["targets"] == [f"stretto:{metrics}"]


def test_the_container_installs_extras_that_there_are() -> None:
    text = (DEPLOY / "Containerfile").read_text()
    [extras] = re.findall(r"^ARG EXTRAS=(\S+)", text, re.M)
    project = (ROOT / "pyproject.toml").read_text()
    assert all(re.search(rf"^{extra} = \[", project, re.M) for extra in extras.split(","))
    for copied in re.findall(r"^COPY (?!--from)(.+) \./?\S*$", text, re.M):
        assert all((ROOT / path).exists() for path in copied.split())
    kept = [
        line[1:]
        for line in (DEPLOY / "Containerfile.dockerignore").read_text().splitlines()
        if line[:1] == "!"
    ]
    built = tomllib.loads(project)["tool"]["hatch"]["build"]["targets"]["wheel"]
    copied = " ".join(re.findall(r"^COPY (?!--from)(.+) \S+$", text, re.M)).split()
    for needed in (*built["packages"], "pyproject.toml", "README.md", "LICENSE"):
        assert needed in copied, "the wheel is not built without it"
        assert needed in kept, "it is left out of what is sent to the builder"
    assert re.search(r"^USER \d+$", text, re.M), "not as root"
    assert set(re.findall(r"^FROM (\S+)", text, re.M)) == {"${BASE}"}, (
        "one base, which may have a digest"
    )
    for words in re.findall(r"pip install (.*)$", text, re.M):
        assert "--constraint deploy/constraints.txt" in words or words.endswith('"${TORCH}"'), words
    assert "deploy/constraints.txt" in copied
    assert "deploy/constraints.txt" in kept
    assert re.search(r"apt-get install .*\bwget\b", text), (
        "without it KubeRay calls no pod of a service ready"
    )
    assert re.search(r"apt-get install .*\bgcc\b", text), "without it Triton starts no kernel"
    assert re.search(r"&& test -f .*/Python\.h", text), (
        "nor without Python's headers, which another base may lack"
    )
    assert __version__ in text
    # A named volume has the owner of the directory in the image, or root where there is none.
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    [kernels] = [
        v["target"] for v in compose["services"]["stretto"]["volumes"] if v["type"] == "volume"
    ]
    assert f"TRITON_CACHE_DIR={kernels} " in text
    assert f"install --directory --owner=stretto {kernels}\n" in text


def test_the_page_names_what_is_there() -> None:
    page = (ROOT / "docs" / "deploy.md").read_text()
    for path in re.findall(r"deploy/[\w./-]+", page):
        assert (ROOT / path).exists(), path
    flags = set(re.findall(r"--[a-z][a-z0-9-]+", page))
    from tests.config.test_loader import options

    others = {"--head", "--address", "--from-literal", "--profile", "--check", "--resolver"}
    others |= {"--build"}  # of docker compose
    assert flags - others <= options("serve") | options("bench")
