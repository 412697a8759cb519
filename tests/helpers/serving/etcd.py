"""A real etcd for tests: the one that is installed, or Debian's package, unpacked into target/ and not installed."""

from __future__ import annotations

import base64
import http.client
import json
import os
import shutil
import signal
import ssl
import subprocess
import threading
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from helpers.ports import held_ports
from helpers.require import missing

CACHE = Path(__file__).parents[3] / "target" / "etcd"
DATA = Path(__file__).parents[2] / "data"
CERT = DATA / "localhost.crt"  # vouches for itself, as a server and as a client
KEY = DATA / "localhost.key"
START_S = 60.0


def etcd_binary() -> Path:
    """Where an etcd is. Skips the test, saying why, where there is none and none can be had."""
    if found := shutil.which("etcd"):
        return Path(found)
    cached = CACHE / "usr/bin/etcd"
    if cached.is_file():
        return cached
    apt, dpkg = shutil.which("apt-get"), shutil.which("dpkg-deb")
    if apt is None or dpkg is None:
        missing("etcd", "no etcd: neither an etcd nor apt-get is on this machine")
    CACHE.mkdir(parents=True, exist_ok=True)
    try:
        download_package(apt)
        package = max(CACHE.glob("etcd-server_*.deb"))
        # unpacked beside its place and moved, so that two test runs do not see half of it
        unpacked = CACHE / f"unpacked-{os.getpid()}"
        subprocess.run([dpkg, "-x", package, unpacked], check=True, capture_output=True, timeout=60)
    except (subprocess.SubprocessError, OSError, ValueError) as error:
        detail = getattr(error, "stderr", b"") or str(error).encode()
        end = detail.decode()[-200:].strip()
        missing("etcd", f"no etcd: Debian's package cannot be had: {end}")
    with suppress(OSError):
        (unpacked / "usr").rename(CACHE / "usr")
    shutil.rmtree(unpacked, ignore_errors=True)
    return cached


def download_package(apt: str) -> None:
    """Puts Debian's package into `CACHE`. A new machine may have no lists of packages, or old ones."""
    for command in (["download", "etcd-server"], ["update"], ["download", "etcd-server"]):
        run = subprocess.run([apt, *command], cwd=CACHE, capture_output=True, timeout=120)
        if run.returncode == 0 and command[0] == "download":
            return
    run.check_returncode()


class EtcdServer:
    """One member, its data in `folder`. It may be killed and started again, until it is closed.

    With `tls`, it speaks nothing else; with `known_clients` too, clients need a certificate.
    """

    def __init__(
        self, binary: Path, folder: Path, *, tls: bool = False, known_clients: bool = False
    ) -> None:
        self._binary = binary
        self._folder = folder
        self._flags: list[str | Path] = []
        self._tls: ssl.SSLContext | None = None
        self._token: str | None = None
        if tls:
            self._flags += ["--cert-file", CERT, "--key-file", KEY]
            self._tls = ssl.create_default_context(cafile=CERT)
            self._tls.load_cert_chain(CERT, KEY)
        if known_clients:
            self._flags += ["--client-cert-auth", "--trusted-ca-file", CERT]
        self._ports = ExitStack()
        self.port, self._peer_port = self._ports.enter_context(held_ports(2))
        self.endpoint = f"127.0.0.1:{self.port}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it, and wait until it answers."""
        scheme = "http" if self._tls is None else "https"
        client, peer = f"{scheme}://{self.endpoint}", f"http://127.0.0.1:{self._peer_port}"
        with (self._folder.parent / f"{self._folder.name}.log").open("ab") as log:
            self._process = subprocess.Popen(
                [
                    self._binary,
                    *("--data-dir", self._folder, "--name", "one"),
                    *("--listen-client-urls", client, "--advertise-client-urls", client),
                    *("--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer),
                    *("--initial-cluster", f"one={peer}"),
                    *self._flags,
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        give_up_at = time.monotonic() + START_S
        pause = threading.Event()
        while True:
            try:
                self.call("/v3/kv/range", {"key": _b64(b"x")})
                return
            except OSError:
                assert self._process.poll() is None, "etcd ended; its log is beside its data"
                assert time.monotonic() < give_up_at, "etcd does not answer"
                pause.wait(0.05)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def close(self) -> None:
        self.kill()
        self._ports.close()

    def wipe(self) -> None:
        """Lose all that it knew. Only while it is not running."""
        assert self._process is None
        shutil.rmtree(self._folder)

    def freeze(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def call(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        if self._tls is None:
            connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        else:
            connection = http.client.HTTPSConnection(
                "127.0.0.1", self.port, timeout=60, context=self._tls
            )
        headers = {} if self._token is None else {"Authorization": self._token}
        try:
            connection.request("POST", path, json.dumps(body), headers)
            answer = connection.getresponse()
            data = answer.read()
            if answer.status != 200:
                raise OSError(f"status {answer.status}: {data[:200]!r}")
            return json.loads(data)
        except http.client.HTTPException as error:
            raise OSError(str(error)) from error
        finally:
            connection.close()

    def put(self, key: bytes, value: bytes) -> None:
        self.call("/v3/kv/put", {"key": _b64(key), "value": _b64(value)})

    def delete(self, key: bytes) -> None:
        self.call("/v3/kv/deleterange", {"key": _b64(key)})

    def keys(self, prefix: bytes) -> dict[bytes, bytes]:
        end = prefix[:-1] + bytes([prefix[-1] + 1])
        answer = self.call("/v3/kv/range", {"key": _b64(prefix), "range_end": _b64(end)})
        found = answer.get("kvs", [])
        return {base64.b64decode(kv["key"]): base64.b64decode(kv.get("value", "")) for kv in found}

    def require_login(self, user: str, password: str, prefix: bytes) -> None:
        """From now on only `user` reads and writes below `prefix`, and nobody else does anything."""
        for name, words in (("root", "of root"), (user, password)):
            self.call("/v3/auth/role/add", {"name": name})
            self.call("/v3/auth/user/add", {"name": name, "password": words})
            self.call("/v3/auth/user/grant", {"user": name, "role": name})
        end = prefix[:-1] + bytes([prefix[-1] + 1])
        allowed = {"permType": "READWRITE", "key": _b64(prefix), "range_end": _b64(end)}
        self.call("/v3/auth/role/grant", {"name": user, "perm": allowed})
        self.call("/v3/auth/enable", {})
        login = {"name": "root", "password": "of root"}
        self._token = self.call("/v3/auth/authenticate", login)["token"]

    def compact(self) -> None:
        """Forget all history up to now."""
        revision = self.call("/v3/kv/range", {"key": _b64(b"x")})["header"]["revision"]
        self.call("/v3/kv/compaction", {"revision": revision, "physical": True})


def _b64(data: bytes) -> str:
    return base64.b64encode(data).decode()
