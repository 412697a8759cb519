//! Which responses are kept: by id, in the order of use, and by owner. Pure: `now` is an argument. What is kept of each is a
//! value beside its id: the response itself in memory, or nothing where a file has it.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::time::Duration;

use tokio::time::Instant;

use super::OwnerId;
use crate::config::StoreConfig;
use crate::limits::memory::{ALLOCATION_BYTES, MemoryPool, MemoryShare};
use crate::metrics::Metrics;

/// Beside its text, of a response: its places in the maps, and what allocations add. A guess on the high side.
const ENTRY_BYTES: usize = 512 + 8 * ALLOCATION_BYTES;

/// One owner gets so much of all bytes.
const OWNERS_PART: usize = 2;

/// Responses, the least recently used first.
#[derive(Debug)]
pub(super) struct Shelves<V> {
    /// For all of them: a share of its own for each would be rounded up.
    memory: MemoryShare,
    ttl: Duration,
    /// Of one owner.
    most: usize,
    most_bytes: usize,
    by_id: HashMap<String, Kept<V>>,
    /// As all are kept equally long after their last use, the first one is the first to expire.
    order: BTreeMap<u64, String>,
    owners: HashMap<OwnerId, Shelf>,
    next_turn: u64,
    evicted: u64,
    /// Those that went since the last call of [`Shelves::gone`].
    gone: Vec<String>,
}

#[derive(Debug)]
struct Kept<V> {
    owner: OwnerId,
    turn: u64,
    expires: Instant,
    value: V,
    bytes: usize,
}

/// What one owner has.
#[derive(Debug, Default)]
struct Shelf {
    turns: BTreeSet<u64>,
    bytes: usize,
}

impl<V: Clone> Shelves<V> {
    pub(super) fn new(config: &StoreConfig, pool: &MemoryPool) -> Self {
        Self {
            memory: pool.share(),
            ttl: config.ttl,
            most: config.tenant_responses,
            most_bytes: config.bytes / OWNERS_PART,
            by_id: HashMap::new(),
            order: BTreeMap::new(),
            owners: HashMap::new(),
            next_turn: 0,
            evicted: 0,
            gone: Vec::new(),
        }
    }

    /// False if it is too large to be kept, with so many bytes of its own. Older ones make room: of the same owner where
    /// it has its part, else of the owner that has most.
    pub(super) fn put(
        &mut self,
        owner: OwnerId,
        id: &str,
        (bytes, value): (usize, V),
        now: Instant,
    ) -> bool {
        self.put_back(owner, id, (bytes, value), now, now + self.ttl)
    }

    /// The same of one that expires then. The first one to expire comes first.
    pub(super) fn put_back(
        &mut self,
        owner: OwnerId,
        id: &str,
        (bytes, value): (usize, V),
        now: Instant,
        expires: Instant,
    ) -> bool {
        self.expire(now);
        self.remove(id);
        let bytes = bytes + 3 * id.len() + ENTRY_BYTES;
        if bytes > self.most_bytes {
            return false;
        }
        let (most, most_bytes) = (self.most, self.most_bytes - bytes);
        let has_its_part = |shelf: &Shelf| shelf.turns.len() >= most || shelf.bytes > most_bytes;
        while self.owners.get(&owner).is_some_and(has_its_part) {
            self.evict(owner);
        }
        while self.memory.charge(bytes).is_err() {
            let most = self.owners.iter().max_by_key(|(_, shelf)| shelf.bytes);
            let Some((&most, _)) = most else { return false };
            self.evict(most);
        }
        let shelf = self.owners.entry(owner).or_default();
        shelf.bytes += bytes;
        let turn = self.next_turn;
        self.next_turn += 1;
        shelf.turns.insert(turn);
        self.order.insert(turn, id.to_owned());
        self.by_id.insert(id.to_owned(), Kept { owner, turn, expires, value, bytes });
        true
    }

    /// It is kept from now on for as long again.
    pub(super) fn get(&mut self, owner: OwnerId, id: &str, now: Instant) -> Option<V> {
        self.expire(now);
        let kept = self.by_id.get_mut(id).filter(|kept| kept.owner == owner)?;
        let turn = self.next_turn;
        self.next_turn += 1;
        let before = std::mem::replace(&mut kept.turn, turn);
        kept.expires = now + self.ttl;
        if let Some(name) = self.order.remove(&before) {
            self.order.insert(turn, name);
        }
        if let Some(shelf) = self.owners.get_mut(&owner) {
            shelf.turns.remove(&before);
            shelf.turns.insert(turn);
        }
        Some(kept.value.clone())
    }

    /// True if this owner has it.
    pub(super) fn has(&mut self, owner: OwnerId, id: &str, now: Instant) -> bool {
        self.expire(now);
        self.by_id.get(id).is_some_and(|kept| kept.owner == owner)
    }

    pub(super) fn delete(&mut self, owner: OwnerId, id: &str, now: Instant) -> bool {
        self.has(owner, id, now) && self.remove(id)
    }

    /// Forgets what was not used for too long.
    pub(super) fn expire(&mut self, now: Instant) {
        while let Some((_, id)) = self.order.first_key_value() {
            if self.by_id.get(id).is_some_and(|kept| kept.expires > now) {
                return;
            }
            let id = id.clone();
            if !self.remove(&id) {
                self.order.pop_first(); // not to go round for ever, were a map wrong
            }
        }
    }

    /// Shows how many there are, and how many made room since the last call.
    pub(super) fn show(&mut self, metrics: &Metrics) {
        let (count, evicted) = self.counts();
        metrics.responses.stored.set(i64::try_from(count).unwrap_or(i64::MAX));
        metrics.responses.evicted.inc_by(evicted);
    }

    fn counts(&mut self) -> (usize, u64) {
        (self.by_id.len(), std::mem::take(&mut self.evicted))
    }

    /// Those that went since the last call, for whoever keeps them elsewhere.
    pub(super) fn gone(&mut self) -> Vec<String> {
        std::mem::take(&mut self.gone)
    }

    fn evict(&mut self, owner: OwnerId) {
        let oldest = self.owners.get(&owner).and_then(|shelf| shelf.turns.first());
        let oldest = oldest.and_then(|turn| self.order.get(turn)).cloned();
        if oldest.is_some_and(|id| self.remove(&id)) {
            self.evicted += 1;
        } else {
            self.owners.remove(&owner);
        }
    }

    fn remove(&mut self, id: &str) -> bool {
        let Some((id, kept)) = self.by_id.remove_entry(id) else { return false };
        self.order.remove(&kept.turn);
        self.memory.give_back(kept.bytes);
        if let Some(shelf) = self.owners.get_mut(&kept.owner) {
            shelf.turns.remove(&kept.turn);
            shelf.bytes -= kept.bytes;
            if shelf.turns.is_empty() {
                self.owners.remove(&kept.owner);
            }
        }
        self.gone.push(id);
        true
    }
}

#[cfg(test)]
mod tests;
