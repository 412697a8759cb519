"""Dockerfiles and compose.yaml: linted, valid by their schema, and true to the flags and files that there are."""

from __future__ import annotations

import http.server
import json
import ssl
import subprocess
import sys
import threading
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any

import jsonschema
import pytest
import yaml

from deploy.docker.dockerfile import (
    DockerfileError,
    ignore_rules,
    is_sent,
    sent_files,
    stages,
)
from headrace.worker.endpoint.pages import PATHS
from helpers.command_line import STOP, refused
from helpers.ports import held_ports
from helpers.tools import hadolint

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "deploy/docker"
FILES = [DOCKER / "Dockerfile", DOCKER / "Dockerfile.gpu"]
DATA = ROOT / "tests/data"
SCHEMA: dict[str, Any] = json.loads(
    (Path(__file__).parent / "schemas/compose-spec.json").read_text()
)
COMPOSE: dict[str, Any] = yaml.safe_load((DOCKER / "compose.yaml").read_text())
RULES = ignore_rules((ROOT / ".dockerignore").read_text())
each_file = pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)


@each_file
def test_hadolint_has_nothing_to_say(file: Path) -> None:
    command = [hadolint(), "--no-color", "--config", DOCKER / ".hadolint.yaml", file]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


@each_file
def test_bases_are_pinned_by_tag_and_have_a_place_for_a_digest(file: Path) -> None:
    text = file.read_text()
    for line in text.splitlines():
        if line.startswith("FROM ") and ":" in line:
            assert "_TAG}" in line and "_DIGEST}" in line, line
    names = {stage.name for stage in stages(text)}
    bases = [stage.base for stage in stages(text) if stage.base not in names]
    assert bases
    for base in bases:
        _, _, tag = base.partition(":")
        assert tag and "latest" not in tag, base


@each_file
def test_what_runs_is_no_root_and_needs_no_shell(file: Path) -> None:
    images = [stage for stage in stages(file.read_text()) if stage.last("ENTRYPOINT")]
    assert images
    for image in images:
        user, entry, check = (image.last(name) for name in ("USER", "ENTRYPOINT", "HEALTHCHECK"))
        assert user is not None and entry is not None and check is not None
        assert [int(part) >= 10_000 for part in user.text.split(":")] == [True, True]
        assert (entry.exec_form() or [""])[0] == "headrace"
        assert check.text == "NONE" or check.text.startswith('CMD ["'), check
        stop = image.last("STOPSIGNAL")
        assert stop is not None and stop.text == "SIGTERM"
        before = [step.name for step in image.steps[: image.steps.index(user)]]
        assert "RUN" not in before, "an image that runs has only what was copied into it"


@each_file
def test_what_is_copied_is_there_and_is_sent_to_the_build(file: Path) -> None:
    names = {stage.name for stage in stages(file.read_text())}
    sources = 0
    for stage in stages(file.read_text()):
        for step in stage.steps:
            if step.name != "COPY":
                continue
            if origin := step.flag("from"):
                assert origin[0] in names
                continue
            for source in step.words()[:-1]:
                sources += 1
                assert sent_files(ROOT, source, RULES), f"line {step.line}: {source}"
    assert sources > 5


def test_both_files_build_the_wheel_in_the_same_way() -> None:
    built = []
    for file in FILES:
        (build,) = [stage for stage in stages(file.read_text()) if stage.name == "build"]
        built.append((build.base, [(step.name, step.flags, step.text) for step in build.steps]))
    assert built[0] == built[1]


@pytest.mark.parametrize(
    ("path", "sent"),
    [
        ("Cargo.lock", True),
        ("router/src/main.rs", True),
        ("pyworkers/headrace/cli/main.py", True),
        ("pyworkers/headrace/_core.abi3.so", False),
        ("pyworkers/headrace/__pycache__/a.pyc", False),
        ("deploy/docker/secrets/workers.txt", False),
        ("deploy/docker/health.py", True),
        (".git/config", False),
        (".venv/bin/python", False),
        (".cargo/config.toml", True),
        ("target/release/headrace-router", False),
        ("router/target/debug/x", False),
        ("tests/router/main.rs", True),
        ("tests/conftest.py", False),
        ("bench/results/figures.json", False),
    ],
)
def test_builds_see_sources_and_no_secrets(path: str, sent: bool) -> None:
    assert is_sent(PurePosixPath(path), RULES) is sent


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("FROM a\nSHELL x", "SHELL is not known"),
        ("RUN x", "before the first FROM"),
        ("FROM a:${TAG}", "TAG has no value"),
        ("FROM a\nRUN x \\", "backslash"),
    ],
)
def test_a_dockerfile_that_cannot_be_read_is_refused(text: str, problem: str) -> None:
    with pytest.raises(DockerfileError, match=problem):
        stages(text)


def test_a_wrong_list_of_words_is_refused() -> None:
    for text in ('["a", ]', '["a", 1]'):
        ((step,),) = [stage.steps for stage in stages(f"FROM a\nCMD {text}")]
        with pytest.raises(DockerfileError, match="line 2"):
            step.exec_form()


