//! Legs by when they have to be looked at, the soonest first: a look costs nothing for all that are not due.
//!
//! A leg that ends is not searched for. Its moment stays until it comes, or until such moments are more than most.

use std::cmp::{Ordering, Reverse};
use std::collections::BinaryHeap;

use crate::core::frame::RequestId;

/// Moments that one leg has at most, as its owner sets them.
const MOMENTS_OF_A_LEG: usize = 2;
/// So many moments are not worth a look at all legs.
const FEW: usize = 64;

/// See the head of this file. Its owner sets a leg's moments, and says of each that comes whether it still means anything.
#[derive(Debug, Default)]
pub struct LegDeadlines {
    moments: BinaryHeap<Reverse<(Moment, RequestId)>>,
}

/// In ms; all of them are in one order, whatever they are.
#[derive(Debug, Clone, Copy)]
struct Moment(f64);

impl LegDeadlines {
    /// A leg is to be looked at then. At most twice for each leg that is there.
    pub fn set(&mut self, request: RequestId, at_ms: f64) {
        self.moments.push(Reverse((Moment(at_ms), request)));
    }

    /// One that is due, the soonest first; `None` once all others have time.
    pub fn next_due(&mut self, now_ms: f64) -> Option<RequestId> {
        let Reverse((at, _)) = self.moments.peek()?;
        if *at > Moment(now_ms) {
            return None;
        }
        self.moments.pop().map(|Reverse((_, request))| request)
    }

    /// Forgets the moments of legs that are gone, once they are as many as those that `legs` legs can have. To be called after
    /// [`Self::set`]: so the memory is in proportion to the legs, and each moment pays for a bounded part of a look.
    pub fn tidy(&mut self, legs: usize, is_there: impl Fn(RequestId) -> bool) {
        if self.moments.len() > 2 * MOMENTS_OF_A_LEG * legs + FEW {
            self.moments.retain(|Reverse((_, request))| is_there(*request));
        }
    }

    /// Moments that are kept.
    #[cfg(test)]
    pub(crate) fn len(&self) -> usize {
        self.moments.len()
    }
}

impl Ord for Moment {
    fn cmp(&self, other: &Self) -> Ordering {
        self.0.total_cmp(&other.0)
    }
}

impl PartialOrd for Moment {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Moment {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other).is_eq()
    }
}

impl Eq for Moment {}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    /// A leg as its owner knows it: when it is due, if it still is.
    type Legs = BTreeMap<u64, Option<f64>>;

    #[derive(Debug, Clone)]
    enum Op {
        Set(u64, f64),
        End(u64),
        Look(f64),
    }

    fn op() -> impl Strategy<Value = Op> {
        let ms = prop_oneof![8 => 0.0..400.0, 1 => Just(f64::INFINITY), 1 => Just(7.0)];
        prop_oneof![
            5 => (0..40_u64, ms).prop_map(|(leg, ms)| Op::Set(leg, ms)),
            3 => (0..40_u64).prop_map(Op::End),
            2 => (0.0..60.0).prop_map(Op::Look),
        ]
    }

    /// The legs that are due, by a walk over all of them.
    fn walk(legs: &mut Legs, now_ms: f64) -> Vec<(f64, u64)> {
        let mut due = Vec::new();
        for (leg, at_ms) in legs {
            if at_ms.is_some_and(|at_ms| at_ms <= now_ms) {
                due.extend(at_ms.take().map(|at_ms| (at_ms, *leg)));
            }
        }
        due.sort_by(|one, other| one.0.total_cmp(&other.0).then(one.1.cmp(&other.1)));
        due
    }

    proptest! {
        #[test]
        fn what_is_due_is_what_a_walk_over_all_legs_finds(ops in prop::collection::vec(op(), 1..600)) {
            let (mut deadlines, mut legs, mut now_ms) = (LegDeadlines::default(), Legs::new(), 0.0);
            for op in ops {
                match op {
                    Op::Set(leg, in_ms) => {
                        if legs.contains_key(&leg) {
                            continue;
                        }
                        legs.insert(leg, Some(now_ms + in_ms));
                        deadlines.set(RequestId(leg), now_ms + in_ms);
                        deadlines.tidy(legs.len(), |request| legs.contains_key(&request.0));
                        prop_assert!(deadlines.len() <= 4 * legs.len() + FEW);
                    }
                    Op::End(leg) => {
                        legs.remove(&leg);
                    }
                    Op::Look(ms) => {
                        now_ms += ms;
                        let mut found = Vec::new();
                        while let Some(RequestId(leg)) = deadlines.next_due(now_ms) {
                            // a moment of a leg of this name that ended may come before its own
                            let at_ms = legs.get(&leg).copied().flatten();
                            if let Some(at_ms) = at_ms.filter(|at_ms| *at_ms <= now_ms) {
                                legs.insert(leg, None);
                                found.push((at_ms, leg));
                            }
                        }
                        found.sort_by(|one, other| one.0.total_cmp(&other.0).then(one.1.cmp(&other.1)));
                        let mut walked = legs.clone();
                        for (at_ms, leg) in &found {
                            walked.insert(*leg, Some(*at_ms));
                        }
                        prop_assert_eq!(found, walk(&mut walked, now_ms));
                    }
                }
            }
        }
    }

    #[test]
    fn the_soonest_comes_first_and_none_before_its_time() {
        let mut deadlines = LegDeadlines::default();
        for (request, at_ms) in [(1, 30.0), (2, 10.0), (3, f64::INFINITY), (4, 20.0), (5, f64::NAN)]
        {
            deadlines.set(RequestId(request), at_ms);
        }
        assert_eq!(deadlines.next_due(9.999), None);
        let due = [10.0, 29.0, 29.0, 30.0].map(|now_ms| deadlines.next_due(now_ms));
        assert_eq!(due, [Some(RequestId(2)), Some(RequestId(4)), None, Some(RequestId(1))]);
        assert_eq!(deadlines.next_due(f64::MAX), None, "never, and no number");
    }

    #[test]
    fn legs_that_ended_take_no_more_memory_than_those_that_are_there() {
        let mut deadlines = LegDeadlines::default();
        for request in 0..100_000 {
            deadlines.set(RequestId(request), f64::INFINITY);
            deadlines.tidy(10, |other| other.0 + 10 > request);
            assert!(deadlines.len() <= 4 * 10 + FEW);
        }
        let left = std::iter::from_fn(|| deadlines.next_due(f64::INFINITY));
        let left: Vec<u64> = left.map(|request| request.0).collect();
        assert!((99_990..100_000).all(|request| left.contains(&request)), "{left:?}");
    }
}
