//! When a request came, and how far it has climbed since.

use std::cmp::Ordering;

use super::{CLASSES, Entry, as_f64};

/// When one came; the ticket decides between two that came at once.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Arrival {
    pub(super) since: Total,
    pub(super) ticket: u64,
}

/// Where one of `ages` waits.
#[derive(Debug, Clone, Copy)]
pub(super) struct Aged {
    pub(super) class: usize,
    pub(super) tenant: u64,
    pub(super) tokens: u64,
}

impl Arrival {
    pub(super) fn of(entry: &Entry) -> Self {
        Self { since: Total(entry.since_ms), ticket: entry.ticket }
    }

    /// The class that it has climbed to.
    pub(super) fn level(self, class: usize, now_ms: f64, ageing_ms: f64) -> usize {
        let climbed = |level: &usize| self.climbs_ms(level - class, ageing_ms) <= now_ms;
        (class + 1..CLASSES).take_while(climbed).last().unwrap_or(class)
    }

    /// When it has climbed `classes`, which is not 0.
    pub(super) fn climbs_ms(self, classes: usize, ageing_ms: f64) -> f64 {
        self.since.0 + as_f64(classes as u64) * ageing_ms
    }

    /// It has waited as long as it takes to climb through all classes.
    pub(super) fn is_overdue(self, now_ms: f64, ageing_ms: f64) -> bool {
        self.climbs_ms(CLASSES, ageing_ms) <= now_ms
    }
}

/// A number with a total order.
#[derive(Debug, Clone, Copy)]
pub(super) struct Total(pub(super) f64);

impl Ord for Total {
    fn cmp(&self, other: &Self) -> Ordering {
        self.0.total_cmp(&other.0)
    }
}

impl PartialOrd for Total {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Total {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl Eq for Total {}
