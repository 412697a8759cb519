"""The default model on a real worker: what many choices of one tenant leave of it to another one."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from attack.attack import Outcome, Scale, Trial
from attack.stack import Programs, Router, start_router, until_ready
from attack.wire import Reply, ask, tally
from headrace.models.load.default_model import DEFAULT_MODEL

AT_ONCE = 4
IN_FLIGHT_S = 5.0
PATIENCE_S = 60.0


async def many_choices(programs: Programs, doc: Path, scale: Scale) -> Outcome:
    """Requests of 128 choices each; somebody else wants a single token."""
    with tempfile.TemporaryDirectory(prefix="attack-") as name:
        router = start_router(programs, Path(name))
        worker = start_worker(router)
        try:
            await until_ready(router)
            greedy = [
                asyncio.create_task(complete(router, "greedy", n=128, max_tokens=256))
                for _ in range(AT_ONCE)
            ]
            await asyncio.sleep(IN_FLIGHT_S)
            ended = sum(task.done() for task in greedy)
            began = time.monotonic()
            reply = await complete(router, "somebody-else", max_tokens=1)
            took = time.monotonic() - began
            for task in greedy:
                task.cancel()
            await asyncio.gather(*greedy, return_exceptions=True)
        finally:
            router.close()
            worker.terminate()
            worker.wait(30)
    told = f"newcomer {tally([reply])} after {took:.2f} s; {ended} of {AT_ONCE} had ended"
    return Outcome(told, reply.status == "200" and took < 5 and ended == 0)


def start_worker(router: Router) -> subprocess.Popen[bytes]:
    """A worker on the processor, with the bounds that it has by default."""
    return subprocess.Popen(
        [
            *(sys.executable, "-m", "headrace", "worker", "--device=cpu"),
            *("--router", router.socket, "--name=real"),
        ],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


async def complete(router: Router, tenant: str, **options: int) -> Reply:
    body = {"model": DEFAULT_MODEL.name, "prompt": "hello", "ignore_eos": True, **options}
    headers = [("X-Headrace-Tenant", tenant)]
    return await ask(router, "/v1/completions", body, headers, PATIENCE_S)


TRIALS = [Trial(name="n 128 four times on a real worker", run=many_choices)]
