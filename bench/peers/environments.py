"""Other routers, each in an environment of its own under `target/peers`: nothing of theirs comes into .venv."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from bench.helpers.report import ROOT

PEERS = ROOT / "target/peers"
LAST_LINES = 3


class NotInstalledError(Exception):
    """An environment cannot be had here; the message says why."""


@dataclass(frozen=True, kw_only=True)
class Packages:
    """What pip installs into a virtual environment."""

    name: str
    packages: list[str]
    # Without what they say that they need, a part of which cannot be had; what is needed in earnest is in `packages`.
    alone: list[str] = field(default_factory=list)
    check: str  # an import that has to work
    versions: list[str]  # distributions whose versions are reported


SGLANG = Packages(
    name="sglang",
    packages=["sglang-router==0.3.2"],
    check="sglang_router.launch_router",
    versions=["sglang-router"],
)
VLLM = Packages(
    name="vllm",
    packages=["vllm-router==0.1.17"],
    check="vllm_router.launch_router",
    versions=["vllm-router"],
)
# ai-dynamo wants `aisimulate`, whose file fetches another from its vendor while it installs, for a model of step times
# that is not used here.
DYNAMO = Packages(
    name="dynamo",
    packages=["msgspec", "packaging", "pydantic", "pyyaml", "uvloop"],
    alone=["ai-dynamo==1.6.1", "ai-dynamo-runtime==1.6.1"],
    check="dynamo.frontend",
    versions=["ai-dynamo", "ai-dynamo-runtime"],
)


def run(command: list[str | Path], what: str) -> str:
    """Standard output. Raises NotInstalledError with the end of what a command said."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise NotInstalledError(f"{what}: {error}") from error
    if done.returncode != 0:
        lines = (done.stderr or done.stdout).strip().splitlines()[-LAST_LINES:]
        raise NotInstalledError(f"{what}: {' '.join(lines)}")
    return done.stdout


def python(wanted: Packages) -> tuple[Path, dict[str, str]]:
    """The interpreter of an environment, made on the first call, and the versions in it."""
    folder = PEERS / wanted.name
    interpreter = folder / "bin/python"
    if not interpreter.exists():
        run([sys.executable, "-m", "venv", folder], f"an environment for {wanted.name}")
    pip: list[str | Path] = [
        interpreter,
        "-m",
        "pip",
        "--disable-pip-version-check",
        "install",
        "--quiet",
    ]
    check: list[str | Path] = [interpreter, "-c", f"import {wanted.check}"]
    try:
        run(check, "")
    except NotInstalledError:
        run([*pip, *wanted.packages], f"pip install {' '.join(wanted.packages)}")
        if wanted.alone:
            run([*pip, "--no-deps", *wanted.alone], f"pip install {' '.join(wanted.alone)}")
        run(check, f"import {wanted.check}")
    ask = "import importlib.metadata as m, json, sys; print(json.dumps({n: m.version(n) for n in sys.argv[1:]}))"
    versions: dict[str, str] = json.loads(
        run([interpreter, "-c", ask, *wanted.versions], "versions")
    )
    return interpreter, versions


def nginx() -> tuple[Path, dict[str, str]]:
    """nginx of this machine, or of Debian's package, unpacked without being installed."""
    found = shutil.which("nginx")
    unpacked = PEERS / "nginx/root/usr/sbin/nginx"
    program = Path(found) if found else unpacked
    if not program.exists():
        folder = PEERS / "nginx"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        run(
            ["sh", "-c", f"cd '{folder}' && apt-get download --quiet nginx"],
            "apt-get download nginx",
        )
        for package in folder.glob("nginx_*.deb"):
            run(["dpkg-deb", "-x", package, folder / "root"], "dpkg-deb -x nginx")
        if not program.exists():
            raise NotInstalledError("Debian's package nginx has no usr/sbin/nginx")
    done = subprocess.run([program, "-v"], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise NotInstalledError(f"{program.name} -v: {done.stderr.strip()}")
    return program, {"nginx": done.stderr.strip().rpartition("/")[2]}


Environment = tuple[Path, dict[str, str]]
ENVIRONMENTS: dict[str, Callable[[], Environment]] = {
    "nginx": nginx,
    "sglang": lambda: python(SGLANG),
    "vllm": lambda: python(VLLM),
    "dynamo": lambda: python(DYNAMO),
}
