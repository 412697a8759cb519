"""`--response-store`: responses outlive the router, its death and a full disk; a wrong file stops the start."""

from __future__ import annotations

import sqlite3
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from helpers.require import needs
from helpers.serving.full_disk import can_mount
from helpers.serving.scripted import MODEL, scripted
from helpers.serving.server import Server, eventually

SAYS = [{"when": "Again", "text": "As I said."}, {"text": "Fine, thanks."}]
DISK_KB = 256


def made(server: Server, tenant: str = "ann", **more: Any) -> Any:
    body = {"model": MODEL, "input": "How are you?"} | more
    reply = server.post("/v1/responses", body, {"X-Headrace-Tenant": tenant})
    assert reply.status == 200, reply.body
    return reply.json


def got(server: Server, response: Any, tenant: str = "ann") -> Any:
    path = f"/v1/responses/{response['id']}"
    reply = server.send("GET", path, None, {"X-Headrace-Tenant": tenant})
    return reply.json if reply.status == 200 else reply.error["code"]


@pytest.mark.parametrize("how", ["stops", "dies"])
def test_responses_outlive_the_router(tmp_path: Path, how: str) -> None:
    flag = f"--response-store={tmp_path / 'responses.db'}"
    with scripted(tmp_path, SAYS, flag) as server:
        first = made(server)
        second = made(server, input="And now?", previous_response_id=first["id"])
        theirs = made(server, tenant="bob")
        gone = made(server)
        reply = server.send(
            "DELETE", f"/v1/responses/{gone['id']}", None, {"X-Headrace-Tenant": "ann"}
        )
        assert reply.status == 200
        if how == "dies":
            server.process.kill()
            server.wait()
    with scripted(tmp_path, SAYS, flag) as server:
        assert got(server, first) == first
        assert got(server, second) == second
        assert got(server, gone) == "response_not_found"
        assert got(server, theirs) == "response_not_found"
        assert got(server, theirs, tenant="bob") == theirs
        third = made(server, input="Again?", previous_response_id=second["id"])
        assert third["output"][0]["content"][0]["text"] == "As I said."
        # the whole conversation is the prompt: it is longer than the one before it
        assert third["usage"]["input_tokens"] > second["usage"]["input_tokens"]
        wrong = {"model": MODEL, "input": "x", "previous_response_id": first["id"]}
        stranger = server.post("/v1/responses", wrong, {"X-Headrace-Tenant": "bob"})
        assert (stranger.status, stranger.error["code"]) == (400, "previous_response_not_found")


def test_what_was_streamed_outlives_the_router(tmp_path: Path) -> None:
    flag = f"--response-store={tmp_path / 'responses.db'}"
    with scripted(tmp_path, SAYS, flag) as server:
        stream = server.client.responses.create(model=MODEL, input="How are you?", stream=True)
        last: Any = list(stream)[-1]
        made_id = last.response.id
    with scripted(tmp_path, SAYS, flag) as server:
        again = server.client.responses.retrieve(made_id)
        assert again.output_text == "Fine, thanks."
        assert [item.type for item in server.client.responses.input_items.list(made_id)] == [
            "message"
        ]


def no_database(path: Path) -> None:
    path.write_text("something else " * 1000)


def other_database(path: Path) -> None:
    with sqlite3.connect(path) as other:
        other.execute("CREATE TABLE t (a)")
    other.close()


@pytest.mark.parametrize("spoil", [no_database, other_database])
def test_a_wrong_file_stops_the_start(tmp_path: Path, spoil: Callable[[Path], None]) -> None:
    path = tmp_path / "responses.db"
    spoil(path)
    before = path.read_bytes()
    router = refused(path)
    assert f"--response-store: cannot use {path}: it is not a file of stored responses" in router
    assert path.read_bytes() == before


def refused(path: Path, program: tuple[str, ...] = (sys.executable, "-m", "headrace")) -> str:
    """What a router says that does not start."""
    flags = ("--port", "0", "--worker-listen", f"unix:{path.parent / 'second.sock'}")
    router = Server("router", *flags, f"--response-store={path}", program=program)
    try:
        assert router.wait() != 0
        return router.tail()
    finally:
        router.close()


def test_a_second_router_is_kept_out_and_the_first_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "responses.db"
    with scripted(tmp_path, SAYS, f"--response-store={path}") as server:
        first = made(server)
        assert "another router uses it" in refused(path)
        assert got(server, first) == first


@needs("mounts", "it mounts a file system of its own", here=can_mount())
def test_a_file_that_may_not_be_written_stops_the_start(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    script = 'mount -t tmpfs -o ro none "$0" && exec "$@"'
    program = ("unshare", "-rm", "sh", "-c", script, str(disk), sys.executable, "-m", "headrace")
    assert "Read-only file system" in refused(disk / "responses.db", program)


@needs("mounts", "it mounts a file system of its own", here=can_mount())
def test_a_disk_that_fills_up_costs_no_answer(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    script = f'mount -t tmpfs -o size={DISK_KB}k none "$0" && exec "$@"'
    program = ("unshare", "-rm", "sh", "-c", script, str(disk), sys.executable, "-m", "headrace")
    flag = f"--response-store={disk / 'responses.db'}"
    with scripted(tmp_path, SAYS, flag, program=program) as server:
        first = made(server)

        def lost() -> bool:
            made(server, input="Again, " + "more " * 2_000)
            metrics = server.get("/metrics").body.decode()
            return "headrace_response_store_errors_total 0" not in metrics

        eventually(lost, lambda: "the disk does not fill up", 60)
        server.wait_line(r"cannot write .*responses\.db.*make room")
        after = made(server)
        assert after["output"][0]["content"][0]["text"] == "Fine, thanks."
        assert got(server, first) == first
