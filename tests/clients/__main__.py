"""Install real clients, run the scripts of each, and write what works into a table of docs/api.md.

    cd tests && python -m clients [--only NAME]... [--write]

A script in scripts/scripted/ talks to a mock worker that answers by answers.py, one in scripts/model/ to the default
model. Versions are pinned in clients.json. Each client has an environment of its own under target/clients/. What cannot
be installed is named, and so is a missing Node. The exit status is 1 if a client could not be run, or failed at a
feature.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from clients.answers import ANSWERS
from helpers.serving.scripted import scripted
from helpers.serving.server import serving

ROOT = Path(__file__).parents[2]
SCRIPTS = Path(__file__).parent / "scripts"
ENVIRONMENTS = ROOT / "target" / "clients"
PAGE = ROOT / "docs" / "api.md"
BEGIN, END = "<!-- clients: begin -->", "<!-- clients: end -->"
FEATURES = (
    *("chat", "stream", "tools", "tools stream", "structured", "reasoning"),
    *("embeddings", "responses", "messages", "agent", "evals", "document", "errors"),
)
INSTALL_S, SCRIPT_S = 900.0, 900.0  # both take a minute where nothing else runs
KINDS = ("scripted", "model")  # of servers, and of scripts that talk to them
SIGNS = {"pass": "yes", "fail": "**no**", "unsupported": "n/a"}


@dataclass(slots=True)
class Outcome:
    """What one client could do. `problem` says why nothing was tried."""

    name: str
    versions: list[str]
    rows: dict[str, dict[str, str]] = field(default_factory=dict[str, dict[str, str]])
    problem: str | None = None

    def failed(self) -> list[str]:
        return [name for name, row in self.rows.items() if row["result"] == "fail"]

    def passed(self) -> bool:
        return self.problem is None and bool(self.rows) and not self.failed()


class Unavailable(Exception):
    """The client cannot be had here; the text says why."""


def install(name: str, packages: list[str], *, node: bool) -> list[str]:
    """Make the environment of a client unless it is there; the command that runs a script in it."""
    folder = ENVIRONMENTS / "".join(c if c.isalnum() else "-" for c in name)
    stamp, wanted = folder / ".installed", "\n".join(packages)
    done = stamp.is_file() and stamp.read_text() == wanted
    if node:
        program, npm = shutil.which("node"), shutil.which("npm")
        if program is None or npm is None:
            raise Unavailable("Node is not on this machine")
        command = [program]
        steps = [[npm, "install", "--no-audit", "--no-fund", "--prefix", str(folder), *packages]]
    else:
        python = folder / "bin" / "python"
        command = [str(python)]
        pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        steps = [[sys.executable, "-m", "venv", str(folder)], [*pip, *packages]]
    if not done:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        for step in steps:
            try:
                subprocess.run(step, check=True, capture_output=True, text=True, timeout=INSTALL_S)
            except subprocess.CalledProcessError as error:
                raise Unavailable(f"not installed: {error.stderr.strip()[-200:]}") from error
            except subprocess.TimeoutExpired as error:
                raise Unavailable(f"not installed within {INSTALL_S:.0f} s") from error
        stamp.write_text(wanted)
    return command


def run(name: str, client: Mapping[str, Any], urls: Mapping[str, str]) -> Outcome:
    """`urls` has the server for each kind of script."""
    outcome = Outcome(name, client["packages"])
    try:
        command = install(name, client["packages"], node=client.get("node", False))
    except Unavailable as error:
        outcome.problem = str(error)
        return outcome
    for kind in KINDS:
        if kind in client:
            script = place(name, SCRIPTS / kind / client[kind], node=client.get("node", False))
            outcome.rows |= run_script([*command, str(script)], urls[kind])
    return outcome


def place(name: str, script: Path, *, node: bool) -> Path:
    """Where the script can be run. One of Node finds packages beside itself, so it is copied to them."""
    if not node:
        return script
    folder = ENVIRONMENTS / "".join(c if c.isalnum() else "-" for c in name)
    for file in (*SCRIPTS.glob("*.mjs"), script):
        shutil.copy(file, folder)
    return folder / script.name


def run_script(command: list[str], url: str) -> dict[str, dict[str, str]]:
    """The rows that a script printed, by feature."""
    rows: dict[str, dict[str, str]] = {}
    with urllib.request.urlopen(f"{url}/v1/models", timeout=30) as answer:
        model = json.load(answer)["data"][0]["id"]
    kept = {"PATH", "HOME", "LANG", "TMPDIR", "EXAMPLES"}
    env = {key: value for key, value in os.environ.items() if key in kept}
    env |= {"HEADRACE_URL": url, "HEADRACE_MODEL": model, "OPENAI_API_KEY": "unused"}
    env["PYTHONPATH"] = str(SCRIPTS)
    log = ENVIRONMENTS / f"{Path(command[-1]).name}.log"
    with log.open("w") as stderr:
        try:
            ran = subprocess.run(
                command,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                timeout=SCRIPT_S,
            )
            output, status = ran.stdout, ran.returncode
        except subprocess.TimeoutExpired as error:
            output = (error.stdout or b"").decode() if isinstance(error.stdout, bytes) else ""
            status = -1
    for line in output.splitlines():
        if line.startswith("{"):
            row = json.loads(line)
            rows[row["feature"]] = row
    if status != 0:
        rows["errors"] = {
            "feature": "errors",
            "result": "fail",
            "detail": f"the script ended with {status}; {log.relative_to(ROOT)} says why",
        }
    return rows


def table(outcomes: list[Outcome]) -> str:
    lines = [
        f"| client | {' | '.join(FEATURES)} |",
        f"|---|{'---|' * len(FEATURES)}",
    ]
    for outcome in outcomes:
        name = f"{outcome.name} ({', '.join(outcome.versions)})"
        if outcome.problem is not None:
            cells = [
                f"not run: {outcome.problem.splitlines()[-1][:80]}",
                *[""] * (len(FEATURES) - 1),
            ]
        else:
            rows = [outcome.rows.get(feature) for feature in FEATURES]
            cells = ["" if row is None else SIGNS[row["result"]] for row in rows]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def write(page: Path, text: str) -> None:
    before, _, rest = page.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    assert after, f"{page} has no {BEGIN} and {END}"
    page.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{after}")


def main() -> int:
    clients: dict[str, Any] = json.loads((Path(__file__).parent / "clients.json").read_text())
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m clients")
    parser.add_argument("--only", action="append", choices=clients, help="may be given again")
    parser.add_argument("--write", action="store_true", help="write the table into docs/api.md")
    arguments = parser.parse_args()
    outcomes: list[Outcome] = []
    chosen: list[str] = arguments.only or list(clients)
    with ExitStack() as servers:
        folder = Path(servers.enter_context(tempfile.TemporaryDirectory()))
        urls = {"scripted": servers.enter_context(scripted(folder, ANSWERS)).url}
        if any("model" in clients[name] for name in chosen):
            urls["model"] = servers.enter_context(serving(None)).url
        for name in chosen:
            outcome = run(name, clients[name], urls)
            outcomes.append(outcome)
            print(f"{name}: {outcome.problem or 'ran'}", flush=True)
            for row in outcome.rows.values():
                print(f"  {row['feature']:14} {row['result']:12} {row['detail']}", flush=True)
    print("\n" + table(outcomes))
    if arguments.write:
        write(PAGE, table(outcomes))
    return 0 if all(outcome.passed() for outcome in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
