"""The TCPStore at which the ranks of a group meet: who keeps it, how it is waited for, and what goes wrong with it."""

from __future__ import annotations

import contextlib
import errno
import logging
import socket
import time
from collections.abc import Callable, Generator
from datetime import timedelta

from torch.distributed import PrefixStore, Store, TCPStore

from headrace.errors import CannotRun
from headrace.worker.parallel.control import GroupFailed
from headrace.worker.parallel.environment import GroupEnvironment

log = logging.getLogger(__name__)

CALL_S = 60.0  # of one call to the store; calls that wait are short
DIAL_S = 5.0  # of one attempt to reach the store
SOONEST_LOOK_S, LATEST_LOOK_S = 0.02, 1.0  # between two looks
LOOKS = 8  # in the time that was waited so far: so waiting takes an eighth longer at most
SAY_S = (
    3.0  # after which a wait is told, and again each time that it has become so many times longer
)
SAY_AGAIN = 4


class WrongStoreAddress(CannotRun):
    """MASTER_ADDR and MASTER_PORT are no place where rank 0 can keep the store of its group."""


class Patience:
    """One wait for other ranks: looks become rarer, and the log says now and then what is waited for."""

    def __init__(self, rank: int, give_up_at: float) -> None:
        """`give_up_at` as `time.monotonic`."""
        self._rank = rank
        self._give_up_at = give_up_at
        self._began = time.monotonic()
        self._say_s = SAY_S

    def over(self) -> bool:
        return time.monotonic() > self._give_up_at

    @property
    def left_s(self) -> float:
        return max(self._give_up_at - time.monotonic(), 0.0)

    def pause(self, what: Callable[[], str]) -> None:
        """Until the next look. `what` is asked where it is to be told."""
        waited_s = time.monotonic() - self._began
        if waited_s >= self._say_s:
            self._say_s *= SAY_AGAIN
            log.warning(
                "rank %d has waited %.0f s for %s; it gives up in %.0f s",
                *(self._rank, waited_s, what(), self.left_s),
            )
        pause_s = min(max(waited_s / LOOKS, SOONEST_LOOK_S), LATEST_LOOK_S)
        time.sleep(min(pause_s, self.left_s + SOONEST_LOOK_S))


def open_store(environment: GroupEnvironment, give_up_at: float) -> Store:
    """The store, once somebody keeps it. Raises GroupFailed and WrongStoreAddress."""
    host, port = environment.host, environment.port
    prefix = f"headrace/{environment.run}/{environment.attempt}"
    within = timedelta(seconds=CALL_S)
    if environment.keeps_store:
        # listens at this one address: whoever reaches the store can read the token of the group
        listener = _listen(host, port)
        kept = TCPStore(
            host,
            port,
            is_master=True,
            timeout=within,
            wait_for_workers=False,
            master_listen_fd=listener,
        )
        return PrefixStore(prefix, kept)
    store = _found_store(environment, give_up_at)
    store.set_timeout(within)
    return PrefixStore(prefix, store)


def _listen(host: str, port: int) -> int:
    """A descriptor."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(socket.SOMAXCONN)
            return listener.detach()
    except (OSError, UnicodeError) as error:
        start = f"rank 0 cannot listen at MASTER_ADDR:MASTER_PORT {host}:{port}:"
        if isinstance(error, socket.gaierror | UnicodeError):
            raise WrongStoreAddress(
                f"{start} {host} has no address here ({_reason(error)}); give an address of this machine, on all ranks"
            ) from error
        if error.errno == errno.EADDRINUSE:  # perhaps by a group that is about to end
            raise GroupFailed(
                f"{start} another program has this port; give a MASTER_PORT that is free, on all ranks"
            ) from error
        if error.errno == errno.EADDRNOTAVAIL:
            raise WrongStoreAddress(
                f"{start} {host} is no address of this machine; give one that is, on all ranks"
            ) from error
        raise WrongStoreAddress(f"{start} {_reason(error)}") from error


def _reason(error: OSError | UnicodeError) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def _found_store(environment: GroupEnvironment, give_up_at: float) -> Store:
    """That of whoever keeps it. Torch is asked only where somebody listens: to ask sooner would fill the log."""
    host, port = environment.host, environment.port
    patience = Patience(environment.rank, give_up_at)
    who = "torchrun" if environment.store_is_there else "rank 0"
    while True:
        within_s = min(DIAL_S, patience.left_s + 0.1)
        try:
            socket.create_connection((host, port), within_s).close()
            return TCPStore(host, port, is_master=False, timeout=timedelta(seconds=within_s))
        except (OSError, UnicodeError) as error:
            found, cause = f"nobody listens at {{}} ({_reason(error)})", error
        except RuntimeError as error:  # torch.distributed has no narrower one for all of them
            found, cause = "what listens at {} is not the store of a group, or stands still", error
        where = found.format(f"MASTER_ADDR:MASTER_PORT {host}:{port}")
        if patience.over():
            raise GroupFailed(f"{who} did not come: {where}") from cause
        patience.pause(lambda where=where: f"{who}: {where}")


@contextlib.contextmanager
def store_errors(environment: GroupEnvironment) -> Generator[None]:
    """What torch raises where the store goes, in a line of ours."""
    try:
        yield
    except RuntimeError as error:  # torch.distributed has no narrower one for all of them
        where = f"{environment.host}:{environment.port}"
        first = (str(error).splitlines() or [type(error).__name__])[0]
        raise GroupFailed(f"the store of the group at {where} is gone: {first[:200]}") from error
