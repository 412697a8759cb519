"""A worker on a CPU without torch: what its environment takes, when it answers first, how much memory it has.

    python -m bench.serving.cpu_worker --wheel dist/*.whl --out bench/results/cpu_worker.json

The wheel goes into a new environment with the extra `cpu`, from the packages that pip has. There `headrace serve` with
the default model, fetched and converted before, answers a request of 16 tokens. The first start packs the weights, the
others find them packed: of these the fastest counts, as other work on the machine only ever adds.

Memory is that of `/proc/PID/smaps`, once workers have answered: `rss_mib` without the KV cache, `kv_mib` what of it was
touched, `private_mib` what is shared with nobody, `pss_mib` with each page divided among the processes that map it.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.helpers.report import write

STARTS = 3  # with packed weights
KV_MEMORY = "1GiB"
PACKED = "packed-*"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--wheel", type=Path, required=True)
    parser.add_argument(
        "--workers", type=int, default=2, help="of the runs in which memory is shared"
    )
    parser.add_argument("--out", type=Path, required=True)
    flags = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="headrace-cpu-") as name:
        write(flags.out, measure(Path(name), flags.wheel.absolute(), flags.workers))


def measure(folder: Path, wheel: Path, workers: int) -> dict[str, Any]:
    environment = folder / "env"
    began = time.monotonic()
    subprocess.run([sys.executable, "-m", "venv", environment], check=True)
    made_s = time.monotonic() - began
    pip = [environment / "bin/python", "-m", "pip", "--disable-pip-version-check", "--quiet"]
    subprocess.run([*pip, "install", f"{wheel}[cpu]"], check=True, cwd=folder)
    installed_s = time.monotonic() - began - made_s
    own = folder / "cache"
    copy_model(own)
    first = start(environment, own, 1)
    nbytes = sum(path.lstat().st_size for path in environment.rglob("*"))
    warm = min((start(environment, own, 1) for _ in range(STARTS)), key=lambda one: one["ready_s"])
    shared = start(environment, own, workers)
    return {
        "environment_mb": nbytes / 1e6,
        "venv_s": made_s,
        "install_s": installed_s,
        "install_to_first_answer_s": installed_s + first["first_answer_s"],
        "first_start": first,
        "packed_start": warm,
        f"{workers}_workers": shared,
        "torch": (environment / "lib").exists() and any(environment.rglob("torch/__init__.py")),
    }


def copy_model(root: Path) -> None:
    """The default model, as it was fetched and converted before; without packed weights."""
    from headrace.models.load.cache import cache_root
    from headrace.models.load.default_model import ensure_default_model

    ensure_default_model()
    models = cache_root() / "models"
    shutil.copytree(models, root / "models", ignore=shutil.ignore_patterns(PACKED, ".*"))


def start(environment: Path, cache: Path, workers: int) -> dict[str, Any]:
    """`headrace serve` from its start to its first answer, and what its workers then have in memory."""
    began = time.monotonic()
    served = subprocess.Popen(
        [
            *(environment / "bin/headrace", "serve", "--port", "0", "--kv-memory", KV_MEMORY),
            *("--workers", str(workers)),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=cache,
        env=os.environ | {"HEADRACE_CACHE": str(cache)},
    )
    assert served.stdout is not None
    try:
        for line in served.stdout:
            if found := re.search(r"Headrace is ready after .* s: http://(\S+)", line):
                break
        else:
            raise RuntimeError("it ended before it was ready")
        ready_s = time.monotonic() - began
        answer(found[1])
        first_answer_s = time.monotonic() - began
        for _ in range(2 * workers):
            answer(found[1])  # so that every worker has answered
        return {
            "ready_s": ready_s,
            "first_answer_s": first_answer_s,
            "workers": [memory(pid) for pid in workers_of(served.pid)],
        }
    finally:
        served.terminate()
        served.communicate(timeout=60)


def answer(address: str) -> None:
    connection = http.client.HTTPConnection(address, timeout=60)
    body = {
        "model": "SmolLM2-135M-Instruct",
        "prompt": "Water flows",
        "max_tokens": 16,
        "temperature": 0,
    }
    connection.request(
        "POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"}
    )
    reply = connection.getresponse()
    if reply.status != 200:
        raise RuntimeError(f"status {reply.status}: {reply.read()!r}")
    reply.read()
    connection.close()


def workers_of(pid: int) -> list[int]:
    """The workers below a `headrace serve`."""
    found: list[int] = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            arguments = (process / "cmdline").read_bytes().split(b"\0")
            parent = int((process / "stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError, IndexError):
            continue  # it has ended meanwhile
        if parent == pid and b"worker" in arguments:
            found.append(int(process.name))
    return found


def memory(pid: int) -> dict[str, float]:
    """MiB, with the KV cache apart."""
    sums = dict.fromkeys(("Rss", "Pss", "Private_Clean", "Private_Dirty"), 0)
    kv, of_kv = 0, False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        name, _, rest = line.partition(":")
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            of_kv = "memfd:headrace-kv" in line
        elif name in sums:
            kib = int(rest.split()[0])
            if of_kv:
                kv += kib if name == "Rss" else 0
            else:
                sums[name] += kib
    return {
        "rss_mib": sums["Rss"] / 1024,
        "pss_mib": sums["Pss"] / 1024,
        "private_mib": (sums["Private_Clean"] + sums["Private_Dirty"]) / 1024,
        "kv_mib": kv / 1024,
    }


if __name__ == "__main__":
    main()
