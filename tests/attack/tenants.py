"""Two keys: what the owner of one learns of what the other one asked."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from attack.attack import Outcome, Scale, Trial
from attack.stack import Programs, Router, start_router, start_workers, until_ready
from attack.wire import Reply, ask, get, send, tally

PROMPT = "a secret that only A knows, and that is long enough for some blocks " * 8
PREFILL_MS = 1.0  # a token: what is not cached takes time


async def other_tenant(programs: Programs, doc: Path, scale: Scale) -> Outcome:
    """Key B sends what key A sent, and asks what became of A's request."""
    with tempfile.TemporaryDirectory(prefix="attack-") as name:
        keys = Path(name) / "keys"
        keys.touch(mode=0o600)
        keys.write_text("key-of-a\nkey-of-b\n")
        router = start_router(programs, Path(name), [f"--api-key-file={keys}"])
        workers = start_workers(programs, router, doc, count=1, prefill_ms=PREFILL_MS)
        try:
            await until_ready(router)
            first = await cached_and_predicted(router, "key-of-a", "asked-by-a")
            again = await cached_and_predicted(router, "key-of-a", "asked-again")
            foreign = await cached_and_predicted(router, "key-of-b", "asked-by-b")
            look = await decision(router, "key-of-b", "asked-by-a")
        finally:
            router.close()
            workers.terminate()
            workers.wait(10)
    told = ", ".join(
        f"{who} {cached} cached, {ms} ms predicted"
        for who, (cached, ms) in (("A", first), ("A again", again), ("B", foreign))
    )
    # A finds its own, so there is something to find
    apart = again[0] > first[0] == foreign[0] == 0 and foreign[1] == first[1]
    return Outcome(f"{told}; B on A's decision {look.status}", apart and look.status == "404")


async def cached_and_predicted(router: Router, key: str, request: str) -> tuple[int, int]:
    """Cached tokens of the prompt, as the answer says, and the ms that it was expected to take."""
    body = {"model": "mock", "prompt": PROMPT, "max_tokens": 1}
    headers = [("Authorization", f"Bearer {key}"), ("X-Request-ID", request)]
    answer = await ask(router, "/v1/completions", body, headers)
    placed = await decision(router, key, request)
    if (answer.status, placed.status) != ("200", "200"):
        raise RuntimeError(f"{request}: {tally([answer, placed])}")
    [candidate] = json.loads(placed.body)["decisions"][0]["candidates"]
    details = json.loads(answer.body)["usage"]["prompt_tokens_details"]
    return details["cached_tokens"], round(candidate["prefill_ms"])


async def decision(router: Router, key: str, request: str) -> Reply:
    """What the router says to this key of how that request was placed."""
    headers = [("Authorization", f"Bearer {key}")]
    return await send(router, get(router, f"/decisions/{request}", headers), 10)


TRIALS = [Trial(name="a key that sends another one's prompt", run=other_tenant)]
