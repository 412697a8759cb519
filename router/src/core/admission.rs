//! Who waits for a worker, and in which order they are tried. Bounded in requests, tokens and bytes; no clock, no I/O.
//!
//! Three rules, best first:
//! 1. One token in [`OLDEST_SHARE`] goes to whoever waits longest, once it has waited three times `ageing_ms`. So nobody
//!    waits for ever, whatever else arrives.
//! 2. A class that got less than its floor of the tokens dispatched while it waits goes next.
//! 3. The highest class goes next, and whoever waits climbs one class per `ageing_ms`, up to `High`. Inside a class the
//!    tenant that got the least KV block-seconds goes first, inside a tenant the one that came first.
//!
//! `lanes` holds the order, `floors` the shares, `pick` walks through the order without changing it.

mod arrival;
mod floors;
mod lanes;
mod pick;

use std::cmp::{Ordering, Reverse};
use std::collections::{BTreeMap, BTreeSet, HashMap};

use arrival::{Aged, Arrival, Total};
use floors::Floors;
use lanes::Lanes;
use pick::Picker;

/// How many classes there are.
const CLASSES: usize = 3;
/// One token in so many goes to the oldest; a guess: a tenant that floods the queue gains at most this share by it.
const OLDEST_SHARE: u64 = 16;

/// How urgent a request is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Class {
    /// Priority below 0.
    Low,
    /// The class of a request that names none: priority 0.
    Normal,
    /// Priority above 0.
    High,
}

impl Class {
    /// Lowest first, the order of [`QueueRules::floors`].
    pub const ALL: [Self; CLASSES] = [Self::Low, Self::Normal, Self::High];

    /// The class of a request's priority.
    #[must_use]
    pub fn of(priority: i8) -> Self {
        match priority.cmp(&0) {
            Ordering::Less => Self::Low,
            Ordering::Equal => Self::Normal,
            Ordering::Greater => Self::High,
        }
    }

    /// As users write it.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Low => "low",
            Self::Normal => "normal",
            Self::High => "high",
        }
    }

    fn index(self) -> usize {
        match self {
            Self::Low => 0,
            Self::Normal => 1,
            Self::High => 2,
        }
    }
}

/// The bounds of the queue and what makes it fair.
#[derive(Debug, Clone, PartialEq)]
pub struct QueueRules {
    /// Most requests that wait.
    pub requests: usize,
    /// Their tokens together.
    pub tokens: u64,
    /// Their memory together.
    pub bytes: u64,
    /// Waiting so long lifts a request by one class; infinity never does.
    pub ageing_ms: f64,
    /// Least share of the dispatched tokens for each class while it waits, lowest class first. Their sum is at most 1.
    pub floors: [f64; CLASSES],
}

/// What the queue knows of one that waits.
#[derive(Debug, Clone, PartialEq)]
pub struct Entry {
    /// Its name here, never used twice.
    pub ticket: u64,
    /// How urgent it is.
    pub class: Class,
    /// Tenant that it is from.
    pub tenant: u64,
    /// What it counts against [`QueueRules::tokens`] and the floors.
    pub tokens: u64,
    /// What it counts against [`QueueRules::bytes`].
    pub bytes: u64,
    /// When it came.
    pub since_ms: f64,
    /// When it is too late for it; infinity if never.
    pub deadline_ms: f64,
}

/// Which bound has been reached.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum QueueBound {
    /// As many requests wait as [`QueueRules::requests`] allows.
    Requests,
    /// Those that wait have as many tokens as [`QueueRules::tokens`] allows.
    Tokens,
    /// Those that wait take as much memory as [`QueueRules::bytes`] allows.
    Bytes,
}

impl QueueBound {
    /// As a phrase, for people and metrics.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Requests => "queued requests",
            Self::Tokens => "queued tokens",
            Self::Bytes => "queued bytes",
        }
    }
}

/// The queue. `T` is whatever the caller keeps with an entry.
#[derive(Debug)]
pub struct Admission<T> {
    rules: QueueRules,
    waiting: HashMap<u64, (Entry, T)>,
    /// All of them, the oldest first.
    ages: BTreeMap<Arrival, Aged>,
    deadlines: BTreeSet<(Total, u64)>,
    lanes: Lanes,
    floors: Floors,
    /// Tokens dispatched since the oldest was one of those dispatched.
    passed: u64,
    now_ms: f64,
    tokens: u64,
    bytes: u64,
    by_class: [ClassWaiting; CLASSES],
    /// Block-seconds charged and tokens dispatched so far: what a token costs, to foresee a charge.
    charged: f64,
    dispatched: f64,
}

