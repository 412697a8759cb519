"""What every result file says of where it came from."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def origin(command: str) -> dict[str, str]:
    """Machine, commit and the command that makes the file again."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True
    )
    return {
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, {platform.system()} {platform.release()}",
        "commit": commit.stdout.strip(),
        "command": command,
    }
