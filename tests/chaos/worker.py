"""Real workers, started quickly: one process imports everything, and forks a `headrace worker` for each that is wanted.

    python -m chaos.worker CONTROL_SOCKET HOST

Forked after torch is imported and before it has threads, a worker is up in a fraction of a second: that is what makes
hundreds of deaths in ten minutes possible. What runs in the child is the command line's own `main`, with `seams` around
it.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import select
import signal
import socket
import sys
import threading
import traceback
from typing import Any

from chaos.inside.rank_steps import install_rank, is_rank
from chaos.inside.seams import Control, Seams
from chaos.inside.steps import install
from headrace import logs

PR_SET_PDEATHSIG = 1
PRELOADED = (
    "uvloop",
    "headrace.cli.main",
    "headrace.worker.main",
    "headrace.worker.worker",
    "headrace.models.deepseek",
    "headrace.models.llama",
    "headrace_kernels.native",
    "headrace_kernels.transport.gloo",
    "headrace_kernels.transport.shared_memory",
)


def main(path: str, host: str) -> None:
    """Fork workers until the harness closes the connection; then end them all."""
    _preload()
    assert threading.active_count() == 1, "a fork would lose threads"
    control = Control(path, host, host=True)
    harness = control._socket
    wake, waker = socket.socketpair()
    wake.setblocking(False)
    waker.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(waker.fileno())
    names: dict[int, str] = {}
    rest = b""
    while True:
        ready, _, _ = select.select([harness, wake], [], [])
        if wake in ready:
            wake.recv(4096)
            _report_ended(control, names)
        if harness in ready:
            data = harness.recv(65_536)
            if not data:
                break
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                command = json.loads(line)
                pid = _fork(path, command, [harness, wake, waker])
                names[pid] = command["name"]
    signal.set_wakeup_fd(-1)
    for pid in names:
        os.kill(pid, signal.SIGKILL)


def _preload() -> None:
    for name in PRELOADED:
        importlib.import_module(name)


def _report_ended(control: Control, names: dict[int, str]) -> None:
    while names:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        code = os.waitstatus_to_exitcode(status)
        control.send(event="ended", name=names.pop(pid), pid=pid, status=code)


def _fork(path: str, command: dict[str, Any], ours: list[socket.socket]) -> int:
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)
        for inherited in ours:
            inherited.close()
        log = os.open(command["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.environ.update(command.get("env", {}))
        status = _work(path, command["name"], command["argv"])
    except BaseException:
        traceback.print_exc()
        status = 1
    return logs.end_process(status)


def _work(path: str, name: str, argv: list[str]) -> int:
    from headrace.cli import main

    control = Control(path, name)
    seams = Seams(control)
    if is_rank():
        install_rank(seams)
    else:
        install(seams)
    control.listen(seams.command)
    return main.main(["worker", *argv])


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