def test_lines_comments_flags_and_arguments_are_read() -> None:
    text = "ARG TAG=1\nFROM a:$TAG AS b\n# no\nRUN --mount=type=cache,target=/x \\\n  # nor this\n  one \\\n  two\n"
    (stage,) = stages(text)
    assert (stage.name, stage.base) == ("b", "a:1")
    (step,) = stage.steps
    assert (step.text, step.flag("mount"), step.flag("from")) == (
        "one two",
        ["type=cache,target=/x"],
        [],
    )


def test_compose_fits_its_schema() -> None:
    validator = jsonschema.Draft7Validator
    validator.check_schema(SCHEMA)
    assert [error.message for error in validator(SCHEMA).iter_errors(COMPOSE)] == []
    broken = json.loads(json.dumps(COMPOSE))
    broken["services"]["router"]["healthchecks"] = {}
    assert not validator(SCHEMA).is_valid(broken)


def test_services_of_headrace_are_bounded_and_hardened() -> None:
    for name in ("router", "worker"):
        service = COMPOSE["services"][name]
        assert service["read_only"] is True
        assert service["cap_drop"] == ["ALL"]
        limits = service["deploy"]["resources"]["limits"]
        assert {"cpus", "memory"} <= set(limits)
        target = service["build"]["target"]
        (stage,) = [s for s in stages(FILES[0].read_text()) if s.name == target]
        assert stage.last("ENTRYPOINT") is not None
    assert COMPOSE["services"]["worker"]["deploy"]["replicas"] == 2
    waits = COMPOSE["services"]["worker"]["depends_on"]["router"]
    assert waits == {"condition": "service_healthy"}


def test_everything_that_services_name_is_declared_and_there() -> None:
    for service in COMPOSE["services"].values():
        for network in service["networks"]:
            assert network in COMPOSE["networks"]
        for secret in service.get("secrets", []):
            assert secret in COMPOSE["secrets"]
        for volume in service.get("volumes", []):
            assert volume.partition(":")[0] in COMPOSE["volumes"]
        for config in service.get("configs", []):
            file = COMPOSE["configs"][config["source"]]["file"]
            assert (DOCKER / file).is_file(), file
    for secret in COMPOSE["secrets"].values():
        file = (DOCKER / secret["file"]).relative_to(ROOT)
        assert not is_sent(PurePosixPath(file), RULES)


@pytest.mark.parametrize("name", ["router", "worker"])
def test_the_commands_have_flags_that_the_programs_take(name: str) -> None:
    words = COMPOSE["services"][name]["command"]
    words = [word.replace("${HEADRACE_MODEL:-", "").rstrip("}") for word in words]
    assert refused(name, *words) == [STOP]


def test_checks_ask_for_pages_that_there_are() -> None:
    asked = {
        name: COMPOSE["services"][name]["healthcheck"]["test"] for name in ("router", "worker")
    }
    (image,) = [stage for stage in stages(FILES[0].read_text()) if stage.name == "router"]
    check = image.last("HEALTHCHECK")
    assert check is not None
    assert json.loads(check.text.removeprefix("CMD ")) == asked["router"][1:]
    assert asked["router"][-1] == "http://127.0.0.1:8000/livez"
    assert asked["worker"][:-1] == asked["router"][:-1]
    port, path = asked["worker"][-1].removeprefix("http://127.0.0.1:").split("/")
    assert f"--http-port={port}" in COMPOSE["services"]["worker"]["command"]
    assert f"/{path}" in PATHS
    for file in FILES:
        script = [
            step.words()[-1]
            for stage in stages(file.read_text())
            for step in stage.steps
            if step.name == "COPY" and stage.name == "worker"
        ]
        assert asked["worker"][2] in script


class Answers(http.server.BaseHTTPRequestHandler):
    """/health is 200, everything else 503."""

    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/health" else 503)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - its name there
        pass


@contextmanager
def answering(*, tls: bool) -> Generator[str]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    if tls:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(DATA / "localhost.crt", DATA / "localhost.key")
        server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"{'https' if tls else 'http'}://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def health(*arguments: str) -> int:
    """Exit status of the check, with a proxy in the environment that leads nowhere."""
    environment = {"http_proxy": "http://127.0.0.1:1", "https_proxy": "http://127.0.0.1:1"}
    command = [sys.executable, DOCKER / "health.py", *arguments]
    return subprocess.run(command, env=environment, capture_output=True).returncode


@pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])
def test_the_health_check_knows_a_router_that_answers(tls: bool) -> None:
    with answering(tls=tls) as url:
        assert health(f"{url}/health") == 0
        assert health(f"{url}/other") == 1


@pytest.mark.parametrize("arguments", [[], ["no url"], ["http://127.0.0.1:x/"], ["a", "b"]])
def test_the_health_check_fails_for_what_is_no_url(arguments: list[str]) -> None:
    assert health(*arguments) == 1


def test_the_health_check_fails_where_nobody_listens() -> None:
    with held_ports(1) as (port,):
        assert health(f"http://127.0.0.1:{port}/health") == 1
