"""Links between rank 0 and each other rank: who may join them, and how bytes become messages.

A rank greets with the epoch and the token that rank 0 gave out where the group met. Whoever has another epoch belongs
to an earlier start of the group; a rank joins once.
"""

from __future__ import annotations

import contextlib
import hmac
import select
import selectors
import socket
import tempfile
import time
from collections.abc import Generator
from dataclasses import dataclass, field
from pathlib import Path

from headrace.errors import HeadraceError
from headrace.worker.parallel import messages
from headrace.worker.parallel.messages import RANK, BadMessage, Kind, Message, Messages

GREETING_S = 5.0  # for the first message on a link; a guess
READ_BYTES = 1 << 16
POLL_S = 0.2  # between looks whether somebody gave up meanwhile


class GroupFailed(HeadraceError):
    """The group did not come together, or ended. One line that names the rank; another start may help."""


class ControlBroken(Exception):
    """The other end of a control link is gone, or says what it must not. The text follows the name of the rank."""


@dataclass(slots=True, eq=False)
class ControlLink:
    """One end of a link. The socket never blocks."""

    socket: socket.socket
    received: Messages = field(default_factory=Messages)

    def __post_init__(self) -> None:
        self.socket.setblocking(False)
        if self.socket.family != socket.AF_UNIX:
            self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)

    def read(self) -> list[Message]:
        """What is there. Raises ControlBroken."""
        try:
            data = self.socket.recv(READ_BYTES)
        except (BlockingIOError, InterruptedError):
            return []
        except OSError as error:
            raise ControlBroken(_ended(error)) from error
        if not data:
            within = " inside of a message" if self.received.partial else ""
            raise ControlBroken(f"ended its control link{within}")
        try:
            return self.received.feed(data)
        except BadMessage as error:
            raise ControlBroken(f"sent {error}") from error

    def send(self, data: bytes, timeout_s: float) -> None:
        """All of it. Raises ControlBroken where the other end does not take it in time."""
        give_up_at = time.monotonic() + timeout_s
        rest = memoryview(data)
        while True:
            try:
                rest = rest[self.socket.send(rest) :]
            except BlockingIOError:
                left_s = give_up_at - time.monotonic()
                if left_s <= 0 or not _writable(self.socket, left_s):
                    raise ControlBroken(f"has taken no message for {timeout_s:g} s") from None
            except OSError as error:
                raise ControlBroken(_ended(error)) from error
            if not rest:
                return

    @property
    def takes_more(self) -> bool:
        """A short message would go out at once."""
        return _writable(self.socket, 0.0)

    def close(self) -> None:
        self.socket.close()


def _ended(error: OSError) -> str:
    if isinstance(error, ConnectionResetError | BrokenPipeError):
        return "ended its control link"
    return f"broke its control link: {error.strerror or error}"


def _writable(one: socket.socket, timeout_s: float) -> bool:
    poll = select.poll()
    poll.register(one, select.POLLOUT)
    return len(poll.poll(timeout_s * 1e3)) > 0


@contextlib.contextmanager
def listening(host: str | None) -> Generator[tuple[socket.socket, str]]:
    """A socket for ranks to dial, and its address: at `host`, or where all ranks are on this machine a Unix socket."""
    if host is None:
        with tempfile.TemporaryDirectory(prefix="headrace-group-") as folder:
            path = Path(folder) / "control.sock"
            with socket.socket(socket.AF_UNIX) as listener:
                listener.bind(str(path))
                listener.listen(socket.SOMAXCONN)
                yield listener, f"unix:{path}"
        return
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as listener:
        listener.bind((host, 0))
        listener.listen(socket.SOMAXCONN)
        yield listener, f"{host}:{listener.getsockname()[1]}"


def accept_ranks(
    listener: socket.socket, ranks: int, epoch: int, token: bytes, give_up_at: float
) -> dict[int, ControlLink]:
    """Rank 0: a link to each other rank. Raises GroupFailed where one does not come until `give_up_at` (monotonic)."""
    joined: dict[int, ControlLink] = {}
    listener.setblocking(False)
    with selectors.DefaultSelector() as selector:
        selector.register(listener, selectors.EVENT_READ)
        strangers: dict[ControlLink, float] = {}  # that have not greeted, and when they came

        def drop(link: ControlLink) -> None:
            selector.unregister(link.socket)
            del strangers[link]

        try:
            while len(joined) < ranks - 1:
                now = time.monotonic()
                if now > give_up_at:
                    missing = [rank for rank in range(1, ranks) if rank not in joined]
                    raise GroupFailed(
                        f"{named(missing)} met the group and then did not dial rank 0"
                    )
                for key, _ in selector.select(POLL_S):
                    if key.fileobj is listener:
                        _welcome_stranger(listener, selector, strangers, most=2 * ranks + 8)
                        continue
                    link: ControlLink = key.data
                    try:
                        rank = _greeted(link, joined, ranks, epoch, token)
                    except ControlBroken as error:
                        drop(link)
                        _refuse(link, f"this link {error}")
                    else:
                        if rank is not None:
                            drop(link)
                            joined[rank] = link
                for link, since in list(strangers.items()):
                    if now - since > GREETING_S:
                        drop(link)
                        _refuse(link, f"no greeting came within {GREETING_S:g} s")
        except BaseException:
            for link in joined.values():
                link.close()
            raise
        finally:
            for link in strangers:
                link.close()
    return joined


