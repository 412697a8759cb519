"""Readers go ahead of the loader: together, in order, and no further than they may."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from headrace.models.load.checkpoint import CheckpointError, SafetensorsCheckpoint
from headrace.models.load.read_ahead import Piece, Place, ReadAhead, pieces
from helpers.models.tiny_deepseek import save_tensors, tiny_config, tiny_tensors
from helpers.models.tiny_model import write_json_files

A, B = Path("a"), Path("b")
TIMEOUT_S = 30.0


def test_neighbours_are_read_together_and_large_tensors_in_parts() -> None:
    places = [Place(A, 8, 3), Place(A, 11, 4), Place(A, 16, 1), Place(B, 17, 1), Place(B, 18, 25)]
    assert list(pieces(places, 10)) == [
        Piece(Place(A, 8, 7), 0),
        Piece(Place(A, 16, 1), 7),
        Piece(Place(B, 17, 1), 8),
        Piece(Place(B, 18, 10), 9),
        Piece(Place(B, 28, 10), 19),
        Piece(Place(B, 38, 5), 29),
    ]


def test_readers_work_at_the_same_time() -> None:
    together = threading.Barrier(3, timeout=TIMEOUT_S)  # two readers and this test
    places = [Place(A, 0, 5), Place(B, 0, 5)]

    def wait(_: Place) -> None:
        together.wait()

    with ReadAhead(places, readers=2, ahead_bytes=10, read=wait):
        together.wait()
    assert not together.broken


def test_readers_stay_so_many_bytes_ahead() -> None:
    seen = threading.Semaphore(0)
    read: list[Place] = []

    def note(place: Place) -> None:
        read.append(place)
        seen.release()

    places = [Place(A, 10 * i, 8) for i in range(6)]
    with ReadAhead(places, readers=1, ahead_bytes=16, read=note) as lookahead:
        for _ in range(2):
            assert seen.acquire(timeout=TIMEOUT_S)
        for place in places[:4]:  # with each that the loader takes there is room for one more
            lookahead.consumed(place.nbytes)
            assert seen.acquire(timeout=TIMEOUT_S)
            assert read == places[: len(read)]
            assert sum(place.nbytes for place in read) <= 16 + 8 * (places.index(place) + 1)
    assert read == places


def test_a_loader_that_ends_early_leaves_no_reader() -> None:
    before = threading.active_count()
    with ReadAhead([Place(A, 0, 5)] * 9, readers=3, ahead_bytes=5, read=lambda _: None):
        pass
    assert threading.active_count() == before


def test_a_file_that_cannot_be_read_fails_the_load(tmp_path: Path) -> None:
    gone = Place(tmp_path / "gone", 0, 5)
    failed = threading.Event()

    def fail(place: Place) -> None:
        failed.set()
        raise OSError(f"{place.path}: input/output error")

    def load(lookahead: ReadAhead) -> None:
        assert failed.wait(TIMEOUT_S)
        while True:  # until the reader has said so
            lookahead.consumed(0)

    with (
        ReadAhead([gone] * 2, readers=1, ahead_bytes=5, read=fail) as lookahead,
        pytest.raises(OSError, match="gone: input/output error"),
    ):
        load(lookahead)


def test_a_checkpoint_is_read_in_the_order_of_its_loader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_json_files(tmp_path, tiny_config())
    save_tensors(tmp_path, tiny_tensors(tiny_config()), files=3)
    checkpoint = SafetensorsCheckpoint(tmp_path)
    names = sorted(checkpoint.names())
    asked: list[Place] = []

    class Noted(ReadAhead):
        def __init__(self, places: list[Place], **bounds: int) -> None:
            asked.extend(places)
            assert bounds["readers"] >= 1
            super().__init__(places, **bounds)  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr("headrace.models.load.checkpoint.ReadAhead", Noted)
    with checkpoint.read_ahead(names, least_bytes=0):
        for name in names:
            checkpoint.tensor(name)
            checkpoint.tensor(name)  # a part of it again: the readers are no further for that
    assert asked == [checkpoint.place(name) for name in names]
    asked.clear()
    with checkpoint.read_ahead(names, least_bytes=checkpoint.nbytes + 1):
        assert not asked
    with (
        pytest.raises(CheckpointError, match="cannot be read: gone"),
        checkpoint.read_ahead([], least_bytes=0),
    ):
        raise OSError("gone")
