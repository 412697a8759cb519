"""headrace._core against its stub, against the golden files, and against the Python codec."""

import contextlib
import json
import random
import re
import signal
import socket
import struct
import subprocess
import sys
import threading
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace import _core, errors
from headrace.wire import codec
from headrace.wire.frames import Frame
from helpers.worker.frames import any_frame, as_json

GOLDEN = Path(__file__).parents[1] / "golden"
BLOCKS = json.loads((GOLDEN / "blocks.json").read_text(encoding="utf-8"))
KEY = bytes(range(32))


def u32(*tokens: int) -> bytes:
    return struct.pack(f"<{len(tokens)}I", *tokens)


def test_the_stub_is_that_of_the_build() -> None:
    command = [sys.executable, "-m", "mypy.stubtest", "headrace._core"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("case", BLOCKS["hashes"])
def test_hashes_are_the_known_answers(case: dict[str, Any]) -> None:
    key = _core.derive_hash_key(case["secret"].encode())
    assert key.hex() == case["key"]
    tokens, salt = u32(*case["tokens"]), case["salt"].encode()
    hashes = _core.hash_blocks(tokens, case["block_tokens"], key, salt)
    assert [digest.hex() for digest in hashes] == case["hashes"]


@pytest.mark.parametrize("case", BLOCKS["proofs"])
def test_proofs_are_the_known_answers(case: dict[str, Any]) -> None:
    for side in ("worker", "router"):
        proof = _core.auth_proof(case["secret"].encode(), side, bytes(case["challenge"]))
        assert proof.hex() == case[side]


@given(st.binary(max_size=400), st.integers(1, 20), st.data())
def test_hashing_goes_on_from_any_block(data: bytes, block: int, draw: st.DataObject) -> None:
    tokens = data[: len(data) // 4 * 4]
    whole = _core.hash_blocks(tokens, block, KEY, b"salt")
    assert len(whole) == len(tokens) // 4 // block
    if whole:
        cut = draw.draw(st.integers(1, len(whole)))
        rest = tokens[cut * block * 4 :]
        assert _core.hash_blocks(rest, block, KEY, parent=whole[cut - 1]) == whole[cut:]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((b"abc", 1, KEY), "tokens"),
        ((b"abcd", 0, KEY), "zero"),
        ((b"abcd", 1, b"short"), "key must have 32 bytes, not 5"),
        ((b"abcd", 1, KEY, None, b"short"), "parent must have 16 bytes, not 5"),
        ((b"abcd", 1, KEY, b"salt", bytes(16)), "give one of them"),
    ],
)
def test_hashing_names_a_wrong_argument(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _core.hash_blocks(*arguments)


def test_a_proof_is_of_one_of_two_sides() -> None:
    with pytest.raises(ValueError, match="client"):
        _core.auth_proof(b"secret", "client", b"")  # type: ignore[arg-type]


def name_of(frame: Frame) -> str:
    """The frame's name in Rust."""
    return {"ModelPart": "Model"}.get(type(frame).__name__, type(frame).__name__)


def without_bytes(value: Any) -> Any:
    """A dict of `_core` as tests/golden has it."""
    if isinstance(value, dict):
        return {key: without_bytes(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [without_bytes(item) for item in value]
    return list(value) if isinstance(value, bytes) else value


@given(any_frame())
def test_rust_and_python_write_and_read_the_same_bytes(frame: Frame) -> None:
    body = codec.encode(frame)
    as_dict = _core.decode_frame(body)
    assert without_bytes(as_dict) == {name_of(frame): as_json(frame)}
    assert _core.encode_frame(as_dict) == body


def is_frame(decode: Any, body: bytes) -> bool:
    try:
        decode(body)
    except errors.WireError:
        return False
    return True


@given(any_frame(), st.data())
def test_rust_and_python_refuse_the_same_bytes(frame: Frame, data: st.DataObject) -> None:
    body = bytearray(codec.encode(frame))
    for at in data.draw(st.lists(st.integers(0, len(body) - 1), max_size=3)):
        body[at] = data.draw(st.integers(0, 255))
    assert is_frame(_core.decode_frame, bytes(body)) == is_frame(codec.decode, bytes(body))


@pytest.mark.parametrize("case", json.loads((GOLDEN / "invalid.json").read_text(encoding="utf-8")))
def test_rust_and_python_raise_the_same_exception(case: dict[str, str]) -> None:
    body = bytes.fromhex(case["hex"])
    with pytest.raises(errors.WireError) as rust:
        _core.decode_frame(body)
    with pytest.raises(errors.WireError) as python:
        codec.decode(body)
    assert type(rust.value) is type(python.value)
    if case["at"]:
        assert getattr(rust.value, "at", "") == case["at"]


@pytest.mark.parametrize(
    "frame",
    [
        {},
        {"Pong": {"nonce": 1}},
        {"Ping": {}},
        {"Ping": {"nonce": -1}},
        {"Ping": {"nonce": "x"}},
        5,
    ],
)
def test_a_dict_that_is_no_frame_raises_a_wire_error(frame: Any) -> None:
    with pytest.raises(errors.WireError):
        _core.encode_frame(frame)


# --- Router ---

FREE_PORTS = {"port": 0, "worker_listen": "127.0.0.1:0", "log_level": "error"}


def get(url: str) -> int:
    with urllib.request.urlopen(url, timeout=60) as answer:
        return answer.status


def test_a_router_serves_between_start_and_stop() -> None:
    router = _core.Router(FREE_PORTS)
    router.start()
    assert get(f"http://{router.address}/health") == 200
    host, port = router.worker_address.rsplit(":", 1)
    socket.create_connection((host, int(port)), timeout=60).close()
    assert router.wait(0.0) is False
    assert router.stop(10.0) is True
    assert router.wait() is True
    assert router.stop() is True
    host, port = router.address.rsplit(":", 1)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((host, int(port)), timeout=60)


def test_a_dropped_router_frees_its_port() -> None:
    router = _core.Router(FREE_PORTS)
    router.start()
    host, port = router.address.rsplit(":", 1)
    with socket.create_connection((host, int(port)), timeout=60) as client:
        del router
        with contextlib.suppress(ConnectionResetError):  # if it was not accepted yet
            assert client.recv(1) == b""  # comes once the router is gone


def test_a_router_takes_a_unix_socket(tmp_path: Path) -> None:
    router = _core.Router(FREE_PORTS | {"worker_listen": f"unix:{tmp_path}/workers"})
    router.start()
    assert router.worker_address == f"unix:{tmp_path}/workers"
    assert router.stop(10.0)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"prot": 1}, "prot"),
        ({"port": "many"}, "^port: "),
        ({"port": 70_000}, "^port: "),
        ({"policy": "random"}, "--policy"),
        ({"worker_listen": "nowhere"}, "--worker-listen"),
        ({"secret": "short"}, "--secret"),
        ("port=1", "Mapping"),
    ],
)
def test_a_wrong_configuration_names_its_setting(args: Any, message: str) -> None:
    with pytest.raises(errors.ConfigError, match=message):
        _core.Router(args)


