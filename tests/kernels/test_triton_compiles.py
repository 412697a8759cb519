"""Every Triton kernel compiles once for an H200 and fits into its shared memory, known without having one."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

SHARED_BYTES = 227 * 1024  # that a block of compute capability 9.0 can have


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_kernels_compile_for_an_h200_at_the_sizes_of_deepseek_r1(tmp_path: Path) -> None:
    script = Path(__file__).parents[1] / "helpers" / "compile_kernels.py"
    environment = {name: x for name, x in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(script)],
        env=environment
        | {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["missing"] == []
    assert found["again"] == []
    assert {name: n for name, n in found["shared"].items() if n > SHARED_BYTES} == {}
