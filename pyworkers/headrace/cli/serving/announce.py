"""Who is ready, and the lines that a person waits for."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any

from headrace.cli.client.unix_http import UnixConnection
from headrace.cli.console import Printer
from headrace.cli.serving.config import ServeSettings
from headrace.cli.serving.model import ServedAs
from headrace.cli.supervise import GaveUpError, Keeper

START_TIMEOUT_S = 1800.0  # a large model loads slowly from a slow disk
POLL_S = 0.1
READY_TIMEOUT_S = 1.0  # of one question to the router on this machine; an orderly end waits for it


async def announce(
    config: ServeSettings,
    served_as: ServedAs,
    router: Keeper,
    workers: list[Keeper],
    log: Printer,
    began: float,
) -> None:
    """Take note of who is ready. One line when a worker joins, also after a restart; the URL once all are there.

    A worker is ready once the router can give it requests: it has the model's tokenizer and the worker's blocks. So the
    URL works as soon as it is printed.

    `began` is when the person asked; to fetch the model took part of the time since. Never returns.
    Raises GaveUpError if the workers take too long.
    """
    seen = dict.fromkeys(workers, 0)  # which start of each worker was seen to be ready
    model: str | None = None  # that a worker was seen to serve
    ready = False
    give_up_at = time.monotonic() + START_TIMEOUT_S
    while True:
        late = [one for one in workers if seen[one] != one.starts and not one.ended]
        joined = await asyncio.to_thread(ready_workers, config) if late else None
        if joined is not None:
            router.ready()
        for keeper in late:
            name = keeper.command.name
            members = config.members(name)
            if keeper.running and joined and joined.keys() >= set(members):
                seen[keeper] = keeper.starts
                keeper.ready()
                model = joined[members[0]]
                log(name, f"ready, serves {model} in {served_as}")
        answers = any(seen[k] and k.command.name in config.generating for k in workers)
        if not ready and model and answers and all(seen[k] or k.ended for k in workers):
            ready = True
            print_ready(config, model, served_as, time.monotonic() - began)
        if not ready and time.monotonic() > give_up_at:
            raise GaveUpError(f"the workers were not ready after {START_TIMEOUT_S:.0f} s")
        await asyncio.sleep(POLL_S if late else 10 * POLL_S)


def ready_workers(config: ServeSettings) -> dict[str, str] | None:
    """Model by name of each worker that can take requests; None while the router cannot answer."""
    assert config.admin is not None
    connection = UnixConnection(config.admin, timeout=READY_TIMEOUT_S)
    try:
        connection.request("GET", "/workers")
        listed = json.loads(connection.getresponse().read())
    except (OSError, http.client.HTTPException, ValueError):
        return None
    finally:
        connection.close()
    workers: list[dict[str, Any]] = listed.get("workers", [])
    return {w["id"]: w["model"] for w in workers if w["state"] == "ready"}


def print_ready(config: ServeSettings, model: str, served_as: ServedAs, seconds: float) -> None:
    """The lines a person waits for, on stdout."""
    body = json.dumps(
        {"model": model, "messages": [{"role": "user", "content": "Hello!"}], "stream": True}
    )
    router_argv = [*config.router_argv, *config.router_reads]
    export, key = key_lines(router_argv)
    has_page = "--admin-listen-only" not in router_argv
    page = f"{config.url} shows what it does, in a browser.\n" if has_page else ""
    print(
        f"\nHeadrace is ready after {seconds:.1f} s: {config.url}\n"
        f"{model} in {served_as}{_quantised(config, served_as)}\n\n{export}"
        f"  curl -N {config.url}/v1/chat/completions -H 'Content-Type: application/json' \\\n{key}"
        f"    -d '{body}'\n"
        f"  {program()} chat --url {config.url}\n\n{page}",
        flush=True,
    )


def program() -> str:
    """What a person types for `headrace`: its path where a shell would not find this one."""
    ours = Path(sys.argv[0])
    if ours.name == "__main__.py":
        return f"{sys.executable} -m headrace"
    found = shutil.which(ours.name)
    return ours.name if found and Path(found).samefile(ours) else str(ours)


def _quantised(config: ServeSettings, served_as: ServedAs) -> str:
    """What a person should know who did not choose int8."""
    if served_as.dtype != "int8" or config.dtype == "int8":
        return ""
    return "; --dtype float32 leaves the weights as they are"


def key_lines(router_argv: list[str]) -> tuple[str, str]:
    """What the printed commands need where the router asks for an API key: a line before them, and a line of curl's."""
    value = os.environ.get("HEADRACE_API_KEY", "")
    file = next((word for word in router_argv if word.startswith("--api-key-file")), None)
    if not value and file is None:
        return "", ""
    one_key = file is None and "," not in value
    export = "" if one_key else "  export HEADRACE_API_KEY=...  # one of the API keys\n"
    return export, '    -H "Authorization: Bearer $HEADRACE_API_KEY" \\\n'