/// What waits in one class.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ClassWaiting {
    /// Requests that wait.
    pub requests: usize,
    /// Their tokens, prompts and longest answers together.
    pub tokens: u64,
}

impl<T> Admission<T> {
    /// An empty queue.
    #[must_use]
    pub fn new(rules: QueueRules) -> Self {
        Self {
            lanes: Lanes::new(rules.ageing_ms),
            floors: Floors::new(rules.floors),
            rules,
            waiting: HashMap::new(),
            ages: BTreeMap::new(),
            deadlines: BTreeSet::new(),
            passed: 0,
            now_ms: 0.0,
            tokens: 0,
            bytes: 0,
            by_class: [ClassWaiting::default(); CLASSES],
            charged: 0.0,
            dispatched: 0.0,
        }
    }

    /// Takes one in.
    ///
    /// # Errors
    /// The bound that is reached, and the item back.
    ///
    /// # Panics
    /// The ticket waits already.
    pub fn join(&mut self, entry: Entry, item: T) -> Result<(), (QueueBound, T)> {
        if let Some(full) = self.bound(entry.tokens, entry.bytes) {
            return Err((full, item));
        }
        let class = entry.class.index();
        let of_class = &mut self.by_class[class];
        if of_class.requests == 0 {
            self.floors.begin(class);
        }
        of_class.requests += 1;
        of_class.tokens += entry.tokens;
        self.tokens += entry.tokens;
        self.bytes += entry.bytes;
        let arrival = Arrival::of(&entry);
        self.lanes.join(class, entry.tenant, arrival, entry.tokens);
        let aged = Aged { class, tenant: entry.tenant, tokens: entry.tokens };
        self.ages.insert(arrival, aged);
        if entry.deadline_ms < f64::INFINITY {
            self.deadlines.insert((Total(entry.deadline_ms), entry.ticket));
        }
        let before = self.waiting.insert(entry.ticket, (entry, item));
        assert!(before.is_none(), "a ticket is used once");
        Ok(())
    }

    /// The bound that one more of this size would break.
    #[must_use]
    pub fn bound(&self, tokens: u64, bytes: u64) -> Option<QueueBound> {
        let over = |sum: u64, more: u64, most: u64| sum.saturating_add(more) > most;
        if self.waiting.len() >= self.rules.requests {
            Some(QueueBound::Requests)
        } else if over(self.tokens, tokens, self.rules.tokens) {
            Some(QueueBound::Tokens)
        } else if over(self.bytes, bytes, self.rules.bytes) {
            Some(QueueBound::Bytes)
        } else {
            None
        }
    }

    /// The bound of which only the last eighth is left: for tenants that have few answers in flight.
    #[must_use]
    pub fn crowded(&self) -> Option<QueueBound> {
        let over = |sum: u64, most: u64| sum > most - most / 8;
        if self.waiting.len() >= self.rules.requests - self.rules.requests / 8 {
            Some(QueueBound::Requests)
        } else if over(self.tokens, self.rules.tokens) {
            Some(QueueBound::Tokens)
        } else if over(self.bytes, self.rules.bytes) {
            Some(QueueBound::Bytes)
        } else {
            None
        }
    }

    /// Tickets in the order in which they should be tried, at most `most`. The order takes into account what each one
    /// before would be charged, so several of a list can be dispatched. Time does not run backwards: an earlier
    /// `now_ms` than the last counts as the last.
    pub fn order(&mut self, now_ms: f64, most: usize) -> Vec<u64> {
        self.advance(now_ms);
        let most = most.min(self.waiting.len());
        Picker::new(self).take(most).collect()
    }

    /// Removes one that is dispatched: it counts for the floors. The caller charges its tenant.
    pub fn take(&mut self, ticket: u64) -> Option<(Entry, T)> {
        let (entry, _) = self.waiting.get(&ticket)?;
        let class = entry.class.index();
        let oldest = self.ages.first_key_value();
        let is_oldest = oldest.is_some_and(|(oldest, _)| oldest.ticket == ticket);
        self.passed = if is_oldest { 0 } else { passed(self.passed, entry.tokens) };
        self.lanes.turn(class);
        let waits = self.by_class.map(|waiting| waiting.requests > 0);
        let (entry, item) = self.leave(ticket)?;
        self.floors.take(class, entry.tokens, waits);
        self.dispatched += as_f64(entry.tokens);
        Some((entry, item))
    }

