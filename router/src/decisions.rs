//! Decisions that were made: the latest ones in memory, all of them in the log, if there is one.

pub(crate) mod log;

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::core::decision::Decision;
use crate::decisions::log::DecisionLog;
use crate::request::Account;

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
    /// The oldest first, each with the tenant whose request it is about.
    decisions: VecDeque<(Account, Arc<Decision>)>,
    candidates: usize,
}

impl Decisions {
    pub(crate) fn new(log: Option<DecisionLog<Decision>>) -> Self {
        Self { recent: Mutex::default(), log }
    }

    /// Remembers a decision about a request of `tenant`.
    pub(crate) fn note(&self, tenant: &Account, decision: &Arc<Decision>) {
        if let Some(log) = &self.log {
            log.write(decision);
        }
        self.recent().push(tenant.clone(), Arc::clone(decision));
    }

    /// Those about requests of this name, of one tenant or of all, the oldest first; each with its tenant.
    pub(crate) fn about(
        &self,
        request: &str,
        tenant: Option<u64>,
    ) -> Vec<(Account, Arc<Decision>)> {
        let recent = self.recent();
        let asked = |(of, one): &&(Account, Arc<Decision>)| {
            one.request == request && tenant.is_none_or(|tenant| tenant == of.id)
        };
        recent.decisions.iter().filter(asked).cloned().collect()
    }

    fn recent(&self) -> MutexGuard<'_, Recent> {
        // the oldest may be counted once too often after a panic: no more than that
        self.recent.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Recent {
    fn push(&mut self, tenant: Account, decision: Arc<Decision>) {
        self.candidates += decision.candidates.len();
        self.decisions.push_back((tenant, decision));
        while self.decisions.len() > REMEMBERED
            || (self.candidates > CANDIDATES && self.decisions.len() > 1)
        {
            let (_, oldest) = self.decisions.pop_front().expect("there is more than one");
            self.candidates -= oldest.candidates.len();
        }
    }
}
