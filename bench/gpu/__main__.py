"""All that a GPU can tell of Headrace, in under 10 minutes and without a network.

    make gpu OUT=FOLDER            # or: python3 -m bench.gpu --out FOLDER
    make gpu OUT=FOLDER DRY=1      # everything small, on the CPU
    make gpu OUT=FOLDER ONLY='kernels,end to end'      # some stages; `machine` is always the first

FOLDER gets run.json (machine, stages, tests), engine.json, kernels.json, layers.json, rank.json, table.md and log.txt.
Exit status: 0, every stage went well; 1, some did not, and the output names them; 2, it could not begin, and the last
line says why.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.gpu import suites
from bench.gpu.stages import Outcome, Stage, run_all
from bench.gpu.wheel import ROOT, NotReadyError, make_ready

# Processes that fill the cache of compiled kernels before anything is timed: compiling is work of the CPU alone.
COMPILERS = min(16, os.cpu_count() or 1)
FIRST = "machine"  # the stage
MISSING = 3  # exit status of the first stage where the others cannot work
OURS = (
    "run.json",
    "kernels.json",
    "layers.json",
    "rank.json",
    "engine.json",
    "table.md",
    "log.txt",
)
CANNOT_BEGIN = 2
DRY_TIMES = 10  # a dry run is a test among others: it may take as long as a busy machine makes it


def stages_of(out: Path, work: Path, *, dry: bool) -> list[Stage]:
    """What is run, in order. Their limits are 9 minutes together: one has to begin and to write the report, too."""
    python = [sys.executable, "-m"]
    flag = ["--dry"] if dry else []
    kernel_tests, end_to_end = work / "kernel_tests.xml", work / "end_to_end.xml"

    def json_of(path: Path) -> Callable[[], dict[str, Any]]:
        return lambda: json.loads(path.read_text()) if path.exists() else {}

    def of_tests(report: Path) -> Callable[[], dict[str, Any]]:
        return lambda: suites.read(report) if report.exists() else {}

    def tests(chosen: list[str], report: Path) -> Callable[[float], list[str]]:
        return lambda _: suites.command(chosen, report)

    def part(module: str, *arguments: str, file: Path) -> Callable[[float], list[str]]:
        command = [*python, module, *arguments, *flag, "--out", str(file)]
        return lambda left: [*command, "--budget-s", f"{left:.0f}"]

    facts = work / "facts.json"
    found = [
        Stage(
            FIRST,
            45,
            lambda _: [*python, "bench.gpu.facts", *flag, "--out", str(facts)],
            json_of(facts),
            fatal=MISSING,
        ),
        Stage(
            "engine",
            45,
            part("bench.gpu.engine_steps", file=out / "engine.json"),
            json_of(out / "engine.json"),
        ),
        Stage(
            "kernel tests",
            95,
            tests(suites.KERNELS_DRY if dry else suites.KERNELS, kernel_tests),
            of_tests(kernel_tests),
        ),
    ]
    if not dry:
        compiling = [*python, "bench.gpu.compile", "--processes", str(COMPILERS)]
        found.append(
            Stage("compile", 45, lambda left: [*compiling, "--budget-s", f"{left:.0f}"], dict)
        )
    found += [
        Stage(
            "kernels",
            130,
            part("bench.kernels", file=out / "kernels.json"),
            json_of(out / "kernels.json"),
        ),
        Stage(
            "layers",
            40,
            part("bench.gpu.slices", "layers", file=out / "layers.json"),
            json_of(out / "layers.json"),
        ),
        Stage(
            "rank",
            40,
            part("bench.gpu.slices", "rank", file=out / "rank.json"),
            json_of(out / "rank.json"),
        ),
    ]
    if not dry:
        model = [*python, "bench.gpu.default_model"]
        found.append(Stage("default model", 15, lambda _: model, dict))
    found.append(
        Stage(
            "end to end",
            100,
            tests(suites.E2E_DRY if dry else suites.E2E, end_to_end),
            of_tests(end_to_end),
        )
    )
    if not dry:
        return found
    return [dataclasses.replace(stage, limit_s=DRY_TIMES * stage.limit_s) for stage in found]


def chosen(stages: list[Stage], only: str | None) -> list[Stage]:
    """The stages that `only` names, and the first one. Raises `NotReadyError` for a name that is none."""
    if only is None:
        return stages
    names = [name.strip() for name in only.split(",")]
    known = [stage.name for stage in stages]
    for name in names:
        if name not in known:
            raise NotReadyError(f"no stage is called {name!r}: they are {', '.join(known)}")
    return [stage for stage in stages if stage.name in (FIRST, *names)]


def environment(site: Path, work: Path, *, dry: bool) -> dict[str, str]:
    """Of every stage. Nobody asks a network."""
    paths = [str(ROOT / part) for part in ("pyworkers", "kernels", "tests")]
    before = os.environ.get("PYTHONPATH", "")
    env = os.environ | {
        "PYTHONPATH": os.pathsep.join([*paths, str(ROOT), str(site), *filter(None, [before])]),
        "PYTHONUNBUFFERED": "1",
        "PIP_NO_INDEX": "1",
        "HF_HUB_OFFLINE": "1",
        "TRITON_CACHE_DIR": str(work / "triton"),
    }
    env.pop("TRITON_INTERPRET", None)
    return env | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"} if dry else env


def open_folder(out: Path) -> None:
    """Make the folder, and remove what an earlier run left in it. Raises `NotReadyError`."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        for name in OURS:
            (out / name).unlink(missing_ok=True)
            (out / name).touch()
            (out / name).unlink()
    except OSError as error:
        raise NotReadyError(f"{out}: cannot be written: {error.strerror or error}") from error


