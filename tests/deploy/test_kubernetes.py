"""The manifests fit Kubernetes' own schemas, name each other rightly, and use flags, pages and metrics that exist."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from headrace.worker.endpoint.pages import PATHS
from headrace.worker.endpoint.watched import ANSWER_S
from helpers.command_line import STOP, refused
from helpers.exported import of_page, problems
from helpers.serving.fleet import Fleet
from helpers.serving.server import eventually
from helpers.tools import prometheus_tool

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "deploy/kubernetes"
SCHEMAS: dict[str, Any] = json.loads(
    (Path(__file__).parent / "schemas/kubernetes.json").read_text()
)
MANIFESTS = ["group.yaml", "network.yaml", "router.yaml", "secrets.example.yaml", "worker.yaml"]
POD_KINDS = {"Deployment", "StatefulSet", "LeaderWorkerSet"}
DRAIN_OVERDUE_S = 8  # after the drain's deadline a router ends itself
# Variables that are there without being declared: the operator of groups sets them.
OF_OPERATOR = {"LWS_GROUP_SIZE", "LWS_WORKER_INDEX", "LWS_LEADER_ADDRESS"}


def documents() -> list[dict[str, Any]]:
    return [one for name in MANIFESTS for one in yaml.safe_load_all((FOLDER / name).read_text())]


def named(one: dict[str, Any]) -> str:
    return f"{one['kind']}/{one['metadata']['name']}"


def faults(one: dict[str, Any]) -> list[str]:
    """What its schema says against an object."""
    kind = f"{one.get('apiVersion')} {one.get('kind')}"
    if kind not in SCHEMAS["kinds"]:
        return [f"{kind} is not known"]
    schema = {
        "$schema": SCHEMAS["$schema"],
        "$ref": f"#/$defs/{SCHEMAS['kinds'][kind]}",
        "$defs": SCHEMAS["$defs"],
    }
    errors = jsonschema.Draft202012Validator(schema).iter_errors(one)
    return [f"{error.json_path}: {error.message}" for error in errors]


def template(one: dict[str, Any]) -> dict[str, Any]:
    spec = one["spec"]
    inside = spec.get("template") or spec["leaderWorkerTemplate"]["workerTemplate"]
    assert isinstance(inside, dict)
    return inside


def pods() -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    """The name of each object that makes pods, its labels, and the pods' spec."""
    for one in documents():
        if one["kind"] in POD_KINDS:
            yield named(one), template(one)["metadata"]["labels"], template(one)["spec"]


each_pod = pytest.mark.parametrize(
    ("labels", "spec"),
    [(labels, spec) for _, labels, spec in pods()],
    ids=[name for name, _, _ in pods()],
)


def test_every_file_is_looked_at() -> None:
    files = {file.name for file in FOLDER.glob("*.yaml")}
    assert files == {*MANIFESTS, "adapter.yaml"}
    assert sorted(named(one) for one in documents()) == sorted({named(one) for one in documents()})


@pytest.mark.parametrize("one", documents(), ids=named)
def test_an_object_fits_its_schema(one: dict[str, Any]) -> None:
    assert faults(one) == []


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("spec", "replicas"), "two"),
        (("spec", "replica"), 2),
        (("spec", "template", "spec", "containers", 0, "readinessProbe", "httpGet", "port"), []),
        (("spec", "template", "spec", "containers", 0, "imagePullPolicies"), "Always"),
        (("apiVersion",), "apps/v2"),
    ],
)
def test_an_object_that_is_wrong_does_not(path: tuple[str | int, ...], value: Any) -> None:
    (one,) = [one for one in documents() if named(one) == "Deployment/headrace-router"]
    inside: Any = one
    for key in path[:-1]:
        inside = inside[key]
    inside[path[-1]] = value
    assert faults(one) != []


def test_a_group_that_is_wrong_does_not_fit_its_schema() -> None:
    (one,) = [one for one in documents() if one["kind"] == "LeaderWorkerSet"]
    one["spec"]["leaderWorkerTemplate"]["restartPolicy"] = "Never"
    one["spec"]["leaderWorkerTemplate"]["workerTemplate"]["spec"]["containers"][0]["image"] = 1
    one["spec"]["sizes"] = 1
    assert len(faults(one)) == 3


