"""`headrace serve`: one router and its workers on this machine, supervised.

A Unix socket joins them. It lives in a private folder and goes when we go, or with the next start. The
secret that lets workers join is in the environment of the children: a file would need a disk with room,
and stay behind where we are killed. Logs go to stderr under the name of their process; stdout gets the URL.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import secrets
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from headrace import logs
from headrace.cli.config_file import InForce, given
from headrace.cli.console import Printer, StopSignals
from headrace.cli.private_folder import parents, private_folder
from headrace.cli.serving.announce import announce
from headrace.cli.serving.commands import router_command, worker_command, worker_keeper
from headrace.cli.serving.config import ServeSettings, free_address, free_port
from headrace.cli.serving.model import fetch_model
from headrace.cli.supervise import GaveUpError, Keeper, ToldWrongError
from headrace.errors import MissingExtra
from headrace.settings import router
from headrace.settings.fleet import FleetSettings
from headrace.settings.parallel import refuse_without_group
from headrace.settings.table import typed, values_of
from headrace.settings.worker import worker_argv, worker_settings

ROUTER_STOP_S = 10.0  # after its drain; it ends by itself within 8 s
WORKER_STOP_S = 10.0  # with no router left, a worker has nothing to finish
STOP_OVERDUE_S = 5.0  # after all that, this process is ended
# After a second signal, for the router to end each answer with an error. This process itself is ended after 2 s
# (`router/src/process/signals.rs`), and has to tidy up before.
ROUTER_HURRY_S = 1.7


def run(args: argparse.Namespace, usage: str) -> int:
    """Serve until told to stop. Raises SettingsError, ConfigError and MissingExtra before anything was started."""
    kept = typed(args)
    worker = worker_settings(args)
    fleet = FleetSettings(**values_of(FleetSettings, args))
    if (fleet.ep or 1) == 1:
        refuse_without_group(kept)
    router.check_router(kept, usage)
    package, extra = ("numpy", "cpu") if (fleet.ep or 1) == 1 else ("torch", "worker")
    if importlib.util.find_spec(package) is None:
        raise MissingExtra(package, extra, "" if package == "numpy" else "--ep")
    host = router.value_of(kept, "--host")
    worker_listen = kept.last(router.WORKER_LISTEN)
    reads, config_argv = file_of_router(given(args))
    checked = ServeSettings(
        host=host,
        port=free_port(host, int(router.value_of(kept, "--port"))),
        roles=fleet.roles(),
        model=worker.model,
        worker_argv=worker_argv(args),
        router_argv=[*kept.argv(router.handed_on(reads)), *config_argv],
        router_reads=tuple(reads),
        worker_listen=worker_listen and free_address(worker_listen),
        drain_timeout_s=int(router.value_of(kept, "--drain-timeout-ms")) / 1000,
        device=worker.device,
        dtype=worker.dtype,
        context_tokens=worker.context_tokens,
        ranks=fleet.ep or 1,
        redundant=worker.ep_redundant,
        rebalances=worker.ep_rebalance_rounds > 0,
        secret=None if router.workers_know(kept) else secrets.token_hex(32),
    )
    logs.never_wait(stdout=True)
    return asyncio.run(_serve_alone(checked))


def file_of_router(found: InForce) -> tuple[list[str], list[str]]:
    """Flags that the router is to read from the file, now and again at SIGHUP, and what has it do so.

    What cannot be read twice, such as a pipe, is not for the router.
    """
    if found.path is None or not Path(found.path).is_file():
        return [], []
    changing = [flag.name for flag in router.serve_flags() if flag.reloads]
    return [name for name in changing if name in found.file], [
        f"--config={found.path}",
        "--config-table=serve",
    ]


async def _serve_alone(config: ServeSettings) -> int:
    """`serve` in a process that does nothing else: the signals end it whatever happens."""
    from headrace import _core

    stop = StopSignals(nothing_to_reload if config.reloads else None)
    drain_s = config.drain_timeout_s + ROUTER_STOP_S + WORKER_STOP_S
    _core.end_on_signals(stop.ending, drain_s + STOP_OVERDUE_S)
    return await serve(config, stop)


def nothing_to_reload() -> None:
    """SIGHUP before the router was started, which will read its files as they are then."""


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
        if stop.reload is not None:
            stop.reload = router.reload
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
