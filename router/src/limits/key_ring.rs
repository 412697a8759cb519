//! The keys that let somebody in now, and what each of them may. They are read again while the router serves; what a key has
//! used stays with it.

mod client;
mod shown;

use std::collections::HashMap;
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex, RwLock};
use std::time::{SystemTime, UNIX_EPOCH};

pub use client::{ClientKey, KeyPermit, KeyStanding, RateLeft};
pub(crate) use shown::KeysShown;

use crate::config::{AccessConfig, KeySet, KeySources, Keys, Reloaded};

/// See the head of this file.
pub struct KeyRing {
    sources: RwLock<KeySources>,
    /// They are files that can be read again, or were when they were named.
    may_change: AtomicBool,
    current: RwLock<Arc<KeysNow>>,
    /// Digest of what was read last, whether it could be used or not.
    seen: Mutex<Option<blake3::Hash>>,
}

/// Keys of one time.
pub(crate) struct KeysNow {
    clients: Keys,
    /// In the same order.
    by_client: Vec<Arc<ClientKey>>,
    operators: Keys,
}

/// What a key makes of who sends it.
#[derive(Debug, Clone)]
pub(crate) enum Standing {
    Client(Arc<ClientKey>),
    Operator,
    /// Reads `/metrics`, and nothing else of what operators do.
    Scraper,
    /// It was a key.
    Expired,
    Unknown,
}

impl KeyRing {
    /// As configuration found them at the start.
    pub(crate) fn new(access: &AccessConfig) -> Arc<Self> {
        let now = KeysNow::of(access.keys.clone(), &HashMap::new());
        Arc::new(Self {
            sources: RwLock::new(access.key_sources.clone()),
            may_change: AtomicBool::new(access.key_sources.may_change()),
            current: RwLock::new(Arc::new(now)),
            seen: Mutex::new(access.keys.digest),
        })
    }

    /// As they are now.
    pub(crate) fn now(&self) -> Arc<KeysNow> {
        Arc::clone(&self.current.read().expect("no holder panics"))
    }

    /// True if the files can be read again.
    pub(crate) fn may_change(&self) -> bool {
        self.may_change.load(Relaxed)
    }

    /// Takes keys from other sources from now on; they were read from there.
    pub(crate) fn replace(&self, access: &AccessConfig) {
        *self.sources.write().expect("no holder panics") = access.key_sources.clone();
        self.may_change.store(access.key_sources.may_change(), Relaxed);
        *self.seen.lock().expect("no holder panics") = access.keys.digest;
        self.put(access.keys.clone());
    }

    /// Reads the files again. What is refused is refused once, until it changes or somebody insists.
    pub(crate) fn reload(&self, insist: bool) -> Reloaded {
        let read = self.sources.read().expect("no holder panics").read();
        let digest = match &read {
            Ok(set) => set.digest,
            Err(error) => Some(blake3::hash(error.to_string().as_bytes())),
        };
        let mut seen = self.seen.lock().expect("no holder panics");
        if *seen == digest && !insist {
            return Reloaded::Same;
        }
        *seen = digest;
        let set = match read {
            Ok(set) => set,
            Err(error) => return Reloaded::Refused(error.to_string()),
        };
        self.put(set);
        Reloaded::New
    }

    /// What a key has used stays with it.
    fn put(&self, set: KeySet) {
        for warning in &set.warnings {
            tracing::warn!("{warning}");
        }
        let before = self.now();
        let known = before.clients.iter().zip(&before.by_client);
        let known = known.map(|(key, client)| (key.id(), Arc::clone(client))).collect();
        *self.current.write().expect("no holder panics") = Arc::new(KeysNow::of(set, &known));
    }
}

impl fmt::Debug for KeyRing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "KeyRing({})", self.now().by_client.len())
    }
}

impl KeysNow {
    /// `before`: keys that were there already.
    fn of(set: KeySet, before: &HashMap<[u8; 32], Arc<ClientKey>>) -> Self {
        let KeySet { clients, operators, .. } = set;
        let client = |key| Arc::new(ClientKey::of(key, before.get(&key.id()).map(Arc::as_ref)));
        let by_client = clients.iter().map(client).collect();
        Self { clients, by_client, operators }
    }

    /// True if clients need a key.
    pub(crate) fn are_asked_of_clients(&self) -> bool {
        !self.clients.is_empty()
    }

    /// True if operators have keys.
    pub(crate) fn are_asked_of_operators(&self) -> bool {
        !self.operators.is_empty()
    }

    /// Who sent this.
    pub(crate) fn of_sender(&self, sent: &[u8]) -> Standing {
        let operator = self.operators.find(sent).and_then(|at| self.operators.iter().nth(at));
        let client = self.clients.find(sent).map(|at| &self.by_client[at]);
        let now = unix_seconds();
        match (operator, client) {
            (Some(key), _) if key.terms.have_expired(now) => Standing::Expired,
            (Some(key), _) if key.terms.only_metrics => Standing::Scraper,
            (Some(_), _) => Standing::Operator,
            (None, Some(key)) if key.terms().have_expired(now) => Standing::Expired,
            (None, Some(key)) => Standing::Client(Arc::clone(key)),
            (None, None) => Standing::Unknown,
        }
    }
}

fn unix_seconds() -> i64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    i64::try_from(since.as_secs()).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests;
