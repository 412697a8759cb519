//! Decisions that were made: the latest ones in memory with what happened to them, all of them in the log, if there is one.

pub(crate) mod actual;
pub(crate) mod log;

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::core::decision::Decision;
use crate::decisions::actual::Actual;
use crate::decisions::log::DecisionLog;
use crate::limits::shares::Account;

/// Decisions that are remembered.
pub(crate) const REMEMBERED: usize = 4_096;
/// Their candidates together: some 20 MB.
const CANDIDATES: usize = 65_536;

/// Where a decision is noted.
#[derive(Debug, Default)]
pub(crate) struct Decisions {
    recent: Mutex<Recent>,
    log: Option<DecisionLog<Decision>>,
}

#[derive(Debug, Default)]
struct Recent {
    /// The oldest first.
    decisions: VecDeque<Remembered>,
    candidates: usize,
}

/// A decision, the tenant whose request it is about, and what happened to it.
#[derive(Debug, Clone)]
pub(crate) struct Remembered {
    pub(crate) tenant: Account,
    pub(crate) decision: Arc<Decision>,
    pub(crate) actual: Arc<Actual>,
}

impl Decisions {
    pub(crate) fn new(log: Option<DecisionLog<Decision>>) -> Self {
        Self { recent: Mutex::default(), log }
    }

    /// Writes a decision about a request of `tenant` to the log and remembers it.
    pub(crate) fn note(&self, tenant: &Account, decision: &Arc<Decision>, actual: &Arc<Actual>) {
        if let Some(log) = &self.log {
            log.write(decision);
        }
        let (tenant, decision, actual) = (tenant.clone(), Arc::clone(decision), Arc::clone(actual));
        self.recent().push(Remembered { tenant, decision, actual });
    }

    /// Those about requests of this name, of one tenant or of all, the oldest first.
    pub(crate) fn about(&self, request: &str, tenant: Option<u64>) -> Vec<Remembered> {
        let recent = self.recent();
        let asked = |one: &&Remembered| {
            *one.decision.request == *request && tenant.is_none_or(|tenant| tenant == one.tenant.id)
        };
        recent.decisions.iter().filter(asked).cloned().collect()
    }

    /// The latest ones, the newest first.
    pub(crate) fn latest(&self, count: usize) -> Vec<Remembered> {
        self.recent().decisions.iter().rev().take(count).cloned().collect()
    }

    fn recent(&self) -> MutexGuard<'_, Recent> {
        // the oldest may be counted once too often after a panic: no more than that
        self.recent.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Recent {
    fn push(&mut self, remembered: Remembered) {
        self.candidates += remembered.decision.candidates.len();
        self.decisions.push_back(remembered);
        while self.decisions.len() > REMEMBERED
            || (self.candidates > CANDIDATES && self.decisions.len() > 1)
        {
            let oldest = self.decisions.pop_front().expect("there is more than one");
            self.candidates -= oldest.decision.candidates.len();
        }
    }
}
