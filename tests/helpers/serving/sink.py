"""A program that only reads: what a client sends costs others as much beside it as beside any server.

    python -m helpers.serving.sink SOCKET

listens on that Unix socket and on a port of 127.0.0.1, which it prints. It reads to the end of what comes; a request
with a `Content-Length` gets an answer after so many bytes. It ends with its standard input.
"""

from __future__ import annotations

import contextlib
import re
import socket
import sys
import threading

READ_BYTES = 64 << 10
ANSWER = b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


def main() -> None:
    unix = socket.socket(socket.AF_UNIX)
    unix.bind(sys.argv[1])
    tcp = socket.socket()
    tcp.bind(("127.0.0.1", 0))
    for listener in (unix, tcp):
        listener.listen(128)
        threading.Thread(target=accept, args=(listener,), daemon=True).start()
    print(tcp.getsockname()[1], flush=True)
    sys.stdin.read()


def accept(listener: socket.socket) -> None:
    while True:
        connection, _ = listener.accept()
        threading.Thread(target=read, args=(connection,), daemon=True).start()


def read(connection: socket.socket) -> None:
    """All that comes on a connection."""
    buffer = bytearray(READ_BYTES)
    with connection, contextlib.suppress(OSError):
        got = connection.recv_into(buffer)
        announced = re.search(rb"\r\nContent-Length: (\d+)\r\n", buffer[:got])
        body = buffer.find(b"\r\n\r\n", 0, got) + 4
        left = int(announced[1]) - (got - body) if announced else None
        while got and (left is None or left > 0):
            got = connection.recv_into(buffer)
            left = None if left is None else left - got
        if left is not None:
            connection.sendall(ANSWER)


if __name__ == "__main__":
    main()
