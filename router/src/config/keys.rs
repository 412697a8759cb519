//! Keys of clients and of operators, kept as digests. `line` reads one, `files` all of them, now and again.

mod files;
mod line;

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::sync::Arc;

use super::flag;

pub(super) use files::read;
pub use files::{KeySet, KeySources, first_key};
pub(super) use line::Role;
pub use line::{KeyTerms, check_key_line};

/// Most keys of one kind. All of them are compared with what a client sent, in constant time: 4,096 take some 20 us.
const MOST_KEYS: usize = 4_096;

/// Keys of which one lets somebody in.
#[derive(Clone, Default)]
pub struct Keys {
    list: Vec<KnownKey>,
    /// By each digest that is known; only files are checked with it, and never what a client sends.
    places: HashMap<[u8; 32], usize>,
    names: HashSet<Arc<str>>,
}

/// A key, as far as it is kept.
#[derive(Clone)]
pub struct KnownKey {
    digests: Digests,
    /// Whose it is.
    pub tenant: Tenant,
    /// What its line calls that tenant.
    pub tenant_name: Option<Arc<str>>,
    /// What else its line says.
    pub terms: KeyTerms,
}

/// Of one key, as far as they are known: of a key that is written as a digest there is that one alone.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Digests {
    blake3: Option<blake3::Hash>,
    sha256: Option<blake3::Hash>,
}

impl Digests {
    fn of(key: &str) -> Self {
        Self { blake3: Some(blake3::hash(key.as_bytes())), sha256: Some(sha256(key.as_bytes())) }
    }

    fn all(&self) -> impl Iterator<Item = [u8; 32]> {
        [self.blake3, self.sha256].into_iter().flatten().map(|digest| *digest.as_bytes())
    }

    /// True if they are of one key, as far as they can be compared; in constant time.
    fn meet(&self, other: &Self) -> bool {
        let same = |one: Option<blake3::Hash>, other| one.is_some() && one == other;
        same(self.blake3, other.blake3) || same(self.sha256, other.sha256)
    }

    /// What stands for the key.
    fn id(&self) -> [u8; 32] {
        let known = self.blake3.or(self.sha256);
        *known.expect("one of them is known of every key").as_bytes()
    }
}

/// In a type that is compared in constant time.
fn sha256(bytes: &[u8]) -> blake3::Hash {
    let digest = ring::digest::digest(&ring::digest::SHA256, bytes);
    blake3::Hash::from_bytes(digest.as_ref().try_into().expect("SHA-256 has 32 bytes"))
}

/// Who has a key: all keys of one name, or one key without a name.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Tenant(blake3::Hash);

impl Tenant {
    /// For books that are kept by tenant.
    #[must_use]
    pub fn id(self) -> u64 {
        u64::from_le_bytes(self.0.as_bytes()[..8].try_into().expect("8 of 32 bytes"))
    }

    /// The salt of this tenant's cached blocks, within which clients may have salts of their own.
    #[must_use]
    pub fn salt(self, of_client: &[u8]) -> Vec<u8> {
        let mut hasher = blake3::Hasher::new_derive_key("headrace 2026-11 cache of a tenant");
        hasher.update(self.0.as_bytes()).update(of_client);
        hasher.finalize().as_bytes()[..16].to_vec()
    }
}

impl KnownKey {
    /// Stays the same as long as the key does, whatever else its line says.
    #[must_use]
    pub fn id(&self) -> [u8; 32] {
        self.digests.id()
    }
}

impl Keys {
    /// True if there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.list.is_empty()
    }

    /// All of them, in their order.
    pub fn iter(&self) -> impl Iterator<Item = &KnownKey> {
        self.list.iter()
    }

    /// The place of the key that was sent. Every key is compared, each in constant time.
    #[must_use]
    pub fn find(&self, sent: &[u8]) -> Option<usize> {
        let blake3 = Some(blake3::hash(sent));
        // of keys that are written down only as this
        let any = self.list.iter().any(|key| key.digests.blake3.is_none());
        let sha256 = any.then(|| sha256(sent));
        let sent = Digests { blake3, sha256 };
        let compare = |found, (at, key): (usize, &KnownKey)| {
            if key.digests.meet(&sent) { Some(at) } else { found }
        };
        self.list.iter().enumerate().fold(None, compare)
    }

    /// True if a key is in both, as far as their digests show it.
    fn overlap(&self, other: &Self) -> bool {
        self.places.keys().any(|digest| other.places.contains_key(digest))
    }

    /// Adds a line.
    ///
    /// # Errors
    /// What is wrong with it. No error shows a key.
    pub(super) fn add(&mut self, line: &str, role: Role) -> Result<(), String> {
        self.insert(line::parse(line, role)?)
    }

    /// Adds all of the others.
    ///
    /// # Errors
    /// What is wrong with one of them.
    fn join(&mut self, others: &Self) -> Result<(), String> {
        others.list.iter().cloned().try_for_each(|key| self.insert(key))
    }

    fn insert(&mut self, key: KnownKey) -> Result<(), String> {
        if let Some(at) = key.digests.all().find_map(|digest| self.places.get(&digest)) {
            let known = &self.list[*at];
            if known.tenant != key.tenant {
                return Err("a key belongs to two tenants".into());
            }
            if known.terms != key.terms {
                return Err("a key is there twice, and its settings differ".into());
            }
            return Ok(());
        }
        if self.list.len() == MOST_KEYS {
            return Err("there are more than 4096 keys".into());
        }
        if let Some(name) = &key.terms.name
            && !self.names.insert(Arc::clone(name))
        {
            return Err("a key has the name of another one".into());
        }
        self.places.extend(key.digests.all().map(|digest| (digest, self.list.len())));
        self.list.push(key);
        Ok(())
    }
}

impl fmt::Debug for Keys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Keys({})", self.list.len())
    }
}

impl fmt::Debug for KnownKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "KnownKey({:?})", self.tenant)
    }
}

impl fmt::Debug for Tenant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Tenant({:016x})", self.id())
    }
}
