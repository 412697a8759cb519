"""Hosts as network namespaces, joined by a forwarder that can drop, lose and delay what passes between two of them.

The kernel's own emulation (netem) is not everywhere, TUN devices are: each namespace has one, the forwarder holds their
other ends and carries IP packets from one to the next. What it drops, real TCP sends again.

    python -m chaos.network SOCKET TUN=NAMESPACE=ADDRESS ...
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import fcntl
import json
import os
import random
import shutil
import socket
import struct
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from chaos.fleet import environment

TUNSETIFF = 0x400454CA
IFF_TUN, IFF_NO_PI = 0x0001, 0x1000
CLONE_NEWNET = 0x40000000
MTU = 9000
PACKETS_AT_ONCE = 64
ROUTER_HOST = "router"
NAMESPACES = Path("/run/netns")


def no_namespaces() -> str | None:
    """Why namespaces cannot be used here; None if they can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "network namespaces need the command `ip`"
    if not Path("/dev/net/tun").exists():
        return "network namespaces need /dev/net/tun"
    return None


@dataclass(frozen=True, slots=True)
class Place:
    """One host: its namespace, its device and its address."""

    name: str
    namespace: str
    device: str
    address: str


# --- the forwarder, a process of its own ---


@dataclass(frozen=True, slots=True)
class Weather:
    """What happens to packets from one host to another."""

    drop: bool = False
    loss: float = 0.0
    delay_ms: float = 0.0


class Forwarder:
    """Carries packets between the devices. The dice are thrown with a seed."""

    def __init__(self, devices: dict[str, int], addresses: dict[str, bytes], seed: int) -> None:
        self._devices = devices
        self._names = {address: name for name, address in addresses.items()}
        self._weather: dict[tuple[str, str], Weather] = {}
        self._rng = random.Random(f"packets {seed}")

    def start(self) -> None:
        loop = asyncio.get_running_loop()
        for name, device in self._devices.items():
            loop.add_reader(device, self._carry, name, device)

    def set(self, source: str, target: str, weather: Weather) -> None:
        self._weather[source, target] = weather

    def _carry(self, source: str, device: int) -> None:
        for _ in range(PACKETS_AT_ONCE):
            try:
                packet = os.read(device, 65_536)
            except BlockingIOError:
                return
            target = self._names.get(packet[16:20])
            if target is not None and packet[0] >> 4 == 4:
                self._pass(source, target, packet)

    def _pass(self, source: str, target: str, packet: bytes) -> None:
        weather = self._weather.get((source, target))
        if weather is None:
            self._write(target, packet)
        elif weather.drop or self._rng.random() < weather.loss:
            return
        elif weather.delay_ms:
            loop = asyncio.get_running_loop()
            loop.call_later(weather.delay_ms / 1e3, self._write, target, packet)
        else:
            self._write(target, packet)

    def _write(self, target: str, packet: bytes) -> None:
        with contextlib.suppress(BlockingIOError):  # a full queue drops, as on any host
            os.write(self._devices[target], packet)


async def forward(path: str, places: list[Place], seed: int) -> None:
    """Serve the harness until it hangs up."""
    forwarder = Forwarder(
        {place.name: open_tun(place) for place in places},
        {place.name: socket.inet_aton(place.address) for place in places},
        seed,
    )
    forwarder.start()
    reader, writer = await asyncio.open_unix_connection(path)
    writer.write(b"ready\n")
    async for line in reader:
        source, target, weather = json.loads(line)
        forwarder.set(source, target, Weather(**weather))
        writer.write(b"done\n")


def open_tun(place: Place) -> int:
    """Make a TUN device, move it to its namespace, and give it its address there; our end of it."""
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(
        device, TUNSETIFF, struct.pack("16sH22x", place.device.encode(), IFF_TUN | IFF_NO_PI)
    )
    ip("link", "set", place.device, "netns", place.namespace)
    within = ("-n", place.namespace)
    ip(*within, "link", "set", "lo", "up")
    ip(*within, "address", "add", f"{place.address}/24", "dev", place.device)
    ip(*within, "link", "set", place.device, "mtu", str(MTU), "up")
    return device


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


# --- the harness's side ---


class Network:
    """The harness's hold on the forwarder."""

    def __init__(self, places: dict[str, Place], seed: int, folder: Path) -> None:
        self.places = places
        self._seed = seed
        self._folder = folder
        self._process: asyncio.subprocess.Process | None = None
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def __aenter__(self) -> Self:
        """Before anything listens on an address of these hosts."""
        connected: asyncio.Future[tuple[asyncio.StreamReader, asyncio.StreamWriter]]
        connected = asyncio.get_running_loop().create_future()

        def joined(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            connected.set_result((reader, writer))

        path = str(self._folder / "network")
        server = await asyncio.start_unix_server(joined, path)
        places = [
            f"{place.name}={place.namespace}={place.device}={place.address}"
            for place in self.places.values()
        ]
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "chaos.network", path, str(self._seed), *places),
            env=environment(),
        )
        self._streams = await asyncio.wait_for(connected, 60)
        await self._streams[0].readline()
        server.close()
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._streams is not None:
            self._streams[1].close()
        if self._process is not None:
            await self._process.wait()

    async def set(self, source: str, target: str, **weather: Any) -> None:
        """What happens from now on to packets from `source` to `target`; nothing where nothing is said."""
        assert self._streams is not None
        reader, writer = self._streams
        writer.write(json.dumps([source, target, weather]).encode() + b"\n")
        await reader.readline()

    async def both_ways(self, one: str, other: str, **weather: Any) -> None:
        await self.set(one, other, **weather)
        await self.set(other, one, **weather)


@contextmanager
def namespaces(names: list[str]) -> Generator[dict[str, Place]]:
    """A namespace for each name, gone at the end. Needs what `missing` looks for."""
    prefix = f"chaos-{os.getpid()}"
    places = {
        name: Place(name, f"{prefix}-{i}", f"ch{os.getpid() % 100_000}-{i}", f"10.77.0.{i + 1}")
        for i, name in enumerate(names)
    }
    _remove_stale()
    try:
        for place in places.values():
            ip("netns", "add", place.namespace)
        yield places
    finally:
        for place in places.values():
            with contextlib.suppress(subprocess.CalledProcessError):
                ip("netns", "delete", place.namespace)


def _remove_stale() -> None:
    """Namespaces of a harness that was killed."""
    for path in NAMESPACES.glob("chaos-*-*"):
        owner = path.name.split("-")[1]
        if not Path("/proc", owner).exists():
            ip("netns", "delete", path.name)


@contextmanager
def inside(place: Place) -> Generator[None]:
    """This thread, and the processes that it starts, are on that host. Open connections stay where they are."""
    libc = ctypes.CDLL(None, use_errno=True)

    def enter(fd: int) -> None:
        if libc.setns(fd, CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns")

    with Path("/proc/thread-self/ns/net").open() as before:
        with (NAMESPACES / place.namespace).open() as there:
            enter(there.fileno())
        try:
            yield
        finally:
            enter(before.fileno())


def _main(path: str, seed: str, *places: str) -> None:
    asyncio.run(forward(path, [Place(*place.split("=")) for place in places], int(seed)))


if __name__ == "__main__":
    _main(*sys.argv[1:])