def test_selectors_find_the_pods_that_they_are_about() -> None:
    of_pods = [labels for _, labels, _ in pods()]

    def finds(selector: dict[str, str]) -> bool:
        return any(selector.items() <= labels.items() for labels in of_pods)

    selectors = 0
    for one in documents():
        spec = one.get("spec", {})
        found = [spec.get("selector"), spec.get("podSelector")]
        if one["kind"] == "NetworkPolicy":
            ends = [end for rule in spec["ingress"] for end in rule.get("from", [])]
            ends += [end for rule in spec["egress"] for end in rule.get("to", [])]
            found += [end.get("podSelector") for end in ends]
        for selector in filter(None, found):
            selectors += 1
            assert finds(selector.get("matchLabels", selector)), named(one)
        if one["kind"] in {"Deployment", "StatefulSet"}:
            own = spec["selector"]["matchLabels"].items()
            assert own <= template(one)["metadata"]["labels"].items()
    assert selectors > 10


def test_what_objects_name_is_there() -> None:
    there = {named(one) for one in documents()}
    secrets = {
        one["metadata"]["name"]: set(one["stringData"])
        for one in documents()
        if one["kind"] == "Secret"
    }
    for one in documents():
        spec = one.get("spec", {})
        if target := spec.get("scaleTargetRef"):
            assert f"{target['kind']}/{target['name']}" in there
        if name := spec.get("serviceName"):
            assert f"Service/{name}" in there
    for _, _, spec in pods():
        assert f"ServiceAccount/{spec['serviceAccountName']}" in there
        (container,) = spec["containers"]
        for variable in container.get("env", []):
            if key := variable["valueFrom"].get("secretKeyRef"):
                assert key["key"] in secrets[key["name"]]
        volumes = {volume["name"]: volume for volume in spec["volumes"]}
        for mount in container["volumeMounts"]:
            volume = volumes.get(mount["name"], {})
            if secret := volume.get("secret"):
                wanted = [
                    word.rpartition("/")[2]
                    for word in container["args"]
                    if f"={mount['mountPath']}/" in word
                ]
                assert wanted and set(wanted) <= secrets[secret["secretName"]]


def test_volumes_that_are_mounted_are_declared() -> None:
    for one in documents():
        if one["kind"] not in POD_KINDS:
            continue
        spec = template(one)["spec"]
        claims = [
            claim["metadata"]["name"] for claim in one["spec"].get("volumeClaimTemplates", [])
        ]
        declared = {volume["name"] for volume in spec["volumes"]} | set(claims)
        used = {mount["name"] for mount in spec["containers"][0]["volumeMounts"]}
        assert used == declared, named(one)


@each_pod
def test_pods_are_hardened_and_bounded(labels: dict[str, str], spec: dict[str, Any]) -> None:
    (container,) = spec["containers"]
    assert spec["automountServiceAccountToken"] is False
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert "memory" in container["resources"]["limits"]
    assert ":" in container["image"] and "latest" not in container["image"]
    for volume in spec["volumes"]:
        if "emptyDir" in volume:
            assert "sizeLimit" in volume["emptyDir"], volume["name"]


@each_pod
def test_every_variable_in_an_argument_is_declared(
    labels: dict[str, str], spec: dict[str, Any]
) -> None:
    (container,) = spec["containers"]
    words = " ".join([*container.get("command", []), *container["args"]])
    used = {part.partition(")")[0] for part in words.split("$(")[1:]}
    assert used <= {variable["name"] for variable in container.get("env", [])} | OF_OPERATOR


@each_pod
def test_the_arguments_have_flags_that_the_programs_take(
    labels: dict[str, str], spec: dict[str, Any]
) -> None:
    (container,) = spec["containers"]
    program = labels["app.kubernetes.io/name"].removeprefix("headrace-")
    words = container["args"] if container["args"][0] == program else [program, *container["args"]]
    for name in ("POD_NAME", "POD_IP", "GROUP_INDEX"):
        words = [word.replace(f"$({name})", "127.0.0.1") for word in words]
    assert refused(*words) == [STOP]


