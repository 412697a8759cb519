"""What machine this is, and whether it has what the other stages need.

    python -m bench.gpu.facts --out facts.json [--dry]

Exit status: 3, nothing can run without what is missing; 1, some tests cannot. The last line says what is missing.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import platform
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from bench.gpu.wheel import NotReadyError, read_manifest
from bench.helpers.report import commit, machine

MISSING = 3
# What nothing works without, and what some stages import. Plugins of pytest are named in pyproject.toml's options.
NEEDED = ("torch", "triton", "numpy", "headrace._core", "headrace_kernels")
FOR_TESTS = (
    *(
        "pytest",
        "pytest_asyncio",
        "pytest_timeout",
        "xdist",
        "hypothesis",
        "jsonschema",
        "openai",
        "psutil",
    ),
    *("transformers", "tokenizers", "safetensors", "msgpack", "gguf", "uvloop"),
)
QUERY = "name,driver_version,memory.total,clocks.max.sm,clocks.max.mem,power.limit"
BRING = "`make gpu-wheel` puts into dist/gpu what to bring; torch, triton, numpy and transformers are the machine's own"


def not_importable() -> list[str]:
    """Why each module of `NEEDED` that cannot be imported cannot."""
    found: list[str] = []
    for name in NEEDED:
        try:
            importlib.import_module(name)
        except Exception as error:
            found.append(f"{name}: {type(error).__name__}: {error}".splitlines()[0])
    return found


def commit_here() -> str:
    """Of the tree; where that has no git, of the tree that the wheel was built from."""
    try:
        return commit()
    except (OSError, subprocess.CalledProcessError):
        pass
    try:
        return f"{read_manifest()['commit']} (of the wheel)"
    except NotReadyError:
        return "unknown"


def of_the_gpu() -> dict[str, Any]:
    import torch

    properties: Any = torch.cuda.get_device_properties(0)
    found: dict[str, Any] = {
        "name": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "memory_bytes": properties.total_memory,
        "multiprocessors": properties.multi_processor_count,
        "l2_bytes": getattr(properties, "L2_cache_size", None),
        "cuda": torch.version.cuda,
    }
    tool = shutil.which("nvidia-smi")
    if tool is not None:
        command = [tool, f"--query-gpu={QUERY}", "--format=csv,noheader"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20)
            values = done.stdout.strip().split(", ")
            found["nvidia_smi"] = dict(zip(QUERY.split(","), values, strict=True))
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            print(f"nvidia-smi: {type(error).__name__}: {error}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--dry", action="store_true")
    args = parser.parse_args()
    missing = not_importable()
    if missing:
        print(f"cannot be imported: {'; '.join(missing)}. {BRING}")
        return MISSING
    import torch
    import triton

    if not args.dry and not torch.cuda.is_available():
        print(
            f"no GPU: torch {torch.__version__} finds none; DRY=1 runs everything small on the CPU"
        )
        return MISSING
    facts: dict[str, Any] = {
        "machine": machine(),
        "commit": commit_here(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": platform.python_version(),
        "gpu": None if args.dry else of_the_gpu(),
    }
    args.out.write_text(json.dumps(facts, indent=1) + "\n")
    gpu = facts["gpu"]
    print(
        gpu["name"] if gpu else "no GPU is used", facts["torch"], facts["triton"], facts["commit"]
    )
    lacking = [name for name in FOR_TESTS if importlib.util.find_spec(name) is None]
    if lacking:
        print(f"some tests cannot run without {', '.join(lacking)}. {BRING}")
    return 1 if lacking else 0


if __name__ == "__main__":
    sys.exit(main())
