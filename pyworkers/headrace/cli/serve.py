"""`headrace serve`: one router and its workers on this machine, supervised.

A Unix socket joins them. It lives in a private folder and goes when we go, or with the next start. The
secret that lets workers join is in the environment of the children: a file would need a disk with room,
and stay behind where we are killed. Logs go to stderr under the name of their process; stdout gets the URL.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import http.client
import importlib.util
import json
import os
import secrets
import signal
import socket
import sys
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from headrace import logs
from headrace.cli.children.process import Command, supervised
from headrace.cli.children.ranks import rank_commands, rank_name
from headrace.cli.client.unix_http import UnixConnection
from headrace.cli.console import Printer, StopSignals
from headrace.cli.private_folder import parents, private_folder
from headrace.cli.supervise import GaveUpError, Keeper, ToldWrongError
from headrace.errors import MissingExtra
from headrace.extras import needs
from headrace.settings import router
from headrace.settings.fleet import FleetSettings
from headrace.settings.table import typed, values_of
from headrace.settings.values import SettingsError
from headrace.settings.worker import check_context, check_model, worker_argv, worker_settings

START_TIMEOUT_S = 1800.0  # a large model loads slowly from a slow disk
ROUTER_STOP_S = 10.0  # after its drain; it ends by itself within 8 s
WORKER_STOP_S = 10.0  # with no router left, a worker has nothing to finish
STOP_OVERDUE_S = 5.0  # after all that, this process is ended
# After a second signal, for the router to end each answer with an error. This process itself is ended after 2 s
# (`router/src/signals.rs`), and has to tidy up before.
ROUTER_HURRY_S = 1.7
POLL_S = 0.1
READY_TIMEOUT_S = 1.0  # of one question to the router on this machine; an orderly end waits for it

ONE_THREAD = {  # a machine's cores are shared out by the number of workers
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeSettings:
    """Checked arguments of `headrace serve`; `port` is a real port."""

    host: str
    port: int
    roles: tuple[str, ...]  # of each worker; a name is its role's with a number
    model: str | None
    worker_argv: list[str]
    router_argv: list[str]
    drain_timeout_s: float
    worker_listen: str | None = None  # for workers of other machines
    device: str = "auto"
    dtype: str = "auto"
    context_tokens: int | None = None
    ranks: int = 1  # of each worker: processes that share the experts of one model
    redundant: int = 0  # slots for second copies of experts
    admin: Path | None = None  # where the router tells of its workers, once there is a folder
    secret: str | None = field(default=None, repr=False)  # for the children; None: they have it

    @property
    def names(self) -> list[str]:
        """Of the workers: worker-0, or prefill-0 and decode-0, each kind counted from 0."""
        kinds = ["worker" if role == "both" else role for role in self.roles]
        return [f"{kind}-{kinds[:place].count(kind)}" for place, kind in enumerate(kinds)]

    def members(self, worker: str) -> list[str]:
        """The processes of a worker, by their names: itself, or the ranks of a group."""
        if self.ranks == 1:
            return [worker]
        return [rank_name(worker, rank) for rank in range(self.ranks)]

    @property
    def generating(self) -> set[str]:
        """The workers that answers can come from: prompts alone are no service."""
        pairs = zip(self.names, self.roles, strict=True)
        return {name for name, role in pairs if role != "prefill"}

    @property
    def reach(self) -> str:
        """An address at which this machine reaches the router."""
        return {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(self.host, self.host)

    @property
    def url(self) -> str:
        host = f"[{self.reach}]" if ":" in self.reach else self.reach
        return f"http://{host}:{self.port}"


def run(args: argparse.Namespace, usage: str) -> int:
    """Serve until told to stop. Raises SettingsError, ConfigError and MissingExtra before anything was started."""
    kept = typed(args)
    worker = worker_settings(args)
    fleet = FleetSettings(**values_of(FleetSettings, args))
    router.check_router(kept, usage)
    if importlib.util.find_spec("torch") is None:
        raise MissingExtra("torch", "worker")
    host = router.value_of(kept, "--host")
    worker_listen = kept.last(router.WORKER_LISTEN)
    checked = ServeSettings(
        host=host,
        port=free_port(host, int(router.value_of(kept, "--port"))),
        roles=fleet.roles(),
        model=worker.model,
        worker_argv=worker_argv(args),
        router_argv=kept.argv(router.handed_on()),
        worker_listen=worker_listen and free_address(worker_listen),
        drain_timeout_s=int(router.value_of(kept, "--drain-timeout-ms")) / 1000,
        device=worker.device,
        dtype=worker.dtype,
        context_tokens=worker.context_tokens,
        ranks=fleet.ep or 1,
        redundant=worker.ep_redundant,
        secret=None if router.workers_know(kept) else secrets.token_hex(32),
    )
    logs.never_wait(stdout=True)
    return asyncio.run(_serve_alone(checked))


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedAs:
    """What workers make of the model, as they will find it themselves."""

    device: str
    dtype: str  # of the weights

    def __str__(self) -> str:
        return f"{self.dtype} on {'the CPU' if self.device == 'cpu' else self.device}"


def fetch(args: argparse.Namespace) -> int:
    """`headrace fetch`: have the model on this machine, and print where it lies; for `serve`, a `ServedAs` as JSON.

    Raises SettingsError and CannotRun.
    """
    check_model(args.model)
    with needs("worker"):
        from headrace.models import UnsupportedModelError, check_ranks, config, dtype_of_weights
        from headrace.models.load import source
        from headrace.worker.device import choose_device

        for_serve = args.typed == "serve"
        device = choose_device(args.device) if for_serve else "cpu"  # sooner than a download
    try:
        checkpoint = source.resolve(args.model)
        if for_serve:
            check_context(args.context_tokens, checkpoint.config.context_tokens)
            dtype = dtype_of_weights(checkpoint.config, args.dtype, device)
            if args.ep > 1:
                check_ranks(checkpoint.config, args.ep, args.ep_redundant)
            print(json.dumps(asdict(ServedAs(device=device, dtype=dtype))))
        else:
            print(checkpoint.path)
    except (config.ModelFileError, UnsupportedModelError) as error:
        raise SettingsError(str(error)) from error
    return 0


async def _serve_alone(config: ServeSettings) -> int:
    """`serve` in a process that does nothing else: the signals end it whatever happens."""
    from headrace import _core

    stop = StopSignals()
    drain_s = config.drain_timeout_s + ROUTER_STOP_S + WORKER_STOP_S
    _core.end_on_signals(stop.numbers, drain_s + STOP_OVERDUE_S)
    return await serve(config, stop)


async def serve(config: ServeSettings, stop: StopSignals) -> int:
    """Start everything, keep it running, and stop it in order; the exit status."""
    began = time.monotonic()
    processes = [one for name in config.names for one in config.members(name)]
    log = Printer(["headrace", "router", *config.names, *processes])
    served_as = await fetch_model(config, stop, log)
    if isinstance(served_as, int):
        return served_as
    with private_folder() as folder:
        config = replace(config, admin=folder / "admin.sock")
        if folder.parent != parents()[0]:
            log("headrace", f"{parents()[0]} takes nothing: the socket is in {folder}")
        router = Keeper(router_command(config, folder), log)
        workers = [
            worker_keeper(config, worker_command(config, folder, name, role), log)
            for name, role in zip(config.names, config.roles, strict=True)
        ]
        of_ranks = "" if config.ranks == 1 else f", each of {config.ranks} ranks"
        log("headrace", f"starting the router, {', '.join(config.names)}{of_ranks}")
        running = {asyncio.create_task(k.run(), name=k.command.name): k for k in (router, *workers)}
        watcher = asyncio.create_task(announce(config, served_as, router, workers, log, began))
        try:
            failed = await until_stop_or_failure(config, running, router, watcher, stop, log)
            if failed is None:
                log(
                    "headrace",
                    "stopping: running answers may finish; Ctrl-C again ends them within 2 s",
                )
                await stop_in_order(running, router, config.drain_timeout_s, stop)
        finally:
            watcher.cancel()
            for keeper in running.values():
                keeper.kill()
            await asyncio.gather(watcher, *running, return_exceptions=True)
    log("headrace", "stopped")
    if failed is not None:
        return failed
    return 128 + stop.last_signal if stop.now.is_set() else 0


async def fetch_model(config: ServeSettings, stop: StopSignals, log: Printer) -> ServedAs | int:
    """Get the model once, before the workers ask for it; what they make of it, or the exit status if that failed.

    A process of its own: it keeps us free of what reading a model imports, and shows its progress
    on our terminal. Its group is its own too, so that the download ends with it.
    """
    log("headrace", f"model: {config.model or 'the default, SmolLM2-135M-Instruct'}")
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "headrace", "fetch", "--for=serve"),
        *(f"--device={config.device}", f"--dtype={config.dtype}"),
        *(f"--ep={config.ranks}", f"--ep-redundant={config.redundant}"),
        *([] if config.context_tokens is None else [f"--context-tokens={config.context_tokens}"]),
        *([] if config.model is None else ["--", config.model]),
        env=os.environ | supervised(),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        process_group=0,
    )
    ended = asyncio.create_task(process.communicate())
    asked = asyncio.create_task(stop.soon.wait())
    try:
        await asyncio.wait({ended, asked}, return_when=asyncio.FIRST_COMPLETED)
        if asked.done():
            return 128 + stop.last_signal
        found, _ = ended.result()
        if process.returncode:
            return process.returncode
        return ServedAs(**json.loads(found))
    finally:
        asked.cancel()
        if not ended.done():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await ended


async def until_stop_or_failure(
    config: ServeSettings,
    running: dict[asyncio.Task[None], Keeper],
    router: Keeper,
    watcher: asyncio.Task[None],
    stop: StopSignals,
    log: Printer,
) -> int | None:
    """Return None when asked to stop, the exit status when nothing is left that could serve.

    A worker that is given up leaves the service to the others.
    """
    asked = asyncio.create_task(stop.soon.wait())
    left = dict(running)
    waiting: set[asyncio.Task[Any]] = {asked, watcher, *left}
    try:
        while True:
            done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            if asked in done:
                return None
            for task in done:
                keeper = left.pop(task, None)
                log("headrace", f"error: {_reason(task)}")
                still = {one.command.name for one in left.values()} & config.generating
                if keeper is None or keeper is router or not still:
                    error = task.exception()
                    return error.status if isinstance(error, ToldWrongError) else 1
                log("headrace", f"going on without {keeper.command.name}")
    finally:
        asked.cancel()


def _reason(task: asyncio.Task[Any]) -> str:
    error = task.exception()
    if error is None or isinstance(error, GaveUpError):
        return str(error or f"{task.get_name()} ended")
    raise error  # our own mistake: with its traceback


async def stop_in_order(
    running: dict[asyncio.Task[None], Keeper], router: Keeper, drain_s: float, stop: StopSignals
) -> None:
    """Router first, which drains; then the workers, which it no longer needs.

    The other way round answers would be lost: a worker that drains takes nothing new, and the router may still have
    requests that wait, prompts whose answer belongs on another worker, and choices that are not placed yet. The
    workers see their router leave in good order, which is no warning for either side.

    After a second signal the router ends its answers with an error, while the workers are still there. Whatever is left
    when this returns is to be killed.
    """
    now = asyncio.create_task(stop.now.wait())
    try:
        for group, wait_s in (
            ([t for t, k in running.items() if k is router], drain_s + ROUTER_STOP_S),
            ([t for t, k in running.items() if k is not router], WORKER_STOP_S),
        ):
            for task in group:
                running[task].stop()
            waiting: set[asyncio.Task[Any]] = {t for t in group if not t.done()}
            give_up_at = time.monotonic() + wait_s
            while waiting and not now.done() and time.monotonic() < give_up_at:
                done, _ = await asyncio.wait(
                    {now, *waiting},
                    timeout=give_up_at - time.monotonic(),
                    return_when=asyncio.FIRST_COMPLETED,
                )
                waiting -= done
            if now.done():
                router.hurry()
                routers = [t for t, k in running.items() if k is router]
                await asyncio.wait(routers, timeout=ROUTER_HURRY_S)
                return
    finally:
        now.cancel()


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
    export, key = key_lines(config.router_argv)
    print(
        f"\nHeadrace is ready after {seconds:.1f} s: {config.url}\n"
        f"{model} in {served_as}{_quantised(config, served_as)}\n\n{export}"
        f"  curl -N {config.url}/v1/chat/completions -H 'Content-Type: application/json' \\\n{key}"
        f"    -d '{body}'\n"
        f"  headrace chat --url {config.url}\n",
        flush=True,
    )


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


def router_command(config: ServeSettings, folder: Path) -> Command:
    return Command(
        name="router",
        argv=[
            *(sys.executable, "-m", "headrace", "router"),
            *config.router_argv,
            f"--port={config.port}",
            *worker_addresses(config, folder / "router.sock"),
            f"--admin-listen=unix:{folder / 'admin.sock'}",
        ],
        env=secret_env(config),
    )


def worker_addresses(config: ServeSettings, private: Path) -> list[str]:
    """Where workers dial in: ours at a private socket, and others where we were told to let them in."""
    if config.worker_listen is None:
        return [f"--worker-listen=unix:{private}"]
    return [f"--worker-listen={config.worker_listen}", f"--worker-socket={private}"]


def secret_env(config: ServeSettings) -> dict[str, str]:
    """The secret of workers that nobody typed, for the children."""
    return {} if config.secret is None else {"HEADRACE_SECRET": config.secret}


def worker_command(config: ServeSettings, folder: Path, name: str, role: str) -> Command:
    return Command(
        name=name,
        argv=[
            *(sys.executable, "-m", "headrace", "worker"),
            *config.worker_argv,
            f"--name={name}",
            f"--role={role}",
            f"--router=unix:{folder / 'router.sock'}",
        ],
        env={name: value for name, value in ONE_THREAD.items() if name not in os.environ}
        | {"WORLD_SIZE": "1"}  # whatever started us: `rank_commands` makes the groups here
        | secret_env(config),
    )


def worker_keeper(config: ServeSettings, command: Command, log: Printer) -> Keeper:
    """Keeps a worker running, all its ranks as one."""
    if config.ranks == 1:
        return Keeper(command, log)
    return Keeper(command, log, ranks=lambda: rank_commands(command, config.ranks))


def free_address(address: str) -> str:
    """`address`, with a free port where it is HOST:0. Raises SettingsError if the router could not listen there."""
    host, _, port = address.rpartition(":")
    if address.startswith("unix:"):
        return address
    return f"{host}:{free_port(host.strip('[]'), int(port))}"


def free_port(host: str, port: int) -> int:
    """`port`, or a free one for 0. Raises SettingsError if the router could not listen there.

    Chosen here rather than by the router, so that a restarted router listens where the first did.
    """
    try:
        kind, _, _, _, address = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(kind, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            probe.listen(1)
            return probe.getsockname()[1]
    except socket.gaierror as error:
        raise SettingsError(f"--host {host}: {error.strerror}") from error
    except OSError as error:
        why = error.strerror or str(error)
        raise SettingsError(f"cannot listen on {host}:{port}: {why}") from error
