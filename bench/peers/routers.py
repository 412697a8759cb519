"""What is measured, each with two workers without a model: no router, Headrace, and routers of others.

Those that proxy HTTP get `headrace bench http-worker`, Headrace its own mock worker, dynamo its own mocker. Each runs
as it ships, but for what `start` names.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from bench.helpers.report import ROOT
from bench.peers.cases import CACHED_PREFIXES, TOKEN_TEXT, Case
from bench.peers.environments import Environment
from bench.peers.systems import (
    MODEL,
    UNEVEN,
    WORKERS,
    Programs,
    Running,
    Stack,
    System,
    address_of,
    all_answer,
    answers,
    free_addresses,
    free_port,
    http_worker,
    http_workers,
)

BLOCK_TOKENS = 16
TOKENS_A_WORD = 1.86  # of the prompts of `bench load`, with the tokenizer of the default model
LONG_MS = 600_000  # for clients that read nothing: longer than a run


class Direct(System):
    """No router: the loop of writes that a worker is. Two of them are at one port; several clients have one each."""

    name = "direct"
    connections = 1

    def workers(self, case: Case) -> int:
        return max(WORKERS, self.clients(case))

    def descriptors(self, case: Case) -> int:
        return case.parts(self.clients(case))[0].descriptors(self.connections)

    def note(self, case: Case) -> str | None:
        workers = self.workers(case)
        return f"{workers} workers" if workers > WORKERS else None

    def start(self, stack: Stack, case: Case) -> Running:
        addresses = free_addresses(self.clients(case))
        shares = itertools.islice(itertools.cycle(addresses), self.workers(case))
        workers = [
            stack.start(
                f"worker{i}", http_worker(self.programs, case, "--share-port", "--listen", address)
            )
            for i, address in enumerate(shares)
        ]
        for worker in workers:
            address_of(stack, worker)
        stack.eventually(lambda: all_answer(addresses), "does not answer")
        return Running(addresses=addresses, workers=[worker.popen.pid for worker in workers])


class Headrace(System):
    """This repository's router, with its policy `kv` in all cases.

    Several clients have a router each, with two workers of its own: a worker without a model dials one router.
    """

    name = "headrace"
    connections = 1

    def descriptors(self, case: Case) -> int:
        return case.parts(self.clients(case))[0].descriptors(self.connections)

    def note(self, case: Case) -> str | None:
        routers = self.clients(case)
        return f"{routers} routers" if routers > 1 else None

    def start(self, stack: Stack, case: Case) -> Running:
        parts = case.parts(self.clients(case))
        all_running = [self.one_router(stack, part, number) for number, part in enumerate(parts)]
        return Running(
            addresses=[address for running in all_running for address in running.addresses],
            router=[process for running in all_running for process in running.router],
            workers=[process for running in all_running for process in running.workers],
        )

    def one_router(self, stack: Stack, case: Case, number: int) -> Running:
        link = f"unix:{stack.folder}/w{number}.sock"
        most = str(max(16_384, 2 * case.open_streams))
        bounds = ["--max-streams", most, "--max-connections", str(2 * int(most))]
        if case.stalled:
            bounds += ["--stall-timeout-ms", str(LONG_MS)]
        listen = ["--port", "0", "--worker-listen", link, "--log-level", "warn"]
        router = stack.start(f"router{number}", [*self.programs.router, *listen, *bounds])
        address = stack.said(router, r"http://(\S+) for clients")[1]
        room = ["--sequences", most, "--waiting", most, "--batched-tokens", "65536"]
        pool = ["--block-tokens", str(BLOCK_TOKENS), "--blocks", str(self.blocks(case))]
        costs = f"{case.step_ms},{case.prefill_us / 1000},0,0,0"
        time = ["--cost", costs, "--noise", "0"]
        flags = ["--workers", "1", "--router", link, *time, *room, *pool]
        if self.programs.doc is not None:
            flags += ["--doc", str(self.programs.doc)]
        if case.paced:
            script = stack.folder / f"answer{number}.jsonl"
            answer = {"text": TOKEN_TEXT * case.max_tokens, "finish": "length"}
            script.write_text(json.dumps(answer))
            flags += ["--script", str(script)]
        workers = [
            stack.start(f"worker{i}", [*self.programs.mock, *flags, "--name", f"mock-{i}-"])
            for i in range(number * WORKERS, (number + 1) * WORKERS)
        ]
        stack.eventually(lambda: self.all_there(address), f"does not have {WORKERS} workers")
        stack.eventually(lambda: answers(address), "does not answer")
        processes = [worker.popen.pid for worker in workers]
        return Running(addresses=[address], router=[router.popen.pid], workers=processes)

    @staticmethod
    def blocks(case: Case) -> int:
        if not case.shared:
            return 1 << 20
        tokens = TOKENS_A_WORD * (case.shared + case.words)
        return CACHED_PREFIXES * math.ceil(tokens / BLOCK_TOKENS)

    @staticmethod
    def all_there(address: str) -> bool | None:
        with contextlib.suppress(OSError):
            with urllib.request.urlopen(f"http://{address}/workers", timeout=5) as answer:
                states = [worker["state"] for worker in json.load(answer)["workers"]]
            return states.count("ready") == WORKERS or None
        return None


NGINX = """
daemon off;
worker_processes {processes};
worker_rlimit_nofile {descriptors};
pid {folder}/nginx.pid;
error_log {folder}/nginx-error.log error;
events {{ worker_connections {descriptors}; }}
http {{
    access_log off;
    client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
    client_max_body_size 64m;
    client_body_buffer_size 2m;
    keepalive_requests 1000000000;
    send_timeout {timeout_s};
    upstream workers {{
        {servers}
        keepalive 1024;
        keepalive_requests 1000000000;
    }}
    server {{
        {listen}
        location / {{
            proxy_pass http://workers;
            proxy_http_version 1.1;
            proxy_set_header Connection "";
            proxy_buffering off;
            proxy_read_timeout {timeout_s};
        }}
    }}
}}
"""


class Nginx(System):
    """A process a core, buffering off, connections to workers kept."""

    name = "nginx"

    def processes(self, case: Case) -> int:
        """As many as cores, or as it takes for all streams to find descriptors; some get more of them than others."""
        needed = math.ceil(case.descriptors(2) * UNEVEN / self.limit)
        return max(os.cpu_count() or 1, needed)

    def descriptors(self, case: Case) -> int:
        return math.ceil(case.descriptors(2) * UNEVEN / self.processes(case))

    def note(self, case: Case) -> str | None:
        workers = self.http_workers(case)
        more = f", {workers} workers" if workers > WORKERS else ""
        return f"{self.processes(case)} processes{more}"

    def start(self, stack: Stack, case: Case) -> Running:
        workers = http_workers(stack, self, case)
        worker_addresses = [address_of(stack, worker) for worker in workers]
        addresses = free_addresses(self.clients(case))
        config = stack.folder / "nginx.conf"
        config.write_text(
            NGINX.format(
                processes=self.processes(case),
                descriptors=self.limit,
                folder=stack.folder,
                servers="\n        ".join(f"server {address};" for address in worker_addresses),
                listen="\n        ".join(
                    f"listen {address} reuseport backlog=32768;" for address in addresses
                ),
                timeout_s=LONG_MS // 1000,
            )
        )
        log = stack.folder / "nginx-error.log"
        router = stack.start("router", [self.program, "-c", config, "-p", stack.folder, "-e", log])
        stack.eventually(lambda: all_answer(addresses), "does not answer")
        processes = [worker.popen.pid for worker in workers]
        return Running(addresses=addresses, router=[router.popen.pid], workers=processes)


class _PythonRouter(System):
    """sglang-router and vllm-router, whose commands are alike."""

    module: ClassVar[str]
    errors_only: ClassVar[str]

    def policy(self, case: Case) -> str:
        return "cache_aware" if case.prefix_policy else "round_robin"

    def note(self, case: Case) -> str | None:
        return self.policy(case)

    def start(self, stack: Stack, case: Case) -> Running:
        workers = http_workers(stack, self, case)
        urls = [f"http://{address_of(stack, worker)}" for worker in workers]
        port = free_port()
        listen = ["--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(free_port())]
        chosen = ["--policy", self.policy(case), "--log-level", self.errors_only]
        command = [self.program, "-m", self.module, *listen, *chosen, "--worker-urls", *urls]
        router = stack.start("router", command)
        address = f"127.0.0.1:{port}"
        stack.eventually(lambda: answers(address), "does not answer")
        processes = [worker.popen.pid for worker in workers]
        return Running(addresses=[address], router=[router.popen.pid], workers=processes)


class Sglang(_PythonRouter):
    """sglang-router."""

    name = "sglang"
    module = "sglang_router.launch_router"
    errors_only = "error"


class Vllm(_PythonRouter):
    """vllm-router."""

    name = "vllm"
    module = "vllm_router.launch_router"
    errors_only = "error"


class Dynamo(System):
    """dynamo's frontend with its mocker; no etcd, no NATS. The frontend tokenises, as Headrace's router does."""

    name = "dynamo"
    own_engine = True
    # of its own step times; where a step has no length here, it has none there
    speedup: ClassVar[dict[float, str]] = {0.0: "0", 4.0: "2"}

    def note(self, case: Case) -> str | None:
        return self.mode(case)

    def mode(self, case: Case) -> str:
        return "kv" if case.prefix_policy else "round-robin"

    def start(self, stack: Stack, case: Case) -> Running:
        store = stack.folder / "discovery"
        store.mkdir()
        ours = {
            "DYN_DISCOVERY_BACKEND": "file",
            "DYN_FILE_KV": str(store),
            "DYN_REQUEST_PLANE": "tcp",
            "DYN_EVENT_PLANE": "zmq",
            "DYN_TCP_RPC_HOST": "127.0.0.1",
            "DYN_TCP_RESPONSE_STREAM_HOST": "127.0.0.1",
            "DYN_EVENT_PLANE_HOST": "127.0.0.1",
            "DYN_LOG": "error",
        }
        environment = {**os.environ, **ours}
        room = [
            "--max-num-seqs",
            str(max(8_192, case.open_streams)),
            "--max-num-batched-tokens",
            "65536",
        ]
        blocks = Headrace.blocks(case) * BLOCK_TOKENS // 64
        engine = ["--block-size", "64", "--num-gpu-blocks-override", str(blocks)]
        speed = ["--speedup-ratio", self.speedup.get(case.step_ms, "1")]
        model = ["--model-path", str(self.model_folder(stack.folder)), "--model-name", MODEL]
        mocker = [self.program, "-m", "dynamo.mocker", *model, *room, *engine, *speed]
        worker = stack.start("worker", [*mocker, "--num-workers", str(WORKERS)], environment)
        port = free_port()
        listen = ["--http-host", "127.0.0.1", "--http-port", str(port)]
        mode = ["--router-mode", self.mode(case)]
        router = stack.start(
            "router", [self.program, "-m", "dynamo.frontend", *listen, *mode], environment
        )
        address = f"127.0.0.1:{port}"
        stack.eventually(lambda: answers(address), "does not answer")
        return Running(addresses=[address], router=[router.popen.pid], workers=[worker.popen.pid])

    def model_folder(self, folder: Path) -> Path:
        """The default model's tokenizer and shape, with room for long prompts."""
        from headrace.models.load.default_model import ensure_default_model

        source, model = ensure_default_model(), folder / "model"
        model.mkdir()
        for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
            if (source / name).exists():
                (model / name).symlink_to(source / name)
        config = json.loads((source / "config.json").read_text())
        config["max_position_embeddings"] = 1 << 20
        (model / "config.json").write_text(json.dumps(config))
        return model


def systems(
    names: Sequence[str], programs: Programs, environments: dict[str, Environment], limit: int
) -> list[System]:
    """Those of the names that there are environments for."""
    made: list[System] = []
    for name in names:
        environment = environments.get(name)
        match name:
            case "direct":
                made.append(Direct(programs, limit))
            case "headrace":
                made.append(Headrace(programs, limit))
            case "nginx" if environment is not None:
                made.append(Nginx(programs, limit, environment))
            case "sglang" if environment is not None:
                made.append(Sglang(programs, limit, environment))
            case "vllm" if environment is not None:
                made.append(Vllm(programs, limit, environment))
            case "dynamo" if environment is not None:
                made.append(Dynamo(programs, limit, environment))
            case _:
                pass  # it could not be installed, and the result says so
    return made


NAMES = ["direct", "headrace", "nginx", "sglang", "vllm", "dynamo"]
RELEASE = ROOT / "target/release"
