//! So many lines a second, and no more, without a lock: a second and how many lines it had, in one word.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Bits of the count; those above them are the second. A count stops at the limit, so it never runs into the second.
const COUNT_BITS: u32 = 24;

/// Most lines a second that can be counted.
const MOST: u32 = (1 << COUNT_BITS) - 1;

/// Lets lines through while a second has room for them.
#[derive(Debug)]
pub(super) struct LineRate {
    a_second: AtomicU64,
    state: AtomicU64,
}

impl LineRate {
    pub(super) fn new(a_second: u32) -> Self {
        let rate = Self { a_second: AtomicU64::new(0), state: AtomicU64::new(0) };
        rate.change(a_second);
        rate
    }

    pub(super) fn change(&self, a_second: u32) {
        self.a_second.store(a_second.min(MOST).into(), Relaxed);
    }

    /// Whether a line may be written in this second, counted from any moment on.
    pub(super) fn admits(&self, second: u64) -> bool {
        let next = |state: u64| {
            let (latest, count) = (state >> COUNT_BITS, state & u64::from(MOST));
            // whoever comes late with a second that is over counts in the latest one
            let (now, count) = if second > latest { (second, 0) } else { (latest, count) };
            (count < self.a_second.load(Relaxed)).then_some((now << COUNT_BITS) | (count + 1))
        };
        self.state.fetch_update(Relaxed, Relaxed, next).is_ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_second_has_so_many_lines_and_the_next_one_as_many() {
        let rate = LineRate::new(3);
        let admitted = |second| (0..10).filter(|_| rate.admits(second)).count();
        assert_eq!(
            [admitted(0), admitted(0), admitted(1), admitted(0), admitted(1), admitted(9)],
            [3, 0, 3, 0, 0, 3]
        );
    }

    #[test]
    fn none_is_none_and_the_most_is_no_more_than_fits() {
        assert!(!LineRate::new(0).admits(5));
        let rate = LineRate::new(u32::MAX);
        assert!(rate.admits(1) && rate.admits(1));
        rate.change(0);
        assert!(!rate.admits(1) && !rate.admits(2));
        rate.change(u32::MAX);
        assert_eq!(rate.state.load(Relaxed), (1 << COUNT_BITS) | 2);
    }

    #[test]
    fn threads_share_the_lines_of_a_second() {
        let rate = LineRate::new(100);
        let admitted = AtomicU64::new(0);
        std::thread::scope(|threads| {
            for _ in 0..4 {
                threads.spawn(|| {
                    for _ in 0..1_000 {
                        admitted.fetch_add(rate.admits(7).into(), Relaxed);
                    }
                });
            }
        });
        assert_eq!(admitted.load(Relaxed), 100);
    }
}
