"""What every result file says of where it came from: machine, commit, command."""

import json
import os
import platform
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def machine() -> dict[str, Any]:
    """Processor, cores and load of this machine, and how `headrace._core` was built."""
    from headrace._core import OPT_LEVEL  # here, as `make gpu` has to say where it is missing

    info = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    pairs = (line.partition(":") for line in info.splitlines())
    fields = {name.strip(): value.strip() for name, colon, value in pairs if colon}
    flags = fields.get("flags", "").split()
    simd = [
        name for name in ("avx2", "fma", "avx512f", "avx512_vnni", "avx512_bf16") if name in flags
    ]
    return {
        "processor": fields.get("model name", platform.processor()),
        "family_model": f"{fields.get('cpu family', '?')}/{fields.get('model', '?')}",
        "simd": simd,
        "cores": os.cpu_count(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "core": "release" if OPT_LEVEL == "3" else "dev",  # of Python; programs say their folder
        "load_average": [round(value, 2) for value in os.getloadavg()],
    }


def commit() -> str:
    """Short hash of the commit, with `+` where what is measured has changes.

    Results are left out: the file of one run must not mark the next run.
    """

    def git(*args: str) -> str:
        done = subprocess.run(["git", *args], cwd=ROOT, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    changed = git("status", "--porcelain", "--untracked-files=no", ":/", ":(exclude)bench/results")
    return git("rev-parse", "--short", "HEAD") + ("+" if changed else "")


def rounded(value: Any) -> Any:
    """The value with its numbers cut to what they can mean, six digits."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {name: rounded(part) for name, part in value.items()}
    return [rounded(part) for part in value] if isinstance(value, list) else value


def origin() -> dict[str, Any]:
    """Machine, commit and command."""
    # The command as a reader would repeat it: from the root of the repository.
    module = Path(sys.argv[0]).resolve().relative_to(ROOT).with_suffix("")
    name = ".".join(module.parts).removesuffix(".__main__")
    command = shlex.join(["python", "-m", name, *sys.argv[1:]])
    return {"machine": machine(), "commit": commit(), "command": command}


def write(path: Path | None, figures: dict[str, Any]) -> None:
    """Print the figures with their origin, and keep them in `path`."""
    text = json.dumps({**origin(), **figures}, indent=2)
    print(text)
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
