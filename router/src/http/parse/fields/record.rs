//! What fields the code asks for, and as what: for the test that compares the parsers with the documentation.

#[cfg(test)]
pub(in crate::http) use notes::{note, take};

/// As what a field was asked for.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(in crate::http) enum AskedAs {
    Any,
    Boolean,
    Text,
    Array,
    Object,
    Integer(i64, i64),
    Number(f64, f64),
}

/// Notes of this thread.
#[cfg(test)]
mod notes {
    use std::cell::RefCell;

    use super::AskedAs;

    /// Fuzzing asks without end.
    const MOST: usize = 100_000;

    thread_local! {
        static NOTES: RefCell<Vec<(String, AskedAs)>> = const { RefCell::new(Vec::new()) };
    }

    pub(in crate::http) fn note(path: String, asked: AskedAs) {
        NOTES.with_borrow_mut(|notes| {
            if notes.len() < MOST {
                notes.push((path, asked));
            }
        });
    }

    /// All that was asked for since the last call.
    pub(in crate::http) fn take() -> Vec<(String, AskedAs)> {
        NOTES.take()
    }
}
