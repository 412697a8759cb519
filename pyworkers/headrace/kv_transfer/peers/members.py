"""Who belongs here, and whose ticket it is.

Each end of a connection shows the other that one router has taken both of them. The key of the block hash is known to a
router, to the workers that it took, and to nobody else: they derive it from the deployment's secret, or get it with the
Welcome of a router that has none. A proof is of use to one end, on one connection, for one ticket: both ends' nonces
and the ticket are part of it.

A ticket goes over connections that others may read, so a worker that has it need not be the one it was meant for. The
router draws a pull key for each ticket and gives it to the two workers concerned, over their own links. `pull_proof` is
an HMAC by the pull key over what was made with the key of the block hash on this connection, so it takes both keys. All
workers have the one, and whoever reads a link without TLS has the other: neither alone lets anybody pull.
"""

from __future__ import annotations

import hmac
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

NONCE_BYTES: Final = 16
PROOF_BYTES: Final = 32
# Of routers without a secret each has a key of its own. A worker has links to few routers; those joined last count.
MAX_KEYS: Final = 16

# Of the same length, and none of them is the other's: a proof that is sent back proves nothing.
_PULLER: Final = b"headrace kv puller 2"
_SOURCE: Final = b"headrace kv source 2"
_SHARED: Final = b"headrace kv shared 2"
_PULL: Final = b"headrace kv ticket 2"


@dataclass(frozen=True, slots=True)
class Transcript:
    """What one handshake is about. All three have a fixed length, so no two of them give the same bytes."""

    puller_nonce: bytes
    source_nonce: bytes
    ticket: bytes

    def proof(self, side: bytes, key: bytes) -> bytes:
        message = side + self.puller_nonce + self.source_nonce + self.ticket
        return hmac.digest(key, message, "sha256")


@dataclass(frozen=True, slots=True)
class SourceAnswer:
    """What a source has for a puller whose proof was right."""

    proof: bytes  # the source's own
    # By the same key, for `pull_proof`: both ends know it, and it is never sent.
    shared: bytes = field(repr=False)


def pull_proof(pull_key: bytes, by_member: bytes, ticket: bytes) -> bytes:
    """That the puller has the ticket's pull key, too.

    `by_member` was made with the key of the block hash on this connection. In the handshake it is all proofs that go
    with this one, as the puller does not know yet which of its keys the source knows. After that it is the value that
    both share (`SourceAnswer.shared`).
    """
    return hmac.digest(pull_key, _PULL + by_member + ticket, "sha256")


class Members:
    """The keys of the routers that this worker has links to; without any, nobody belongs here."""

    def __init__(self, hash_keys: Iterable[bytes] = ()) -> None:
        self._keys: list[bytes] = []
        self.trust(hash_keys)

    def trust(self, hash_keys: Iterable[bytes]) -> None:
        """Those and no others, from now on; the last ones if there are too many."""
        self._keys = list(dict.fromkeys(hash_keys))[-MAX_KEYS:]

    def puller_proofs(self, transcript: Transcript) -> list[bytes]:
        """One for each key: which of them the source knows is not for strangers to hear."""
        return [transcript.proof(_PULLER, key) for key in self._keys]

    def answer(self, transcript: Transcript, proofs: Sequence[bytes]) -> SourceAnswer | None:
        """The source's answer, by the key that one of the puller's proofs was made with; None if none was."""
        for key in self._keys:
            expected = transcript.proof(_PULLER, key)
            if any(hmac.compare_digest(expected, proof) for proof in proofs):
                return SourceAnswer(transcript.proof(_SOURCE, key), transcript.proof(_SHARED, key))
        return None

    def shared(self, transcript: Transcript, proof: bytes) -> bytes | None:
        """What the puller shares with the source that has made `proof`; None if no source has."""
        for key in self._keys:
            if hmac.compare_digest(transcript.proof(_SOURCE, key), proof):
                return transcript.proof(_SHARED, key)
        return None
