"""The targets of `fuzz/`: built with counters of branches, and run by libFuzzer from the committed corpus."""

from __future__ import annotations

import os
import re
import subprocess
import tomllib
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
CRATE = ROOT / "fuzz"
CORPUS = CRATE / "corpus"
GOLDEN_FRAMES = ROOT / "tests" / "golden" / "frames"
BUILT = ROOT / "target" / "fuzz"
# What cargo-fuzz sets, without a sanitizer, so that a stable compiler does: Rust's own checks and the bounds below find
# the faults.
COVERAGE = (
    "-Cpasses=sancov-module",
    *(
        f"-Cllvm-args=-sanitizer-coverage-{option}"
        for option in ("level=4", "inline-8bit-counters", "pc-table", "trace-compares")
    ),
    *("--cfg", "fuzzing"),
)
INPUT_BYTES, INPUT_S, RSS_MB = 16 << 10, 20, 2048


@dataclass(frozen=True, slots=True)
class Ran:
    """What libFuzzer said of one target."""

    name: str
    inputs: int
    branches: int
    problem: str | None


def names() -> list[str]:
    manifest = tomllib.loads((CRATE / "Cargo.toml").read_text())
    return [target["name"] for target in manifest["bin"]]


def build(targets: list[str]) -> Path:
    """The folder with the programs. Raises CalledProcessError."""
    version = subprocess.run(["rustc", "-vV"], check=True, capture_output=True, text=True).stdout
    host = re.findall(r"^host: (\S+)$", version, re.MULTILINE)[0]
    flags = os.environ.get("RUSTFLAGS", "").split()
    env = os.environ | {"RUSTFLAGS": " ".join([*flags, *COVERAGE])}
    command = ["cargo", "build", "--release", "--locked", "--manifest-path", CRATE / "Cargo.toml"]
    # with a target of its own, so that build scripts and macros are not instrumented
    command += ["--target", host, "--target-dir", BUILT]
    for name in targets:
        command += ["--bin", name]
    subprocess.run(command, check=True, env=env)
    return BUILT / host / "release"


def run(folder: Path, name: str, seconds: int, seed: int) -> Ran:
    """Fuzz one target. New inputs go to target/fuzz/corpus, those that break it to target/fuzz/broken."""
    found, broken = BUILT / "corpus" / name, BUILT / "broken"
    for path in (found, broken):
        path.mkdir(parents=True, exist_ok=True)
    log = BUILT / f"{name}.log"
    # standard output is the programs' own; libFuzzer writes to standard error
    with log.open("w") as stderr:
        ran = subprocess.run(
            [
                folder / name,
                *(f"-max_total_time={seconds}", f"-seed={seed}", f"-max_len={INPUT_BYTES}"),
                *(f"-timeout={INPUT_S}", f"-rss_limit_mb={RSS_MB}", "-print_final_stats=1"),
                *("-close_fd_mask=1", f"-artifact_prefix={broken}/{name}-"),
                found,
                CORPUS / name if (CORPUS / name).is_dir() else GOLDEN_FRAMES,
            ],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=stderr,
            timeout=seconds + 300,
        )
    text = log.read_text(errors="replace")
    inputs = re.findall(r"^stat::number_of_executed_units: (\d+)", text, re.MULTILINE)
    branches = re.findall(r" cov: (\d+) ", text)
    problem = (
        None
        if ran.returncode == 0
        else f"status {ran.returncode}; {log.relative_to(ROOT)} says why"
    )
    return Ran(
        name, int(inputs[-1]) if inputs else 0, int(branches[-1]) if branches else 0, problem
    )
