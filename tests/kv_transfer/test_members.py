"""Proofs that two workers are of one router: what they hold for, and what they do not."""

from __future__ import annotations

import dataclasses
import secrets

import pytest

from headrace.kv_transfer.backends.base import TICKET_BYTES
from headrace.kv_transfer.peers.members import (
    MAX_KEYS,
    NONCE_BYTES,
    PROOF_BYTES,
    Members,
    Transcript,
    pull_proof,
)

KEY, OTHER = b"k" * 32, b"o" * 32


def transcript() -> Transcript:
    nonces = secrets.token_bytes(NONCE_BYTES), secrets.token_bytes(NONCE_BYTES)
    return Transcript(*nonces, secrets.token_bytes(TICKET_BYTES))


def test_two_workers_of_one_router_recognise_each_other() -> None:
    puller, source = Members([OTHER, KEY]), Members([KEY])
    about = transcript()
    answer = source.answer(about, puller.puller_proofs(about))
    assert answer is not None
    assert len(answer.proof) == len(answer.shared) == PROOF_BYTES
    assert puller.shared(about, answer.proof) == answer.shared


@pytest.mark.parametrize("keys", [[], [OTHER]])
def test_workers_of_other_routers_do_not(keys: list[bytes]) -> None:
    about = transcript()
    assert Members([KEY]).answer(about, Members(keys).puller_proofs(about)) is None
    assert Members(keys).answer(about, Members([KEY]).puller_proofs(about)) is None
    proof = Members([KEY]).answer(about, Members([KEY]).puller_proofs(about))
    assert proof is not None
    assert Members(keys).shared(about, proof.proof) is None


@pytest.mark.parametrize("field", ["puller_nonce", "source_nonce", "ticket"])
def test_a_proof_is_for_one_connection_and_one_ticket(field: str) -> None:
    members, about = Members([KEY]), transcript()
    other = dataclasses.replace(about, **{field: getattr(transcript(), field)})
    proofs = members.puller_proofs(about)
    assert members.answer(other, proofs) is None
    answer = members.answer(about, proofs)
    assert answer is not None
    assert members.shared(other, answer.proof) is None


def test_a_proof_sent_back_proves_nothing() -> None:
    members, about = Members([KEY]), transcript()
    (proof,) = members.puller_proofs(about)
    assert members.shared(about, proof) is None
    answer = members.answer(about, [proof])
    assert answer is not None
    assert members.answer(about, [answer.proof]) is None
    mirrored = Transcript(about.source_nonce, about.puller_nonce, about.ticket)
    assert members.answer(mirrored, [proof, answer.proof]) is None


@pytest.mark.parametrize("proofs", [[], [b""], [bytes(PROOF_BYTES)], [b"x" * 31, b"x" * 33]])
def test_what_is_no_proof(proofs: list[bytes]) -> None:
    members, about = Members([KEY]), transcript()
    assert members.answer(about, proofs) is None
    assert all(members.shared(about, proof) is None for proof in proofs)


def test_only_the_keys_of_now_count_and_not_too_many_of_them() -> None:
    members, about = Members([KEY]), transcript()
    old = members.puller_proofs(about)
    members.trust([])
    assert members.puller_proofs(about) == []
    assert members.answer(about, old) is None
    members.trust(bytes([number]) * 32 for number in range(MAX_KEYS + 3))
    assert len(members.puller_proofs(about)) == MAX_KEYS
    newest = Members([bytes([MAX_KEYS + 2]) * 32])
    assert members.answer(about, newest.puller_proofs(about)) is not None
    members.trust([KEY] * 3)
    assert members.puller_proofs(about) == old


def test_a_pull_proof_takes_both_keys_and_is_for_one_ticket() -> None:
    parts = [b"p" * 32, b"m" * 32, b"t" * TICKET_BYTES]
    proof = pull_proof(*parts)
    assert pull_proof(*parts) == proof
    assert len(proof) == PROOF_BYTES
    for place in range(3):
        others = [*parts]
        others[place] = bytes(len(others[place]))
        assert pull_proof(*others) != proof


def test_what_both_ends_share_is_of_one_connection_and_none_of_the_proofs() -> None:
    members, about = Members([KEY]), transcript()
    proofs = members.puller_proofs(about)
    met, again = members.answer(about, proofs), transcript()
    other = members.answer(again, members.puller_proofs(again))
    assert met is not None
    assert other is not None
    assert len({met.shared, met.proof, other.shared, other.proof, *proofs}) == 5
