"""A real router with mock workers of every kind: alone, prefill and decode apart, ranks of a group."""

from __future__ import annotations

import socket
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from helpers.serving.server import Running, Server, eventually

CLIENT_KEY, METRICS_KEY, ADMIN_KEY = "hr-of-a-client", "hr-of-prometheus", "hr-of-an-operator"
COSTS = "0.2,0,0,0,0"  # ms, as --cost takes them: answers come at once
# By the name of its model: what starts the workers.
KINDS = {
    "alone": ["--workers", "2"],
    "apart": ["--prefill", "1", "--decode", "1"],
    "group": ["--workers", "2", "--ep", "2"],
}


@dataclass(frozen=True)
class Fleet:
    """The router, with keys, and its workers."""

    router: Server
    workers: dict[str, Running]
    client_keys: Path

    def complete(
        self, model: str, headers: dict[str, str] | None = None, max_tokens: int = 4
    ) -> int:
        """The status of a request of the model."""
        body = {"model": model, "prompt": "one two three four", "max_tokens": max_tokens}
        head = {"Authorization": f"Bearer {CLIENT_KEY}"} | dict(headers or {})
        return self.router.post("/v1/completions", body, head).status

    def metrics(self) -> str:
        head = {"Authorization": f"Bearer {METRICS_KEY}"}
        page = self.router.send("GET", "/metrics", headers=head)
        assert page.status == 200, page.body
        return page.body.decode()


@contextmanager
def fleet_of_every_kind(folder: Path) -> Generator[Fleet]:
    """All kinds, each of which has answered, and what a fleet counts only now and then: a key's limit, a reload, a
    missed deadline, what a fleet needs, a stranger at the workers' door, a hang-up, a drain."""
    client_keys, admin_keys = folder / "clients.txt", folder / "admins.txt"
    client_keys.write_text(f"team {CLIENT_KEY} name=team rpm=100000\n")
    admin_keys.write_text(f"{METRICS_KEY} only=metrics\n{ADMIN_KEY}\n")
    with ExitStack() as ended:
        router = Server(
            *("router", "--port", "0", "--worker-listen", "127.0.0.1:0"),
            *("--api-key-file", str(client_keys), "--admin-key-file", str(admin_keys)),
            *("--shadow", "round-robin", "--decision-log", str(folder / "decisions.jsonl")),
        )
        ended.callback(router.close)
        line = router.wait_line(r"headrace-router: (http:\S+) for clients, (\S+) for workers")
        router.set_url(line[1])
        workers: dict[str, Running] = {}
        for model, flags in KINDS.items():
            mock = ["--router", line[2], "--model", model, "--name", f"{model}-", "--cost", COSTS]
            workers[model] = Running("mock", *mock, *flags)
            ended.callback(workers[model].close)
        fleet = Fleet(router, workers, client_keys)
        for model in KINDS:
            eventually(
                lambda model=model: fleet.complete(model) == 200,
                lambda model=model: f"{model}: {router.tail()}\n{workers[model].tail()}",
            )
        fleet.complete("alone", {"X-Headrace-TTFT-Deadline-Ms": "60000"})
        fleet.complete("alone", max_tokens=200)  # steps enough to know what they cost
        client_keys.write_text(client_keys.read_text() + "# one more line\n")
        host, _, port = line[2].rpartition(":")
        with socket.create_connection((host, int(port))) as stranger:
            stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
            stranger.recv(1)
        yield fleet