def test_a_router_has_the_time_for_its_drain() -> None:
    (spec,) = [spec for name, _, spec in pods() if name == "Deployment/headrace-router"]
    (container,) = spec["containers"]
    (drain,) = [word for word in container["args"] if word.startswith("--drain-timeout-ms=")]
    pause_s = container["lifecycle"]["preStop"]["sleep"]["seconds"]
    drain_s = int(drain.partition("=")[2]) / 1e3
    assert spec["terminationGracePeriodSeconds"] > pause_s + drain_s + DRAIN_OVERDUE_S


def test_probes_ask_for_pages_that_a_router_has_under_names_of_its_ports(fleet: Fleet) -> None:
    (spec,) = [spec for name, _, spec in pods() if name == "Deployment/headrace-router"]
    (container,) = spec["containers"]
    ports = {port["name"] for port in container["ports"]}
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        get = container[probe]["httpGet"]
        assert get["port"] in ports
        # a probe comes without a key, and by the address of the pod
        answer = fleet.router.send("GET", get["path"], headers={"Host": "10.1.2.3:8000"})
        assert answer.status == 200, probe


def test_probes_ask_for_pages_that_a_worker_has_at_the_port_of_its_endpoint() -> None:
    (spec,) = [spec for name, _, spec in pods() if name == "StatefulSet/headrace-worker"]
    (container,) = spec["containers"]
    (port,) = container["ports"]
    assert f"--http-port={port['containerPort']}" in container["args"]
    assert "--http-host=0.0.0.0" in container["args"], "probes come from outside of the pod"
    for probe in ("livenessProbe", "readinessProbe"):
        get = container[probe]["httpGet"]
        assert get["port"] == port["name"]
        assert get["path"] in PATHS
    assert container["livenessProbe"]["timeoutSeconds"] > ANSWER_S, "its answer says what is wrong"


def test_workers_find_a_router_that_is_not_ready_yet() -> None:
    (service,) = [one for one in documents() if named(one) == "Service/headrace-routers"]
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["publishNotReadyAddresses"] is True
    (port,) = service["spec"]["ports"]
    for name, _, spec in pods():
        if "router" not in name:
            (container,) = spec["containers"]
            assert f"--router=dns:headrace-routers:{port['port']}" in container["args"]


def test_the_autoscaler_has_metrics_that_the_adapter_makes_of_what_routers_export(
    fleet: Fleet,
) -> None:
    rules = yaml.safe_load((FOLDER / "adapter.yaml").read_text())["rules"]["external"]
    made = {rule["name"]["as"] for rule in rules}

    def known() -> str | None:
        page = fleet.metrics()
        return page if "headrace_scale_needed_workers{" in page else None

    exported = of_page(eventually(known, fleet.metrics) or "")
    assert [problems(rule["metricsQuery"], exported) for rule in rules] == [[]] * len(rules)
    assert [problems(rule["seriesQuery"], exported) for rule in rules] == [[]] * len(rules)
    used = {
        metric["external"]["metric"]["name"]
        for one in documents()
        if one["kind"] == "HorizontalPodAutoscaler"
        for metric in one["spec"]["metrics"]
    }
    assert used == made


@pytest.mark.parametrize("name", ["prometheus.yml", "kubernetes.yml"])
def test_promtool_takes_the_configuration(name: str, tmp_path: Path) -> None:
    """Debian's promtool is built without Kubernetes, so that part is looked at by its own keys alone."""
    config = yaml.safe_load((ROOT / "deploy/prometheus" / name).read_text())
    (scrape,) = config["scrape_configs"]
    assert scrape["job_name"] == "headrace"
    for discovery in scrape.pop("kubernetes_sd_configs", []):
        assert set(discovery) == {"role", "namespaces", "selectors"}
        (selector,) = discovery["selectors"]
        label, _, value = selector["label"].partition("=")
        assert {label: value}.items() <= template(
            next(one for one in documents() if one["kind"] == "Deployment")
        )["metadata"]["labels"].items()
    file = tmp_path / "prometheus.yml"
    file.write_text(yaml.safe_dump(config))
    promtool = prometheus_tool("promtool")
    command = [promtool, "check", "config", "--syntax-only", file]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
