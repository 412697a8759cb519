"""systemd takes the units, and they name files, sockets and flags that fit the programs."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from helpers.command_line import STOP, refused
from helpers.require import needs

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "deploy/systemd"
UNITS = sorted(FOLDER.glob("headrace-*"))
PROGRAMS = {"headrace-router.service": "router", "headrace-worker@.service": "worker"}
HARDENED_BELOW = 3.0  # of 10: systemd calls this OK
has_systemd = needs(
    "systemd", "there is no systemd-analyze", here=shutil.which("systemd-analyze") is not None
)


def settings(unit: Path) -> list[tuple[str, str]]:
    """Its lines as name and value, those that end with a backslash joined to the next."""
    text = unit.read_text().replace("\\\n", " ")
    return [
        (name, value)
        for name, mark, value in (line.partition("=") for line in text.splitlines())
        if mark and not name.startswith("#")
    ]


def values(unit: Path, name: str) -> list[str]:
    return [value for key, value in settings(unit) if key == name]


@has_systemd
def test_systemd_takes_the_units(tmp_path: Path) -> None:
    copies: list[Path] = []
    for unit in UNITS:
        copy = tmp_path / unit.name.replace("@.", "@0.")
        # systemd looks for the program, which is not installed here
        copy.write_text(
            re.sub(r"^ExecStart=\S+", "ExecStart=/bin/true", unit.read_text(), flags=re.MULTILINE)
        )
        copies.append(copy)
    done = subprocess.run(["systemd-analyze", "verify", *copies], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    copies[0].write_text(copies[0].read_text() + "NoSuchSetting=1\n")
    done = subprocess.run(["systemd-analyze", "verify", *copies], capture_output=True, text=True)
    assert "NoSuchSetting" in done.stderr


@has_systemd
@pytest.mark.parametrize("name", PROGRAMS)
def test_services_have_little_that_they_could_harm(name: str) -> None:
    command = ["systemd-analyze", "security", "--offline=yes", FOLDER / name]
    done = subprocess.run(command, capture_output=True, text=True)
    found = re.search(r"Overall exposure level for \S+: ([\d.]+)", done.stdout)
    assert found is not None, done.stdout + done.stderr
    assert float(found[1]) < HARDENED_BELOW


def test_a_restart_of_the_router_closes_no_socket() -> None:
    """systemd hands a restart of a service on to whatever is `PartOf` it, and to what is bound to it."""
    for unit in UNITS:
        if unit.suffix == ".socket":
            assert not values(unit, "PartOf") + values(unit, "BindsTo"), unit.name


def test_sockets_have_the_names_by_which_the_router_knows_them() -> None:
    sockets = [unit for unit in UNITS if unit.suffix == ".socket"]
    names = [values(unit, "FileDescriptorName") for unit in sockets]
    assert sorted(names) == [["admin"], ["http"], ["workers"]]
    service = FOLDER / "headrace-router.service"
    (listed,) = values(service, "Sockets")
    assert set(listed.split()) == {unit.name for unit in sockets}
    (admin,) = [unit for unit in sockets if values(unit, "FileDescriptorName") == ["admin"]]
    assert values(admin, "SocketMode") == ["0600"]


@pytest.mark.parametrize(("name", "program"), PROGRAMS.items())
def test_the_commands_have_flags_that_the_programs_take(
    name: str, program: str, tmp_path: Path
) -> None:
    (command,) = values(FOLDER / name, "ExecStart")
    words = shlex.split(command)[1:]
    words = [word for word in words if word != program and not word.endswith("_FLAGS")]
    words = ["model" if word == "$HEADRACE_MODEL" else word for word in words]
    credentials = {value.partition(":")[0] for value in values(FOLDER / name, "LoadCredential")}
    for word in words:
        if "%d/" in word:
            assert word.rpartition("/")[2] in credentials
    (tmp_path / "workers").write_text("a secret of some length")
    words = [word.replace("%d", str(tmp_path)) for word in words]
    assert refused(program, *words) == [STOP]


def test_a_service_is_given_the_time_for_its_drain() -> None:
    unit = FOLDER / "headrace-router.service"
    (command,) = values(unit, "ExecStart")
    drain = re.search(r"--drain-timeout-ms=(\d+)", command)
    (stop_s,) = values(unit, "TimeoutStopSec")
    assert drain is not None
    assert (
        int(stop_s) > int(drain[1]) / 1e3 + 1 + 8
    )  # last requests; the end of the process by itself
    for unit in UNITS:
        if unit.suffix == ".service":
            assert values(unit, "Type") == ["notify"]
            assert int(values(unit, "WatchdogSec")[0]) >= 10
