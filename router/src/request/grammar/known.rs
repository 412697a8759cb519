//! Grammars that were seen before: as many as fit, the latest ones.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use super::compile::GrammarError;
use crate::core::frame::Grammar;

/// What became of a grammar: the same for the same text.
pub type KnownGrammar<T> = Result<Arc<T>, GrammarError>;

/// A bounded cache. What is in use elsewhere stays there when it leaves the cache.
#[derive(Debug)]
pub struct KnownGrammars<T> {
    most: usize,
    inner: Mutex<Inner<T>>,
}

#[derive(Debug)]
struct Inner<T> {
    entries: HashMap<Grammar, (u64, KnownGrammar<T>)>,
    uses: u64,
}

impl<T> KnownGrammars<T> {
    /// At most `most` of them.
    #[must_use]
    pub fn new(most: usize) -> Self {
        let inner = Inner { entries: HashMap::with_capacity(most), uses: 0 };
        Self { most: most.max(1), inner: Mutex::new(inner) }
    }

    /// What was made of `grammar` before.
    pub fn get(&self, grammar: &Grammar) -> Option<KnownGrammar<T>> {
        let mut inner = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
        inner.uses += 1;
        let now = inner.uses;
        let (used, known) = inner.entries.get_mut(grammar)?;
        *used = now;
        Some(known.clone())
    }

    /// Those that are `unused` give way, the oldest first, as long as there is `too_much`.
    pub fn give_way(&self, too_much: impl Fn() -> bool, unused: impl Fn(&T) -> bool) {
        let mut inner = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
        while too_much() {
            let unused = |known: &KnownGrammar<T>| known.as_ref().is_ok_and(|known| unused(known));
            let these = inner.entries.iter().filter(|(_, (_, known))| unused(known));
            let oldest = these.min_by_key(|(_, (used, _))| *used);
            let Some(oldest) = oldest.map(|(grammar, _)| grammar.clone()) else { return };
            inner.entries.remove(&oldest);
        }
    }

    /// This was made of it; who was not asked for for longest gives way.
    pub fn put(&self, grammar: Grammar, known: KnownGrammar<T>) {
        let mut inner = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
        inner.uses += 1;
        let now = inner.uses;
        if inner.entries.len() >= self.most && !inner.entries.contains_key(&grammar) {
            let oldest = inner.entries.iter().min_by_key(|(_, (used, _))| *used);
            if let Some(oldest) = oldest.map(|(grammar, _)| grammar.clone()) {
                inner.entries.remove(&oldest);
            }
        }
        inner.entries.insert(grammar, (now, known));
    }
}