def _welcome_stranger(
    listener: socket.socket,
    selector: selectors.BaseSelector,
    strangers: dict[ControlLink, float],
    most: int,
) -> None:
    try:
        accepted, _ = listener.accept()
    except OSError:
        return
    if len(strangers) >= most:
        accepted.close()
        return
    link = ControlLink(accepted)
    strangers[link] = time.monotonic()
    selector.register(accepted, selectors.EVENT_READ, link)


def _greeted(
    link: ControlLink, joined: dict[int, ControlLink], ranks: int, epoch: int, token: bytes
) -> int | None:
    """The rank that greets, once its greeting is whole. Raises ControlBroken for whoever may not join."""
    found = link.read()
    if not found:
        return None
    first = found[0]
    if first.kind != Kind.GREET or len(found) > 1 or len(first.body) != RANK.size + len(token):
        raise ControlBroken("did not begin with a greeting")
    (rank,) = RANK.unpack_from(first.body)
    if first.number != epoch:
        raise ControlBroken(
            f"is of rank {rank} of an earlier start of this group: epoch {first.number}, not {epoch}"
        )
    if not hmac.compare_digest(first.body[RANK.size :], token):
        raise ControlBroken(f"of rank {rank} lacks the token of this group")
    if not 1 <= rank < ranks:
        raise ControlBroken(f"is of rank {rank} of {ranks}")
    if rank in joined:
        raise ControlBroken(f"is of a second rank {rank}")
    link.send(Message(Kind.GREETED, epoch).packed(), GREETING_S)
    return rank


def _refuse(link: ControlLink, why: str) -> None:
    with contextlib.suppress(ControlBroken):
        link.send(messages.text(Kind.REFUSED, 0, why).packed(), 0.0)
    link.close()


def dial_rank_0(
    address: str, rank: int, epoch: int, token: bytes, give_up_at: float
) -> ControlLink:
    """The link of any other rank. Raises GroupFailed."""
    left_s = max(give_up_at - time.monotonic(), 0.1)
    try:
        if address.startswith("unix:"):
            dialled = _connect_unix(address.removeprefix("unix:"), left_s)
        else:
            host, _, port = address.rpartition(":")
            dialled = socket.create_connection((host, int(port)), left_s)
    except (OSError, ValueError, OverflowError) as error:  # such as a port that cannot be
        why = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise GroupFailed(f"rank 0 cannot be reached at {address[:200]}: {why}") from error
    link = ControlLink(dialled)
    try:
        link.send(messages.greet(rank, epoch, token).packed(), left_s)
        while not (found := link.read()):
            if time.monotonic() > give_up_at:
                raise GroupFailed(f"rank 0 did not answer rank {rank} at {address}")
            select.select([dialled], [], [], POLL_S)
    except ControlBroken as error:
        link.close()
        raise GroupFailed(f"rank 0 {error}, when rank {rank} dialled it") from error
    except BaseException:
        link.close()
        raise
    if found[0].kind != Kind.GREETED or len(found) > 1:
        link.close()
        raise GroupFailed(f"rank 0 refused rank {rank}: {found[0].body.decode(errors='replace')}")
    return link


def _connect_unix(path: str, timeout_s: float) -> socket.socket:
    dialled = socket.socket(socket.AF_UNIX)
    try:
        dialled.settimeout(timeout_s)
        dialled.connect(path)
    except BaseException:
        dialled.close()
        raise
    return dialled


def named(ranks: list[int]) -> str:
    """Such as "rank 2", or "ranks 2, 3 and 7"."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    shown = [str(rank) for rank in ranks[:20]]
    if len(ranks) > 20:
        return f"ranks {', '.join(shown)} and {len(ranks) - 20} more"
    return f"ranks {', '.join(shown[:-1])} and {shown[-1]}"
