"""Who belongs here: each end of a connection shows the other that one router has taken both of them.

The key of the block hash is known to a router, to the workers that it took, and to nobody else: they derive it from the
deployment's secret, or get it with the Welcome of a router that has none. A proof is of use to one end, on one
connection, for one ticket: both ends' nonces and the ticket are part of it.
"""

from __future__ import annotations

import hmac
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

NONCE_BYTES: Final = 16
PROOF_BYTES: Final = 32
# Of routers without a secret each has a key of its own. A worker has links to few routers; those joined last count.
MAX_KEYS: Final = 16

# Of the same length, and none of them is the other's: a proof that is sent back proves nothing.
_PULLER: Final = b"headrace kv puller 2"
_SOURCE: Final = b"headrace kv source 2"


@dataclass(frozen=True, slots=True)
class Transcript:
    """What one handshake is about. All three have a fixed length, so no two of them give the same bytes."""

    puller_nonce: bytes
    source_nonce: bytes
    ticket: bytes

    def proof(self, side: bytes, key: bytes) -> bytes:
        message = side + self.puller_nonce + self.source_nonce + self.ticket
        return hmac.digest(key, message, "sha256")


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

    def answer(self, transcript: Transcript, proofs: Sequence[bytes]) -> bytes | None:
        """The source's own proof, by the key that one of the puller's was made with; None if none was."""
        for key in self._keys:
            expected = transcript.proof(_PULLER, key)
            if any(hmac.compare_digest(expected, proof) for proof in proofs):
                return transcript.proof(_SOURCE, key)
        return None

    def is_source(self, transcript: Transcript, proof: bytes) -> bool:
        """Whether `proof` is one that the source has made."""
        made = [transcript.proof(_SOURCE, key) for key in self._keys]
        return any(hmac.compare_digest(one, proof) for one in made)
