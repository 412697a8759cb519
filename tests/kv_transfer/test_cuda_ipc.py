"""What of CUDA IPC can be tested without a GPU: who offers and takes it, and that what is mapped is copied rightly.

Handles here stand for storages of this process; making and opening real ones needs a GPU.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from headrace.kv_transfer.backends import cuda_ipc
from headrace.kv_transfer.backends.base import LinkBroken
from headrace.kv_transfer.backends.cuda_ipc import CudaIpcExporter, Handle
from headrace.kv_transfer.backends.endpoints import able_backends, exporters_for
from headrace.kv_transfer.backends.nixl import find_nixl
from headrace.kv_transfer.peers.client import TransferClient
from headrace.kv_transfer.peers.server import TransferServer
from headrace_kernels.ops import KvPool
from helpers.kv.peers import LAYOUT, MEMBERS, QUICK
from helpers.kv.pools import FakeSource, block_of, make_pool
from helpers.kv.pull_keys import PULL_KEY, bound
from helpers.require import missing, needs


def device_pool(seed: int | None = None) -> KvPool:
    """Says that it lies on a device."""
    return dataclasses.replace(make_pool("tensor", seed=seed), device="cuda")


@pytest.fixture
def storages(monkeypatch: pytest.MonkeyPatch) -> dict[bytes, torch.UntypedStorage]:
    """Shared by name instead of by CUDA."""
    shared: dict[bytes, torch.UntypedStorage] = {}

    def share(storage: torch.UntypedStorage) -> Handle:
        name = str(len(shared)).encode()
        shared[name] = storage
        return Handle(name, storage.nbytes(), 0, b"", 0, b"", True)

    def open_shared(handle: Handle, device: int) -> Any:
        assert device == 3
        return shared[handle.handle]

    def device_number(uuid: str) -> int:
        if uuid != "GPU-1":
            raise RuntimeError(f"device {uuid} is not visible here")
        return 3

    monkeypatch.setattr(cuda_ipc, "share", share)
    monkeypatch.setattr(cuda_ipc, "open_shared", open_shared)
    monkeypatch.setattr(cuda_ipc, "device_uuid", lambda _: "GPU-1")
    monkeypatch.setattr(cuda_ipc, "device_number", device_number)
    return shared


async def pull_between(theirs: KvPool, ours: KvPool) -> str:
    """The back-end that two whole ends agreed on, after its bytes were compared."""
    server = TransferServer(theirs, LAYOUT, members=MEMBERS, limits=QUICK)
    client = TransferClient(ours, LAYOUT, members=MEMBERS, limits=QUICK)
    await server.start()
    source = FakeSource(blocks=(3, 4, 5, 11, 0))
    ticket = server.offer(source, PULL_KEY, source.on_released)
    wanted = [(0, 9), (1, 10), (4, 2)]
    pulled = await client.pull(server.endpoints, bound(ticket), wanted, timeout_s=5)
    await client.close()
    await server.close()
    for place, block in wanted:
        assert block_of(ours, block) == block_of(theirs, source.blocks[place])
    return pulled.backend


async def test_device_pools_of_one_host_are_copied_from_device_to_device(
    storages: dict[bytes, torch.UntypedStorage],
) -> None:
    ours = device_pool()
    assert await pull_between(device_pool(seed=1), ours) == "cuda-ipc"
    assert len(storages) == 1  # all regions lie in one
    assert block_of(ours, 1) == bytes(ours.block_bytes)


async def test_a_device_that_the_client_does_not_see_leaves_the_network(
    storages: dict[bytes, torch.UntypedStorage], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_ipc, "device_uuid", lambda _: "GPU-2")
    assert await pull_between(device_pool(seed=1), device_pool()) == "tcp"


@pytest.mark.usefixtures("storages")
async def test_host_and_device_meet_on_tcp() -> None:
    """The layout is the same; where it lies is each one's own business."""
    assert await pull_between(device_pool(seed=1), make_pool("layer-major")) == "tcp"
    assert await pull_between(make_pool("layer-major", seed=1), device_pool()) == "tcp"


def test_what_is_offered_fits_the_memory() -> None:
    on_device = exporters_for(device_pool(), ["cuda-ipc", "tcp"])
    assert [exporter.name for exporter in on_device.local] == ["cuda-ipc"]
    assert "shm" not in able_backends(device_pool(), None)
    assert "cuda-ipc" not in able_backends(make_pool(), None)
    with pytest.raises(ValueError, match="only a pool in device memory"):
        exporters_for(make_pool(), ["cuda-ipc"])
    with pytest.raises(ValueError, match="only a pool in a memfd"):
        exporters_for(make_pool("tensor"), ["shm"])


def test_nixl_that_cannot_register_the_memory_leaves_tcp_and_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Such as its UCX without CUDA: here it is asked to take memory that lies on no device."""
    if find_nixl() is None:
        missing("nixl", "NIXL is not installed")
    offered = exporters_for(device_pool(), None)
    assert [exporter.name for exporter in offered.remote] == ["tcp"]
    assert "only TCP is offered to other hosts: NIXL cannot register VRAM" in caplog.text
    with pytest.raises(ValueError, match="NIXL cannot register VRAM memory"):
        exporters_for(device_pool(), ["nixl"])


@pytest.mark.usefixtures("storages")
def test_a_description_that_cannot_be_is_not_mapped() -> None:
    about, _ = CudaIpcExporter(device_pool()).describe()
    too_large = cuda_ipc.SCHEMA.decode(about)
    too_large = cuda_ipc.SCHEMA.encode(dataclasses.replace(too_large, num_blocks=1 << 20))
    for text in (b"", b"\x91\x01", too_large):
        with pytest.raises(LinkBroken):
            cuda_ipc.CudaIpcMover(device_pool(), text, None)  # pyright: ignore[reportArgumentType]


@needs("cuda", "there is no GPU", here=torch.cuda.is_available())
def test_torch_still_shares_storages_as_we_expect() -> None:
    handle = cuda_ipc.share(torch.zeros(8, dtype=torch.uint8, device="cuda").untyped_storage())
    assert isinstance(handle.handle, bytes)
