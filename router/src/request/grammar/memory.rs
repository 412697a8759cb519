//! What the grammars of a process hold in memory, and answers that follow them: counted, so that it can be bounded.
//!
//! `llguidance` says what the tables of a lexer take. What it does not tell is estimated from above: the rules of a grammar by
//! its source, the rows of a parser by the items of the latest mask.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use llguidance::earley::Parser;

/// Of one byte of a source: its symbols and rules. From above: 100,000 symbols are the most, and a schema has one in some ten
/// bytes.
const BYTES_OF_SOURCE: u64 = 64;

/// Of an answer before its first token: its mask, and the parser's places. A guess.
const BYTES_OF_ANSWER: u64 = 64 << 10;

/// Of a token that an answer has: its id, its bytes, and where in the parser each of them stands.
const BYTES_OF_TOKEN: u64 = 128;

/// Of an item of the parser.
const BYTES_OF_ITEM: u64 = 16;

type Relief = Box<dyn Fn() + Send + Sync>;

/// All grammars of one vocabulary.
#[derive(Default)]
pub struct GrammarMemory {
    bytes: AtomicU64,
    /// More than this is not to be; 0 is no bound.
    most: AtomicU64,
    /// Gives back what nobody uses.
    relief: Mutex<Option<Relief>>,
}

impl std::fmt::Debug for GrammarMemory {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("GrammarMemory").field("bytes", &self.bytes()).finish_non_exhaustive()
    }
}

impl GrammarMemory {
    /// What is held now.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }

    /// What may be held; 0 is no bound.
    #[must_use]
    pub fn most(&self) -> u64 {
        self.most.load(Ordering::Relaxed)
    }

    /// From now on `most` bytes may be held. `relief` gives back what nobody uses, on whatever thread.
    pub fn bound(&self, most: u64, relief: impl Fn() + Send + Sync + 'static) {
        self.most.store(most, Ordering::Relaxed);
        *self.relief.lock().unwrap_or_else(PoisonError::into_inner) = Some(Box::new(relief));
    }

    /// More is held than may be, also without what nobody uses.
    #[must_use]
    pub fn is_exhausted(&self) -> bool {
        self.is_above(self.most())
    }

    /// Another grammar may come: a quarter is left for those that are here to grow.
    #[must_use]
    pub fn has_room(&self) -> bool {
        !self.is_above(self.most() / 4 * 3)
    }

    fn is_above(&self, most: u64) -> bool {
        if self.most() == 0 || self.bytes() <= most {
            return false;
        }
        if let Some(relief) = &*self.relief.lock().unwrap_or_else(PoisonError::into_inner) {
            relief();
        }
        self.bytes() > most
    }
}

/// A part of it, given back when this drops.
#[derive(Debug)]
pub(super) struct Share {
    memory: Arc<GrammarMemory>,
    bytes: AtomicU64,
}

impl Share {
    pub(super) fn new(memory: Arc<GrammarMemory>) -> Self {
        Self { memory, bytes: AtomicU64::new(0) }
    }

    /// It is so much now.
    pub(super) fn set(&self, bytes: u64) {
        let before = self.bytes.swap(bytes, Ordering::Relaxed);
        let total = &self.memory.bytes;
        if bytes >= before {
            total.fetch_add(bytes - before, Ordering::Relaxed);
        } else {
            total.fetch_sub(before - bytes, Ordering::Relaxed);
        }
    }

    pub(super) fn bytes(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        self.set(0);
    }
}

/// The lexer that all answers of one grammar share.
pub(super) struct Meter {
    parser: Parser,
    rules: u64,
    share: Share,
}

impl Meter {
    pub(super) fn new(parser: Parser, source_bytes: usize, memory: Arc<GrammarMemory>) -> Self {
        let share = Share::new(memory);
        let meter = Self { parser, rules: BYTES_OF_SOURCE * source_bytes as u64, share };
        meter.note();
        meter
    }

    /// Counts what it holds by now, and returns what was spent on its states so far.
    pub(super) fn note(&self) -> u64 {
        let stats = self.parser.lexer_stats();
        self.share.set(self.rules + stats.num_bytes as u64);
        stats.total_fuel_spent as u64
    }

    pub(super) fn bytes(&self) -> u64 {
        self.share.bytes()
    }

    pub(super) fn memory(&self) -> &Arc<GrammarMemory> {
        &self.share.memory
    }
}

/// What an answer of so many tokens holds beside its grammar, whose parser had so many items in a row of late.
pub(super) fn bytes_of_answer(tokens: usize, items_in_row: u64) -> u64 {
    BYTES_OF_ANSWER + (BYTES_OF_TOKEN + BYTES_OF_ITEM * items_in_row) * tokens as u64
}
