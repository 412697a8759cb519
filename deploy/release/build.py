"""Everything that a release ships, into dist/release: `make release`.

Wheels for every Python from 3.11 on, the source archive, the router as a program of its own, inventories, SHA256SUMS.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

from deploy.release.sbom import SbomError, inventory

ROOT = Path(__file__).parents[2]
MAX_ROUTER_BYTES = 20_000_000  # of a program that is light to install
MACHINES = {"x86_64": "x86_64-unknown-linux-gnu", "aarch64": "aarch64-unknown-linux-gnu"}
START_S = 30.0


class ReleaseError(Exception):
    """A part cannot be made; the message says why."""


def say(text: str) -> None:
    print(f"release: {text}", flush=True)


def run(*command: str | Path, env: dict[str, str] | None = None) -> str:
    words = [str(word) for word in command]
    done = subprocess.run(
        words, cwd=ROOT, capture_output=True, text=True, check=False, env=os.environ | (env or {})
    )
    if done.returncode != 0:
        raise ReleaseError(f"{' '.join(words)}: {(done.stderr or done.stdout).strip()[-500:]}")
    return done.stdout


def why_not(machine: str, here: str) -> str | None:
    """Why a wheel for another machine cannot be made on this one."""
    target = MACHINES[machine]
    if machine == here:
        return None
    folder = Path(run("rustc", "--print", "sysroot").strip()) / "lib/rustlib" / target
    if not folder.is_dir():
        return f"the target is not installed: rustup target add {target}"
    if shutil.which(linker(target)) is None:
        return f"there is no {linker(target)} (Debian: apt install gcc-{machine}-linux-gnu)"
    return None


def linker(target: str) -> str:
    return f"{target.replace('-unknown', '')}-gcc"


def wheels(out: Path) -> list[str]:
    """One for each machine that can be built for; what is skipped is said."""
    here = os.uname().machine
    skipped: list[str] = []
    maturin = [str(Path(sys.executable).with_name("maturin")), "build", "--release", "--locked"]
    for machine, target in MACHINES.items():
        if reason := why_not(machine, here):
            skipped.append(f"wheel for {machine}: {reason}")
            say(f"skipped: {skipped[-1]}")
            continue
        say(f"wheel for {machine}")
        env = {} if machine == here else cross(target)
        run(*maturin, "--target", target, "--out", out, env=env)
    return skipped


def cross(target: str) -> dict[str, str]:
    """Compilers of another machine, as cargo and the crate `cc` look for them."""
    name = target.replace("-", "_")
    return {
        f"CARGO_TARGET_{name.upper()}_LINKER": linker(target),
        f"CC_{name}": linker(target),
        f"CXX_{name}": linker(target).replace("gcc", "g++"),
    }


def router(out: Path) -> Path:
    """The program without its symbols, and not too large."""
    say("router")
    run("cargo", "build", "--release", "--locked", "--package", "headrace-router")
    target = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target"))
    program = out / f"headrace-router-{os.uname().machine}-linux"
    shutil.copy2(target / "release/headrace-router", program)
    run("strip", "--strip-all", program)
    size = program.stat().st_size
    if size > MAX_ROUTER_BYTES:
        raise ReleaseError(f"{program.name} has {size} bytes, more than {MAX_ROUTER_BYTES}")
    return program


def start_ms(program: Path) -> float:
    """From the start of the program to the line that says where it listens."""
    begin = time.monotonic()
    process = subprocess.Popen(
        [program, "--port", "0", "--worker-listen", "127.0.0.1:0", "--log-level", "off"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    overdue = threading.Timer(START_S, process.kill)
    overdue.start()
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        took = time.monotonic() - begin
    finally:
        overdue.cancel()
        process.terminate()
        process.communicate()
    if "for clients" not in line:
        raise ReleaseError(f"{program.name} did not start: {line.strip()}")
    return took * 1e3


def sums(out: Path) -> str:
    """Lines as `sha256sum --check` reads them."""
    files = sorted(file for file in out.iterdir() if file.name != "SHA256SUMS")
    digests = ((hashlib.sha256(file.read_bytes()).hexdigest(), file.name) for file in files)
    return "".join(f"{digest}  {name}\n" for digest, name in digests)


def build(out: Path) -> None:
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    skipped = wheels(out)
    say("source archive")
    run(Path(sys.executable).with_name("maturin"), "sdist", "--out", out)
    program = router(out)
    say("inventories")
    for name, extra in (("headrace", None), ("headrace-cpu", "cpu"), ("headrace-worker", "worker")):
        text = json.dumps(inventory(extra), indent=1) + "\n"
        (out / f"{name}.cdx.json").write_text(text)
    (out / "SHA256SUMS").write_text(sums(out))
    took = min(start_ms(program) for _ in range(5))
    size = program.stat().st_size
    say(f"{program.name}: {size / 1e6:.1f} MB, listens {took:.0f} ms after its start (best of 5)")
    for file in sorted(out.iterdir()):
        say(f"{file.stat().st_size:>12,} {file.name}")
    for reason in skipped:
        say(f"skipped: {reason}")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, default=ROOT / "dist/release")
    try:
        build(parser.parse_args().out.absolute())
    except (ReleaseError, SbomError, OSError) as error:
        print(f"release: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
