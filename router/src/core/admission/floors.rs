//! What each class that waits is owed, in tokens: its share of each dispatch, less what it was dispatched itself.

use super::{CLASSES, as_f64};

/// A debt or an advance from so many tokens ago counts about a third; a guess, some dozens of long prompts.
const WINDOW_TOKENS: f64 = 1_048_576.0;

/// Debts by class, lowest first.
#[derive(Debug, Clone)]
pub(super) struct Floors {
    least: [f64; CLASSES],
    owed: [f64; CLASSES],
}

impl Floors {
    pub(super) fn new(least: [f64; CLASSES]) -> Self {
        Self { least, owed: [0.0; CLASSES] }
    }

    /// A class begins to wait: what it did not want before is not owed to it.
    pub(super) fn begin(&mut self, class: usize) {
        self.owed[class] = self.owed[class].min(0.0);
    }

    /// Tokens of a class are dispatched while these classes wait, itself included.
    pub(super) fn take(&mut self, class: usize, tokens: u64, waits: [bool; CLASSES]) {
        let tokens = as_f64(tokens);
        let kept = WINDOW_TOKENS / (WINDOW_TOKENS + tokens);
        for ((owed, least), waits) in self.owed.iter_mut().zip(self.least).zip(waits) {
            *owed = *owed * kept + if waits { tokens * least } else { 0.0 };
        }
        self.owed[class] -= tokens;
    }

    /// Of those that wait and are owed something, the class that has waited longest for its share.
    pub(super) fn owed(&self, waits: [bool; CLASSES]) -> Option<usize> {
        let owed = |class: &usize| waits[*class] && self.owed[*class] > ROUNDING;
        let late = |class: &usize| self.owed[*class] / self.least[*class];
        (0..CLASSES).filter(owed).max_by(|a, b| late(a).total_cmp(&late(b)))
    }
}

/// Tokens; less is no debt.
const ROUNDING: f64 = 1e-6;