    /// Removes one that gave up: it counts for nothing.
    pub fn leave(&mut self, ticket: u64) -> Option<(Entry, T)> {
        let (entry, item) = self.waiting.remove(&ticket)?;
        let class = entry.class.index();
        let arrival = Arrival::of(&entry);
        self.lanes.leave(class, entry.tenant, arrival);
        self.ages.remove(&arrival);
        self.deadlines.remove(&(Total(entry.deadline_ms), ticket));
        self.tokens -= entry.tokens;
        self.bytes -= entry.bytes;
        self.by_class[class].requests -= 1;
        self.by_class[class].tokens -= entry.tokens;
        Some((entry, item))
    }

    /// Removes those whose deadline has come, the earliest first.
    pub fn expired(&mut self, now_ms: f64) -> Vec<(Entry, T)> {
        self.advance(now_ms);
        let mut gone = Vec::new();
        while let Some((deadline, ticket)) = self.deadlines.first().copied()
            && deadline.0 <= self.now_ms
        {
            gone.extend(self.leave(ticket));
        }
        gone
    }

    /// Adds service that a tenant got; negative where an earlier estimate was too high. What is not finite is ignored.
    pub fn charge(&mut self, tenant: u64, block_seconds: f64) {
        if block_seconds.is_finite() {
            self.charged += block_seconds;
            self.lanes.charge(tenant, block_seconds);
        }
    }

    /// One was dispatched that did not have to wait. It counts for what a token costs, not for the floors.
    pub fn passed_by(&mut self, tokens: u64) {
        self.dispatched += as_f64(tokens);
    }

    /// One that waits.
    #[must_use]
    pub fn get(&self, ticket: u64) -> Option<(&Entry, &T)> {
        self.waiting.get(&ticket).map(|(entry, item)| (entry, item))
    }

    /// What is kept with one that waits.
    pub fn item_mut(&mut self, ticket: u64) -> Option<&mut T> {
        self.waiting.get_mut(&ticket).map(|(_, item)| item)
    }

    /// All that wait, the highest class first, in it those with most tokens, of these the oldest.
    #[must_use]
    pub fn longest_first(&self) -> Vec<u64> {
        let mut all: Vec<_> = self.waiting.values().map(|(entry, _)| entry).collect();
        all.sort_unstable_by_key(|entry| (Reverse((entry.class, entry.tokens)), entry.ticket));
        all.into_iter().map(|entry| entry.ticket).collect()
    }

    /// All that wait, the oldest first.
    pub fn tickets(&self) -> impl Iterator<Item = u64> {
        self.ages.keys().map(|arrival| arrival.ticket)
    }

    /// True while no request waits.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    /// How many wait.
    #[must_use]
    pub fn len(&self) -> usize {
        self.waiting.len()
    }

    /// What all that wait count against [`QueueRules::tokens`].
    #[must_use]
    pub fn tokens(&self) -> u64 {
        self.tokens
    }

    /// What all that wait count against [`QueueRules::bytes`].
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Those that joined with this class.
    #[must_use]
    pub fn of_class(&self, class: Class) -> ClassWaiting {
        self.by_class[class.index()]
    }

    /// When the oldest came.
    #[must_use]
    pub fn oldest_ms(&self) -> Option<f64> {
        self.ages.keys().next().map(|arrival| arrival.since.0)
    }

    /// The next deadline.
    #[must_use]
    pub fn next_deadline_ms(&self) -> Option<f64> {
        self.deadlines.first().map(|(deadline, _)| deadline.0)
    }

    /// Tenants remembered: those that wait, and some thousands that do not.
    #[must_use]
    pub fn tenants(&self) -> usize {
        self.lanes.tenants()
    }

    /// What a tenant has got, as far as it is remembered.
    #[must_use]
    pub fn served(&self, tenant: u64) -> Option<f64> {
        self.lanes.served(tenant)
    }

    fn advance(&mut self, now_ms: f64) {
        if now_ms > self.now_ms {
            self.now_ms = now_ms;
            self.lanes.advance(now_ms);
        }
    }

    /// Block-seconds that a token is likely to be charged.
    fn seconds_per_token(&self) -> f64 {
        let ratio = self.charged / self.dispatched;
        // before the first charge, any cost makes tenants take turns
        if ratio.is_finite() && ratio > 0.0 { ratio } else { 1.0 }
    }
}

/// One more was dispatched before the oldest. Even one without tokens counts, or they could go on for ever.
fn passed(before: u64, tokens: u64) -> u64 {
    before.saturating_add(tokens.max(1))
}

#[expect(clippy::cast_precision_loss, reason = "shares and costs need no more than 53 bits")]
fn as_f64(tokens: u64) -> f64 {
    tokens as f64
}

#[cfg(test)]
mod properties;
#[cfg(test)]
mod tests;
