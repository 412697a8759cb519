"""How ranks meet in shared memory, and that nothing of it is left."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace import _core
from headrace_kernels.moe.transport import RankLost
from headrace_kernels.transport.shared_memory import SharedMemory
from helpers.ranks.processes import Ended, Place, RankProcesses, end, rank_processes
from helpers.require import missing


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankProcesses]:
    with rank_processes() as processes:
        yield processes


def meeting(place: Place, own: dict[int, dict[str, Any]]) -> str:
    """Joins with what `own` says of this rank."""
    sizes: dict[str, Any] = {"rank": place.rank, "ranks": place.ranks} | own.get(place.rank, {})
    SharedMemory.join(place.memory, **sizes).close()
    return "met"


@pytest.mark.parametrize(
    ("own", "text"),
    [
        ({1: {"ranks": 3}}, "ranks were started with different sizes"),
        ({1: {"slice_bytes": 4096}}, "ranks were started with different sizes"),
        ({1: {"rank": 2, "ranks": 2}}, "rank 2 of 2"),
        ({0: {"slice_bytes": 5000}, 1: {"slice_bytes": 5000}}, "slices of 5000 bytes"),
    ],
)
def test_ranks_that_do_not_fit_are_told(
    ranks: RankProcesses, own: dict[int, dict[str, Any]], text: str
) -> None:
    first, second = ranks.run(meeting, 2, own)
    assert second.kind == "ValueError" and text in second.text
    assert first.kind in ("RankLost", "ValueError")


def test_a_number_that_two_ranks_have_is_told(ranks: RankProcesses) -> None:
    answers = ranks.run(meeting, 3, {2: {"rank": 1}})
    assert any("has a rank 1 already" in answer.text for answer in answers)
    assert answers[0].kind == "RankLost" and answers[0].rank in (1, 2)


def test_a_rank_that_never_comes_is_named(tmp_path: Path) -> None:
    with pytest.raises(RankLost, match=r"rank 1 is lost: the first meeting, 0\.2 s"):
        SharedMemory.join(tmp_path / "memory", rank=0, ranks=2, meeting_s=0.2)
    assert not list(tmp_path.iterdir())


def test_the_first_rank_is_named_where_it_never_comes(tmp_path: Path) -> None:
    with pytest.raises(RankLost, match="rank 0 is lost"):
        SharedMemory.join(tmp_path / "memory", rank=1, ranks=2, meeting_s=0.1)


def test_memory_of_another_group_is_left_alone(tmp_path: Path) -> None:
    other = tmp_path / "memory"
    other.write_bytes(b"theirs")
    with pytest.raises(FileExistsError):
        SharedMemory.join(other, rank=0, ranks=1)
    assert other.read_bytes() == b"theirs"


def test_memory_without_room_says_what_to_do() -> None:
    shm = Path("/dev/shm")
    room = os.statvfs(shm)
    slice_bytes = 1 << 26
    if room.f_bavail * room.f_frsize >= _core.SharedParcels.memory_bytes(64, slice_bytes):
        missing("small-shm", "/dev/shm has room for the largest group")
    path = shm / f"headrace-test-{os.getpid()}-large"
    with pytest.raises(OSError, match="give /dev/shm more"):
        SharedMemory.join(path, rank=0, ranks=64, slice_bytes=slice_bytes)
    assert not path.exists()


def dying(place: Place, culprit: int) -> str:
    """A rank dies before it comes."""
    if place.rank == culprit:
        end()
    return meeting(place, {rank: {"meeting_s": 1.0} for rank in range(3)})


@pytest.mark.parametrize("culprit", [0, 1])
def test_a_rank_that_dies_while_the_group_meets_leaves_nothing(
    ranks: RankProcesses, culprit: int
) -> None:
    answers = ranks.run(dying, 3, culprit)  # looks into /dev/shm afterwards
    assert isinstance(answers[culprit], Ended)
    assert all(answer.kind == "RankLost" for i, answer in enumerate(answers) if i != culprit)


def test_the_bytes_of_a_group_are_as_stated() -> None:
    slices = _core.SharedParcels.memory_bytes(4, 1 << 18) - 4 * 4 * 2 * (1 << 18)
    assert 0 < slices <= 1 << 14


@pytest.mark.parametrize(
    "memory", [bytes(1 << 20), bytearray(100), memoryview(bytearray(1 << 20))[::2]]
)
def test_memory_that_is_none_of_a_group_is_refused(memory: Any) -> None:
    with pytest.raises(ValueError, match="memory"):
        _core.SharedParcels(memory, rank=0, ranks=2, slice_bytes=4096, timeout_ms=1)


def test_columns_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "memory"
    alone = SharedMemory.join(path, rank=0, ranks=1)._parcels
    alone.begin(1)
    rows = torch.zeros(4, 4).numpy().view("uint8")
    for columns, widths in (([rows], [15]), ([rows, rows], [16, 8]), ([rows], [0]), ([], [])):
        with pytest.raises(ValueError, match="column"):
            alone.post(columns, widths, [(0, 1)])
    alone.post([rows], [16], [(0, 3)])
    with pytest.raises(RuntimeError, match="the exchange before is not over"):
        alone.post([rows], [16], [(0, 3)])
    assert alone.arrived() == [3]
    with pytest.raises(ValueError, match="of as many rows as come"):
        alone.take([rows], [16])
    rows.flags.writeable = False
    with pytest.raises(ValueError, match="can only be read"):
        alone.take([rows], [16])
