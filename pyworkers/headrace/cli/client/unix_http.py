"""HTTP over a Unix socket, as the router serves its operators."""

from __future__ import annotations

import http.client
import socket
from pathlib import Path


class UnixConnection(http.client.HTTPConnection):
    """Like its base, to a socket's file rather than to a host and a port."""

    def __init__(self, path: Path | str, timeout: float) -> None:
        super().__init__("localhost", timeout=timeout)
        self.path = str(path)

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self.sock.settimeout(self.timeout)
            self.sock.connect(self.path)
        except BaseException:
            self.sock.close()
            raise
