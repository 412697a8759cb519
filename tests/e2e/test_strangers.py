"""A server with keys: what tenants learn of each other, and who takes a worker out."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path

import pytest

from helpers.serving.server import Running, Server, eventually, serving

A, BOB, BOB_TOO = ({"Authorization": f"Bearer {key}"} for key in ("key-of-a", "b1", "b2"))
OPERATOR = {"Authorization": "Bearer key-of-operators"}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("keys")
    for name, text in (
        ("clients", "# who may ask\nkey-of-a\n\nbob b1\nbob b2\n"),
        ("operators", "key-of-operators\n"),
        ("one", "key-of-a\n"),
    ):
        (folder / name).touch(mode=0o600)
        (folder / name).write_text(text)
    return folder


@pytest.fixture(scope="module")
def keyed(tiny_folder: Path, files: Path) -> Generator[Server]:
    flags = (f"--api-key-file={files}/clients", f"--admin-key-file={files}/operators")
    with serving(str(tiny_folder), *flags) as server:
        yield server


def cached_tokens(server: Server, headers: dict[str, str], name: str = "x") -> int:
    body = {
        "model": server.send("GET", "/v1/models", headers=A).json["data"][0]["id"],
        "prompt": "A secret of A, as long as some blocks. " * 8,
        "max_tokens": 2,
        "temperature": 0,
    }
    reply = server.post("/v1/completions", body, headers | {"X-Request-ID": name})
    assert reply.status == 200, reply.body
    eventually(lambda: idle(server), lambda: "not idle")
    return reply.json["usage"]["prompt_tokens_details"]["cached_tokens"]


def idle(server: Server) -> bool:
    [worker] = server.send("GET", "/workers", headers=OPERATOR).json["workers"]
    return (worker["running"], worker["waiting"], worker["blocks_used"]) == (0, 0, 0)


def test_a_tenant_does_not_learn_what_another_one_asked(keyed: Server) -> None:
    assert cached_tokens(keyed, A, "asked-by-a") == 0
    assert cached_tokens(keyed, A) > 0
    assert cached_tokens(keyed, BOB) == 0
    assert cached_tokens(keyed, BOB_TOO) > 0, "two keys of one tenant"
    path = "/decisions/asked-by-a"
    seen = [keyed.send("GET", path, headers=key).status for key in (A, BOB, OPERATOR, {})]
    assert seen == [200, 404, 200, 401]


def test_a_client_drains_no_worker_and_an_operator_does(keyed: Server, files: Path) -> None:
    path = "/workers/worker-0/drain"
    for headers, status in (({}, 401), (A, 403), (A | {"Origin": "https://evil.example"}, 403)):
        assert keyed.post(path, {}, headers).status == status
    refused = Running(
        *("drain", "worker-0", "--url", keyed.url, f"--admin-key-file={files}/one"),
        env={"HEADRACE_ADMIN_KEY": "key-of-operators"},  # the file wins
    )
    refused.wait_line("this is for operators", timeout=60)
    assert refused.wait() == 1
    refused.close()
    starts = sum("ready, serves" in line for line in keyed.lines)
    drained = Running(
        *("drain", "worker-0", "--url", keyed.url, "--budget", "5s", "--hand-over", "0"),
        f"--admin-key-file={files}/operators",
    )
    assert drained.wait(90) == 0, drained.tail()
    drained.close()
    keyed.wait_line("worker-0.*ready, serves", times=starts + 1)


def test_no_key_is_in_a_command_line(keyed: Server) -> None:
    for child in keyed.children():
        line = " ".join(child.cmdline())
        assert "key-of" not in line and "b1" not in line.split(), line


def test_keys_are_not_in_the_log(keyed: Server) -> None:
    text = "\n".join(keyed.lines)
    assert "key-of-a" not in text and "key-of-operators" not in text
    assert "every user of this machine can read" not in text