def test_a_taken_port_is_a_start_error_and_can_be_tried_again() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        router = _core.Router(FREE_PORTS | {"port": port})
        with pytest.raises(errors.StartError, match=str(port)):
            router.start()
    router.start()
    assert router.address == f"127.0.0.1:{port}"
    assert router.stop(10.0)


def test_a_router_that_was_not_started_says_so() -> None:
    router = _core.Router(FREE_PORTS)
    for use in (lambda: router.address, lambda: router.worker_address, router.wait, router.stop):
        with pytest.raises(RuntimeError, match="not started"):
            use()
    router.start()
    with pytest.raises(RuntimeError, match="before"):
        router.start()
    router.stop(10.0)


def test_other_threads_run_while_one_waits_for_the_router() -> None:
    router = _core.Router(FREE_PORTS)
    router.start()
    waiter = threading.Thread(target=router.wait)
    waiter.start()
    # would never return if wait() kept the GIL
    total = sum(random.Random(1).randbytes(100_000))
    assert total > 0
    assert waiter.is_alive()
    assert router.stop(10.0)
    waiter.join(10.0)
    assert not waiter.is_alive()


def test_ctrl_c_interrupts_a_wait() -> None:
    code = """
import os, signal, threading
from headrace import _core
router = _core.Router({"port": 0, "worker_listen": "127.0.0.1:0", "log_level": "error"})
router.start()
try:
    threading.Thread(target=lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    router.wait()
except KeyboardInterrupt:
    print("interrupted", router.stop(10.0))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "interrupted True\n"


# --- router_main ---


def router_process(*arguments: str) -> subprocess.Popen[str]:
    code = "import sys; from headrace import _core; sys.exit(_core.router_main(sys.argv))"
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.Popen(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_the_program_serves_until_a_signal(name: str) -> None:
    ports = ["--port", "0", "--worker-listen", "127.0.0.1:0"]
    with router_process(*ports, "--log-level", "error") as process:
        assert process.stdout is not None
        url = re.search(r"http://\S+", process.stdout.readline())
        assert url is not None
        assert get(f"{url[0]}/health") == 200
        process.send_signal(signal.Signals[name])
        assert process.wait(30) == 0
        assert process.stderr is not None
        assert process.stderr.read() == ""


@pytest.mark.parametrize(
    ("arguments", "status", "output"),
    [
        (["--help"], 0, "--worker-listen"),
        (["--version"], 0, "headrace-router "),
        (["--prot", "1"], 2, "--port"),
        (["--policy", "random"], 2, "--policy"),
        (["--host", "host.invalid"], 1, "cannot listen"),
    ],
)
def test_the_program_says_what_is_wrong(arguments: list[str], status: int, output: str) -> None:
    with router_process(*arguments) as process:
        out, err = process.communicate(timeout=60)
        assert (process.returncode, output in out + err) == (status, True), out + err
