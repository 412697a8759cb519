"""The Rust side of Headrace. stubtest compares this file with the build."""

from typing import Any, Final, Literal, final

__all__ = [
    "HASH_SCHEME",
    "Router",
    "auth_proof",
    "decode_frame",
    "derive_hash_key",
    "encode_frame",
    "hash_blocks",
    "router_main",
]

HASH_SCHEME: Final = "blake3-chain-v1"
"""Name of the block hash, for `Fingerprints.hash_scheme`."""

def hash_blocks(
    tokens: bytes,
    block_tokens: int,
    key: bytes,
    salt: bytes | None = None,
    parent: bytes | None = None,
) -> list[bytes]:
    """Chained hashes (16 bytes each) of the full blocks of `tokens`, u32 little-endian.

    `key` has 32 bytes. The chain begins at the root of `salt`, or goes on from the block `parent`;
    giving both is a ValueError. The first 8 bytes of a hash are the block key of the events.
    """

def derive_hash_key(secret: bytes) -> bytes:
    """Key of the block hash in a deployment with this secret, 32 bytes."""

def auth_proof(secret: bytes, side: Literal["worker", "router"], challenge: bytes) -> bytes:
    """Proof (32 bytes) that `side` knows the secret, for the random bytes the other side sent."""

def encode_frame(frame: dict[str, dict[str, Any]]) -> bytes:
    """The body of a frame given as `{"Ping": {"nonce": 1}}`. Raises WireError."""

def decode_frame(body: bytes) -> dict[str, dict[str, Any]]:
    """The frame with this body, as `encode_frame` takes it. Raises a subclass of WireError."""

def router_main(argv: list[str]) -> int:
    """Run the program `headrace-router` with these arguments, the first of which is its name.

    Returns its exit status once a signal has ended it. Only for the main thread of a process that
    does nothing else: the handler of SIGINT is taken away.
    """

@final
class Router:
    """A router in this process, on threads of its own; the same code as `headrace-router`.

    `args` holds the flags of `headrace router` with underscores, such as `{"port": 0}`. What is
    wrong raises ConfigError. Dropping a running router ends it at once.
    """

    def __new__(cls, args: dict[str, Any], /) -> Router: ...
    def start(self) -> None:
        """Bind both addresses and serve. Raises StartError, after which it can be tried again."""

    @property
    def address(self) -> str:
        """HOST:PORT for clients, with the port that was taken. RuntimeError before the start."""

    @property
    def worker_address(self) -> str:
        """Where workers dial in, HOST:PORT or unix:PATH. RuntimeError before the start."""

    def wait(self, timeout_s: float | None = None) -> bool:
        """True once the router has ended, False after the time-out. Ctrl-C gets through."""

    def stop(self, timeout_s: float | None = None) -> bool:
        """Drain, then end: after `timeout_s`, or else after the configured drain time-out.

        True if all that ran was finished in time. Stopping again does nothing.
        """