class Report:
    """What is in the folder, whole after every stage."""

    def __init__(self, out: Path, *, dry: bool, command: str) -> None:
        self._out = out
        self._run: dict[str, Any] = {"dry": dry, "command": command, "facts": {}, "stages": []}

    def add(self, outcome: Outcome) -> None:
        print(
            f"{outcome.name}: {outcome.status}, {outcome.seconds:.0f} s"
            + (f": {outcome.says}" if outcome.says else ""),
            flush=True,
        )
        entry = dataclasses.asdict(outcome)
        output = entry.pop("output")
        if outcome.name == FIRST:
            self._run["facts"] = outcome.figures
        if (self._out / f"{outcome.name}.json").exists() or outcome.name == FIRST:
            entry.pop("figures")  # they are in a file of their own
        self._run["stages"].append(entry)
        (self._out / "run.json").write_text(json.dumps(self._run, indent=1) + "\n")
        with (self._out / "log.txt").open("a") as log:
            log.write(f"=== {outcome.name}: {outcome.status}, {outcome.seconds:.1f} s\n{output}\n")


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="make gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="folder for the results: make gpu OUT=FOLDER")
    parser.add_argument("--dry", action="store_true", help="small, on the CPU: make gpu DRY=1")
    parser.add_argument("--only", help="names of stages, with commas: make gpu ONLY=...")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="headrace-gpu-") as scratch:
        work = Path(scratch)
        site = work / "site"
        try:
            if args.out is None:
                raise NotReadyError("a folder for the results is needed: make gpu OUT=FOLDER")
            out: Path = args.out.absolute()
            stages = chosen(stages_of(out, work, dry=args.dry), args.only)
            open_folder(out)
            make_ready(site)
        except NotReadyError as error:
            print(f"make gpu: {error}", file=sys.stderr)
            return CANNOT_BEGIN
        os.chdir(ROOT)
        env = environment(site, work, dry=args.dry)
        command = f"make gpu OUT=FOLDER{' DRY=1' if args.dry else ''}"
        if args.only is not None:
            command += f" ONLY={shlex.quote(args.only)}"
        report = Report(out, dry=args.dry, command=command)
        outcomes = run_all(stages, env, work, report.add)
        if outcomes[0].code == MISSING:
            print(f"make gpu: {outcomes[0].output.strip().splitlines()[-1]}", file=sys.stderr)
            return CANNOT_BEGIN
        return finish(out, outcomes, env)


def finish(out: Path, outcomes: list[Outcome], env: dict[str, str]) -> int:
    """The table, and one line for each stage that did not go well."""
    done = subprocess.run(
        [sys.executable, "-m", "bench.gpu.table", str(out)],
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    (out / "table.md").write_text(done.stdout)
    if done.returncode:
        print(f"table: failed: {done.stderr.strip().splitlines()[-1]}")
    bad = [outcome for outcome in outcomes if outcome.status != "ok"]
    for outcome in bad:
        print(f"not well: {outcome.name}: {outcome.status}: {outcome.says}")
    print(f"results are in {out}")
    return 1 if bad or done.returncode else 0


if __name__ == "__main__":
    sys.exit(main())
