"""A folder that nobody else may enter, that needs no room, and that the next start removes if its owner is dead."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from headrace.cli.private_folder import PREFIX, parents, private_folder, remove_dead
from headrace.settings.values import SettingsError

OWNER = """
import pathlib, socket, sys
from headrace.cli.private_folder import private_folder
with private_folder([pathlib.Path(sys.argv[1])]) as folder:
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(str(folder / "router.sock"))
    print(folder, flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Short enough for a socket's path."""
    return tmp_path_factory.mktemp("p")


def owner(place: Path) -> tuple[subprocess.Popen[str], Path]:
    process = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(place)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
    )
    assert process.stdout is not None
    return process, Path(process.stdout.readline().rstrip("\n"))


def test_it_is_ours_alone_and_goes_with_us(place: Path) -> None:
    with private_folder([place]) as folder:
        assert folder.parent == place
        assert folder.stat().st_mode & 0o777 == 0o700
        assert list(folder.iterdir()) == []
        (folder / "router.sock").touch()
    assert list(place.iterdir()) == []


def test_the_next_start_removes_those_of_the_dead_and_of_nobody_else(place: Path) -> None:
    dead, left = owner(place)
    dead.send_signal(signal.SIGKILL)
    dead.communicate(timeout=60)
    alive, kept = owner(place)  # and its start removed the other one
    try:
        assert not left.exists()
        with private_folder([place]) as folder:
            assert kept.exists()
            assert (kept / "router.sock").exists()
            assert {kept, folder} == set(place.iterdir())
    finally:
        alive.communicate("", timeout=60)
    assert list(place.iterdir()) == []


def test_what_is_not_certainly_a_dead_folder_of_ours_stays(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = place / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    (elsewhere / "precious").touch()
    (place / f"{PREFIX}link").symlink_to(elsewhere)
    (place / f"{PREFIX}file").touch()
    open_to_all = place / f"{PREFIX}open"
    open_to_all.mkdir()
    open_to_all.chmod(0o777)
    with_folders = place / f"{PREFIX}nested"
    (with_folders / "inner").mkdir(parents=True)
    with_folders.chmod(0o700)
    (place / "other-tool").mkdir(mode=0o700)
    before = set(place.rglob("*"))
    assert remove_dead(place) == []
    assert set(place.rglob("*")) == before
    strange = place / f"{PREFIX}strange"
    strange.mkdir(mode=0o700)
    with monkeypatch.context() as other_user:
        other_user.setattr(os, "geteuid", lambda: os.getuid() + 1)
        assert remove_dead(place) == []
    assert remove_dead(place) == [strange]


def test_a_place_that_takes_nothing_is_passed_over(place: Path) -> None:
    missing, full, long = place / "missing", Path("/proc"), place / ("x" * 90)
    long.mkdir()
    with private_folder([missing, full, long, place]) as folder:
        assert folder.parent == place


def test_without_any_place_each_is_named_with_its_reason(place: Path) -> None:
    missing = place / "missing"
    why = f"{missing} .*No such file.*; make room"
    with pytest.raises(SettingsError, match=why), private_folder([missing]):
        pass


def test_a_start_that_takes_our_folder_for_a_dead_one_does_no_harm(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between its making and its lock, the folder looks like one of the dead."""
    import tempfile

    mkdtemp = tempfile.mkdtemp

    def made_and_cleaned(**where: Any) -> str:
        name = mkdtemp(**where)
        remove_dead(place)
        return name

    monkeypatch.setattr(tempfile, "mkdtemp", made_and_cleaned)
    other = place / "other"
    other.mkdir()
    with pytest.raises(SettingsError), private_folder([place]):
        pass
    with private_folder([place, other]) as folder:
        assert folder.parent == other


def test_memory_is_among_the_places(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", "/some/where")
    assert parents()[0] == Path("/some/where")
    assert Path("/dev/shm") in parents()
