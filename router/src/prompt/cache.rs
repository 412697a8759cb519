//! Tokens of recently seen stretches of text, least recently used first out, bounded in bytes.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

/// What the cache did so far, for metrics.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct CacheStats {
    /// Why there is no cache for this model; `None` when there is one.
    pub off: Option<&'static str>,
    /// Stretches found. Those too short to be worth a look-up are not counted anywhere.
    pub hits: u64,
    /// Stretches that had to be tokenised.
    pub misses: u64,
    /// Text bytes that were not tokenised again.
    pub hit_bytes: u64,
    /// Text bytes of the stretches that had to be tokenised.
    pub tokenized_bytes: u64,
    /// Memory held.
    pub bytes: usize,
    /// Stretches held.
    pub entries: usize,
}

/// Text to its tokens. Keys are whole texts, so a hash collision cannot give the tokens of another text.
#[derive(Debug)]
pub(crate) struct SegmentCache {
    limit_bytes: usize,
    bytes: usize,
    clock: u64,
    entries: HashMap<Arc<str>, Entry>,
    /// Entries by last use; `clock` is unique per use.
    by_use: BTreeMap<u64, Arc<str>>,
}

#[derive(Debug)]
struct Entry {
    ids: Arc<[u32]>,
    used: u64,
}

/// Allocations, hash slot and tree slot of an entry; an estimate.
const ENTRY_BYTES: usize = 160;

impl SegmentCache {
    pub(crate) fn new(limit_bytes: usize) -> Self {
        let entries = HashMap::new();
        Self { limit_bytes, bytes: 0, clock: 0, entries, by_use: BTreeMap::new() }
    }

    pub(crate) fn get(&mut self, text: &str) -> Option<Arc<[u32]>> {
        self.clock += 1;
        let entry = self.entries.get_mut(text)?;
        if let Some(key) = self.by_use.remove(&entry.used) {
            self.by_use.insert(self.clock, key);
        }
        entry.used = self.clock;
        Some(Arc::clone(&entry.ids))
    }

    pub(crate) fn insert(&mut self, text: &str, ids: Arc<[u32]>) {
        let size = cost(text, &ids);
        // One huge text must not push everything else out.
        if size > self.limit_bytes / 4 || self.entries.contains_key(text) {
            return;
        }
        while self.bytes + size > self.limit_bytes {
            let Some((_, oldest)) = self.by_use.pop_first() else { break };
            if let Some(entry) = self.entries.remove(&oldest) {
                self.bytes -= cost(&oldest, &entry.ids);
            }
        }
        self.clock += 1;
        let key: Arc<str> = Arc::from(text);
        self.by_use.insert(self.clock, Arc::clone(&key));
        self.entries.insert(key, Entry { ids, used: self.clock });
        self.bytes += size;
    }

    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    pub(crate) fn len(&self) -> usize {
        self.entries.len()
    }
}

fn cost(text: &str, ids: &[u32]) -> usize {
    text.len() + size_of_val(ids) + ENTRY_BYTES
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn the_least_recently_used_entry_goes_first() {
        let mut cache = SegmentCache::new(4 * (ENTRY_BYTES + 5));
        for text in ["a", "b", "c", "d"] {
            cache.insert(text, Arc::from([0_u32]));
        }
        assert!(cache.get("a").is_some());
        cache.insert("e", Arc::from([1_u32]));
        assert!(cache.get("b").is_none());
        assert!(cache.get("a").is_some() && cache.get("e").is_some());
    }

    proptest! {
        #[test]
        fn bytes_are_counted_and_bounded(ops in prop::collection::vec((0_u8..12, 0_usize..40), 0..200)) {
            let limit = 1500;
            let mut cache = SegmentCache::new(limit);
            for (key, len) in ops {
                let text = key.to_string();
                if cache.get(&text).is_none() {
                    cache.insert(&text, vec![u32::from(key); len].into());
                }
                let held: usize = cache.entries.iter().map(|(t, e)| cost(t, &e.ids)).sum();
                prop_assert_eq!(held, cache.bytes());
                prop_assert!(held <= limit);
                prop_assert_eq!(cache.by_use.len(), cache.len());
                if let Some(ids) = cache.get(&text) {
                    prop_assert!(ids.iter().all(|id| *id == u32::from(key)));
                }
            }
        }
    }
}
