//! What the deployment secret turns into: the key of the block hash, and the proofs that two peers give each other. And
//! the keys that the router draws for pulls of KV.

use std::fmt;

use serde::{Deserialize, Serialize};

/// Key of the block hash. Equal in the router and in all its workers, unknown outside.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct HashKey(pub [u8; 32]);

impl HashKey {
    /// The key of a deployment with this secret.
    #[must_use]
    pub fn derive(secret: &[u8]) -> Self {
        Self(blake3::derive_key("headrace 2026-11 block hash key", secret))
    }
}

impl fmt::Debug for HashKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("HashKey(..)") // who reads a log must not be able to craft collisions
    }
}

/// Random key of one pull: the router gives it to the two workers that move the KV, and to nobody else. The ticket of the
/// pull is of use only with this key.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct PullKey(#[serde(with = "serde_bytes")] pub [u8; 32]);

impl fmt::Debug for PullKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("PullKey(..)") // who reads a log must not be able to pull
    }
}

/// Key of the proofs.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct AuthKey([u8; 32]);

impl fmt::Debug for AuthKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("AuthKey(..)")
    }
}

/// Who proves. Each side's proof is of no use to the other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Side {
    /// `Prove.proof`, over `Welcome.challenge`.
    Worker,
    /// `Welcome.proof`, over `Hello.nonce`.
    Router,
}

impl AuthKey {
    /// The key of a deployment with this secret.
    #[must_use]
    pub fn derive(secret: &[u8]) -> Self {
        Self(blake3::derive_key("headrace 2026-11 worker auth key", secret))
    }

    /// Proof that `side` knows the secret, for the random bytes that the other side sent.
    #[must_use]
    pub fn proof(&self, side: Side, challenge: &[u8]) -> [u8; 32] {
        *self.hash(side, challenge).as_bytes()
    }

    /// True if `proof` is the proof of `side` for `challenge`. Takes the same time for every wrong proof.
    #[must_use]
    pub fn verify(&self, side: Side, challenge: &[u8], proof: &[u8]) -> bool {
        // blake3::Hash compares in constant time
        <[u8; 32]>::try_from(proof)
            .is_ok_and(|proof| self.hash(side, challenge) == blake3::Hash::from(proof))
    }

    fn hash(&self, side: Side, challenge: &[u8]) -> blake3::Hash {
        let label: &[u8] = match side {
            Side::Worker => b"headrace worker",
            Side::Router => b"headrace router",
        };
        blake3::Hasher::new_keyed(&self.0).update(label).update(challenge).finalize()
    }
}
