//! Walks through those that wait in the order in which they would be dispatched, as if each were dispatched and charged
//! in its turn. Nothing is changed and only what is looked at costs: the lanes are sorted already, and of those that a
//! pick moved there is a small heap beside them.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap, btree_map, btree_set};
use std::iter::Peekable;

use super::floors::Floors;
use super::lanes::{LaneHead, Lanes};
use super::{Admission, Aged, Arrival, CLASSES, OLDEST_SHARE, Total, as_f64, passed};

/// Walks the lanes in the order in which they are served.
pub(super) struct Picker<'a> {
    lanes: &'a Lanes,
    /// The lanes in order, by class and level, as they are.
    still: [[Peekable<btree_set::Iter<'a, LaneHead>>; CLASSES]; CLASSES],
    /// Lanes whose place is another one after the picks so far.
    moved: [[BinaryHeap<Reverse<LaneHead>>; CLASSES]; CLASSES],
    /// What is left of the moved lanes.
    rest: HashMap<(usize, u64), Peekable<btree_map::Iter<'a, Arrival, u64>>>,
    /// What the picks so far would be charged, by tenant.
    charged: HashMap<u64, f64>,
    ages: Peekable<btree_map::Iter<'a, Arrival, Aged>>,
    floors: Floors,
    passed: u64,
    left: [usize; CLASSES],
    seconds_per_token: f64,
}

impl<'a> Picker<'a> {
    pub(super) fn new<T>(queue: &'a Admission<T>) -> Self {
        let lanes = &queue.lanes;
        let ranked = |class, level| lanes.ranked(class, level).peekable();
        Self {
            lanes,
            still: std::array::from_fn(|class| std::array::from_fn(|level| ranked(class, level))),
            moved: Default::default(),
            rest: HashMap::new(),
            charged: HashMap::new(),
            ages: queue.ages.iter().peekable(),
            floors: queue.floors.clone(),
            passed: queue.passed,
            left: queue.by_class.map(|waiting| waiting.requests),
            seconds_per_token: queue.seconds_per_token(),
        }
    }

    /// The oldest, where it is its turn.
    fn overdue(&mut self) -> Option<(usize, LaneHead)> {
        let (&arrival, &Aged { class, tenant, tokens }) = *self.oldest()?;
        if !self.lanes.is_overdue(arrival) {
            return None;
        }
        let account = self.account(class, tenant);
        let its_turn = self.passed >= tokens.max(1).saturating_mul(OLDEST_SHARE - 1);
        its_turn.then_some((class, LaneHead { account, arrival, tenant }))
    }

    /// The best one of a class below its floor.
    fn owed(&mut self) -> Option<(usize, LaneHead)> {
        let class = self.floors.owed(self.waits())?;
        (class..CLASSES).rev().find_map(|level| Some((class, self.best(class, level)?)))
    }

    /// The best one of the highest class.
    fn highest(&mut self) -> Option<(usize, LaneHead)> {
        (0..CLASSES).rev().find_map(|level| {
            let classes = 0..=level;
            let bests = classes.filter_map(|class| Some((class, self.best(class, level)?)));
            bests.min_by_key(|(_, head)| *head)
        })
    }

    /// The best lane of a class at a level.
    fn best(&mut self, class: usize, level: usize) -> Option<LaneHead> {
        let still = loop {
            let Some(&&head) = self.still[class][level].peek() else { break None };
            if self.rest.contains_key(&(class, head.tenant)) {
                self.still[class][level].next();
            } else if self.charged.contains_key(&head.tenant) {
                self.still[class][level].next();
                self.rest(class, head.tenant);
                self.place(class, head.tenant);
            } else {
                break Some(head);
            }
        };
        let moved = loop {
            let Some(&Reverse(head)) = self.moved[class][level].peek() else { break None };
            let first = self.rest(class, head.tenant).peek().map(|(arrival, _)| **arrival);
            let is_right =
                first == Some(head.arrival) && self.account(class, head.tenant) == head.account;
            if is_right {
                break Some(head);
            }
            self.moved[class][level].pop();
            if first == Some(head.arrival) {
                self.place(class, head.tenant);
            }
        };
        still.into_iter().chain(moved).min()
    }

    /// Takes note that the first of a lane is dispatched.
    fn dispatch(&mut self, class: usize, head: LaneHead) -> u64 {
        let is_oldest = self.oldest().is_some_and(|(oldest, _)| **oldest == head.arrival);
        let tokens = self.rest(class, head.tenant).next().map_or(0, |(_, tokens)| *tokens);
        self.passed = if is_oldest { 0 } else { passed(self.passed, tokens) };
        *self.charged.entry(head.tenant).or_default() += as_f64(tokens) * self.seconds_per_token;
        self.floors.take(class, tokens, self.waits());
        self.left[class] -= 1;
        self.place(class, head.tenant);
        head.arrival.ticket
    }

    fn waits(&self) -> [bool; CLASSES] {
        self.left.map(|left| left > 0)
    }

    /// Puts a moved lane where it belongs after the picks so far.
    fn place(&mut self, class: usize, tenant: u64) {
        let Some(&(&arrival, _)) = self.rest(class, tenant).peek() else { return };
        let level = self.lanes.level(class, arrival);
        let head = LaneHead { account: self.account(class, tenant), arrival, tenant };
        self.moved[class][level].push(Reverse(head));
    }

    fn rest(
        &mut self,
        class: usize,
        tenant: u64,
    ) -> &mut Peekable<btree_map::Iter<'a, Arrival, u64>> {
        let lanes = self.lanes;
        self.rest.entry((class, tenant)).or_insert_with(|| lanes.lane(class, tenant).peekable())
    }

    fn account(&self, class: usize, tenant: u64) -> Total {
        let charged = self.charged.get(&tenant).copied().unwrap_or(0.0);
        Total(self.lanes.account(class, tenant) + charged)
    }

    /// The oldest that was not picked.
    fn oldest(&mut self) -> Option<&(&'a Arrival, &'a Aged)> {
        while let Some((arrival, aged)) = self.ages.peek()
            && let Some(rest) = self.rest.get_mut(&(aged.class, aged.tenant))
            && rest.peek().is_none_or(|(first, _)| first > arrival)
        {
            self.ages.next();
        }
        self.ages.peek()
    }
}

impl Iterator for Picker<'_> {
    type Item = u64;

    fn next(&mut self) -> Option<u64> {
        let pick = self.overdue().or_else(|| self.owed()).or_else(|| self.highest());
        let (class, head) = pick?;
        Some(self.dispatch(class, head))
    }
}
