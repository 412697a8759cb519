//! The states one by one, and a worker whose frames are lost, doubled and swapped on the way.

use std::collections::{HashMap, HashSet, VecDeque};

use proptest::prelude::*;

use super::*;
use crate::core::frame::{Capacity, Fingerprints, PROTOCOL, QueueRule, Role};

const EPOCH: u64 = 7;

fn events() -> BlockEvents {
    let hello = Hello {
        protocol: PROTOCOL,
        worker: "w".into(),
        epoch: EPOCH,
        role: Role::Both,
        model: "m".into(),
        fingerprints: Fingerprints {
            weights: "a".into(),
            tokenizer: "b".into(),
            chat_template: "c".into(),
            kv_layout: "d".into(),
            hash_scheme: "e".into(),
            block_tokens: 16,
        },
        capacity: Capacity {
            blocks: 100,
            sequences: 1,
            batched_tokens: 1,
            waiting: 0,
            host_blocks: 100,
            disk_blocks: 0,
        },
        context_tokens: 100,
        group: None,
        transfer: Vec::new(),
        nonce: Vec::new(),
        step_prior: None,
        kv_block_bytes: 0,
        dtype: String::new(),
        aliases: Vec::new(),
        pooled_width: 0,
        queue_rule: QueueRule::Halves,
    };
    BlockEvents::new(&hello)
}

fn pack(keys: impl IntoIterator<Item = u64>) -> Vec<u8> {
    keys.into_iter().flat_map(u64::to_le_bytes).collect()
}

fn part(sequence: u64, keys: std::ops::Range<u64>, last: bool) -> Snapshot {
    Snapshot { epoch: EPOCH, sequence, hashes: pack(keys), last }
}

fn delta(sequence: u64, stored: std::ops::Range<u64>, removed: std::ops::Range<u64>) -> Blocks {
    Blocks {
        epoch: EPOCH,
        sequence,
        stored: vec![StoredRun { parent: None, hashes: pack(stored) }],
        removed: pack(removed),
        cleared: false,
        tier: 0,
    }
}

/// Live at this sequence, with keys 0, 1, 2.
fn live(sequence: u64) -> BlockEvents {
    let mut events = events();
    let whole = part(sequence, 0..3, true);
    assert!(matches!(events.snapshot(&whole, 0.0), Ok(Verdict::Apply(_))));
    assert!(events.live());
    events
}

/// What `BlockEvents` does with a delta.
fn verdict(events: &mut BlockEvents, delta: &Blocks, now_ms: f64) -> Verdict<'static> {
    match events.delta(delta, now_ms).unwrap() {
        Verdict::Apply(_) => panic!("it was applied"),
        Verdict::Ignore(ignored) => Verdict::Ignore(ignored),
        Verdict::Lost(gap) => Verdict::Lost(gap),
    }
}

fn is_applied(verdict: &Result<Verdict<'_>, OddKeys>) -> bool {
    matches!(verdict, Ok(Verdict::Apply(_)))
}

#[test]
fn a_snapshot_in_parts_and_then_deltas_pass() {
    let mut events = events();
    let (one, two) = (part(10, 0..3, false), part(10, 3..5, true));
    let first = Change::Snapshot { first: true, keys: &one.hashes, last: false };
    assert_eq!(events.snapshot(&one, 0.0), Ok(Verdict::Apply(first)));
    assert!(!events.live());
    let last = Change::Snapshot { first: false, keys: &two.hashes, last: true };
    assert_eq!(events.snapshot(&two, 0.0), Ok(Verdict::Apply(last)));
    assert!(events.live());
    let next = delta(11, 5..9, 0..1);
    let Ok(Verdict::Apply(Change::Delta { tier, cleared, removed, stored })) =
        events.delta(&next, 0.0)
    else {
        panic!("it follows");
    };
    assert_eq!((tier, cleared), (0, false));
    assert_eq!(keys_le(removed).collect::<Vec<_>>(), [0]);
    assert_eq!(keys_le(&stored[0].hashes).collect::<Vec<_>>(), [5, 6, 7, 8]);
    assert_eq!(events.blocks(), 8);
    let cleared = Blocks { cleared: true, ..delta(12, 1..2, 0..0) };
    assert!(is_applied(&events.delta(&cleared, 0.0)));
    assert_eq!(events.blocks(), 1);
    assert_eq!(events.ask(1e9), None, "nothing is missing");
}

#[test]
fn a_delta_before_the_snapshot_is_ignored() {
    let mut events = events();
    let early = verdict(&mut events, &delta(1, 0..1, 0..0), 0.0);
    assert_eq!(early, Verdict::Ignore(Ignored::Early));
    assert_eq!(events.ask(1e9), None, "the first snapshot needs no request");
    assert!(is_applied(&events.snapshot(&part(1, 0..1, true), 0.0)));
}

#[test]
fn another_epoch_is_ignored() {
    let mut events = live(10);
    let other = Blocks { epoch: EPOCH + 1, ..delta(11, 0..1, 0..0) };
    assert_eq!(verdict(&mut events, &other, 0.0), Verdict::Ignore(Ignored::Epoch));
    let other = Snapshot { epoch: EPOCH - 1, ..part(99, 0..1, true) };
    assert_eq!(events.snapshot(&other, 0.0), Ok(Verdict::Ignore(Ignored::Epoch)));
    assert!(is_applied(&events.delta(&delta(11, 0..1, 0..0), 0.0)));
}

#[test]
fn what_was_there_before_is_ignored() {
    let mut events = live(10);
    for old in [0, 9, 10] {
        let again = verdict(&mut events, &delta(old, 0..9, 0..9), 0.0);
        assert_eq!(again, Verdict::Ignore(Ignored::Replayed));
        let replayed = part(old, 0..9, true);
        assert_eq!(events.snapshot(&replayed, 0.0), Ok(Verdict::Ignore(Ignored::Replayed)));
    }
    assert_eq!((events.live(), events.blocks()), (true, 3));
}

#[test]
fn a_gap_withdraws_everything_until_the_snapshot_asked_for() {
    let mut events = live(10);
    let gap = Gap::Sequence { last: 10, got: 12 };
    assert_eq!(verdict(&mut events, &delta(12, 0..1, 0..0), 5.0), Verdict::Lost(gap));
    assert_eq!((events.live(), events.blocks()), (false, 0));
    let resync = events.ask(5.0).expect("the first loss is asked about at once");
    assert_eq!(resync.reason, "block events 12 after 10");
    for in_flight in 13..16 {
        let ignored = verdict(&mut events, &delta(in_flight, 0..1, 0..0), 6.0);
        assert_eq!(ignored, Verdict::Ignore(Ignored::Resyncing));
    }
    let (one, two) = (part(15, 0..3, false), part(15, 3..4, true));
    assert!(is_applied(&events.snapshot(&one, 7.0)));
    assert!(!events.live());
    assert!(is_applied(&events.snapshot(&two, 7.0)));
    assert!(events.live());
    assert_eq!(events.ask(1e9), None);
    assert!(is_applied(&events.delta(&delta(16, 9..10, 0..0), 8.0)));
}

#[test]
fn the_greatest_sequences_are_no_overflow() {
    let mut events = live(0);
    let gap = Gap::Sequence { last: 0, got: u64::MAX };
    assert_eq!(verdict(&mut events, &delta(u64::MAX, 0..0, 0..0), 0.0), Verdict::Lost(gap));
    let mut events = live(u64::MAX);
    let wrapped = verdict(&mut events, &delta(0, 0..0, 0..0), 0.0);
    assert_eq!(wrapped, Verdict::Ignore(Ignored::Replayed));
}

#[test]
fn a_delta_inside_a_snapshot_is_a_loss() {
    let mut events = events();
    assert!(is_applied(&events.snapshot(&part(10, 0..3, false), 0.0)));
    let old = verdict(&mut events, &delta(10, 0..1, 0..0), 0.0);
    assert_eq!(old, Verdict::Ignore(Ignored::Replayed), "the snapshot has it");
    let gap = Gap::Part { snapshot: 10, got: 11 };
    assert_eq!(verdict(&mut events, &delta(11, 0..1, 0..0), 0.0), Verdict::Lost(gap));
    let rest = part(10, 3..5, true);
    assert_eq!(events.snapshot(&rest, 0.0), Ok(Verdict::Ignore(Ignored::Resyncing)));
    assert!(events.ask(0.0).is_some());
}

#[test]
fn parts_of_two_snapshots_do_not_mix() {
    let mut events = events();
    assert!(is_applied(&events.snapshot(&part(10, 0..3, false), 0.0)));
    let newer = part(12, 5..7, false);
    let first = Change::Snapshot { first: true, keys: &newer.hashes, last: false };
    assert_eq!(events.snapshot(&newer, 0.0), Ok(Verdict::Apply(first)));
    let older = part(10, 3..5, true);
    assert_eq!(events.snapshot(&older, 0.0), Ok(Verdict::Ignore(Ignored::Replayed)));
    assert!(is_applied(&events.snapshot(&part(12, 7..8, true), 0.0)));
    assert_eq!((events.live(), events.blocks()), (true, 3));
}

#[test]
fn a_snapshot_that_nobody_asked_for_replaces_what_was_there() {
    let mut events = live(10);
    let whole = part(11, 0..2, true);
    let first = Change::Snapshot { first: true, keys: &whole.hashes, last: true };
    assert_eq!(events.snapshot(&whole, 0.0), Ok(Verdict::Apply(first)));
    assert_eq!((events.live(), events.blocks()), (true, 2));
    assert!(is_applied(&events.delta(&delta(12, 9..10, 0..0), 0.0)));
}

#[test]
fn a_tier_that_was_not_announced_is_ignored_and_leaves_no_gap() {
    let mut events = live(0);
    for (sequence, tier) in [(1, 2), (2, 3), (3, u8::MAX)] {
        let event = Blocks { tier, cleared: true, ..delta(sequence, 0..1, 0..0) };
        assert_eq!(verdict(&mut events, &event, 0.0), Verdict::Ignore(Ignored::Tier));
    }
    let host = Blocks { tier: 1, ..delta(4, 0..1, 0..0) };
    let Ok(Verdict::Apply(Change::Delta { tier: 1, .. })) = events.delta(&host, 0.0) else {
        panic!("the host tier was announced");
    };
}

#[test]
fn odd_keys_are_malformed_and_change_nothing() {
    let mut events = live(10);
    let odd = Snapshot { hashes: vec![0; 9], ..part(11, 0..0, true) };
    assert_eq!(events.snapshot(&odd, 0.0), Err(OddKeys(9)));
    let odd = Blocks { removed: vec![0; 1], ..delta(11, 0..0, 0..0) };
    assert_eq!(events.delta(&odd, 0.0), Err(OddKeys(1)));
    let mut odd = delta(11, 0..1, 0..0);
    odd.stored.push(StoredRun { parent: None, hashes: vec![0; 7] });
    assert_eq!(events.delta(&odd, 0.0), Err(OddKeys(7)));
    assert!(is_applied(&events.delta(&delta(11, 0..1, 0..0), 0.0)));
}

#[test]
fn the_caller_can_withdraw_what_it_does_not_believe() {
    let mut events = live(10);
    events.lose(Gap::Capacity, 0.0);
    assert!(!events.live());
    assert_eq!(events.ask(0.0).unwrap().reason, "more blocks than the announced capacity");
    events.lose(Gap::Audit, 0.0);
    assert!(is_applied(&events.snapshot(&part(11, 0..1, true), 1.0)), "still what was asked for");
    assert!(events.live());
}

#[test]
fn a_worker_that_breaks_again_and_again_is_asked_less_and_less_often() {
    let mut events = live(0);
    let (mut now_ms, mut asked) = (0.0, Vec::new());
    while now_ms < 400_000.0 {
        let gap = verdict(&mut events, &delta(u64::MAX, 0..0, 0..0), now_ms);
        assert!(matches!(gap, Verdict::Lost(_) | Verdict::Ignore(Ignored::Resyncing)));
        if events.ask(now_ms).is_some() {
            asked.push(now_ms);
            assert!(is_applied(&events.snapshot(&part(0, 0..1, true), now_ms)));
        }
        now_ms += 500.0;
    }
    let pauses: Vec<_> = asked.windows(2).map(|pair| pair[1] - pair[0]).collect();
    assert_eq!(asked[0], 0.0);
    assert_eq!(pauses[..7], [1e3, 2e3, 4e3, 8e3, 16e3, 32e3, 60e3]);
    assert!(pauses[7..].iter().all(|pause| *pause == 60e3));
    // a long time without a break makes the next one a first one
    now_ms += LONGEST_PAUSE_MS;
    assert!(events.ask(now_ms).is_some());
    assert!(is_applied(&events.snapshot(&part(0, 0..1, true), now_ms)));
    now_ms += LONGEST_PAUSE_MS;
    let broken = delta(u64::MAX, 0..0, 0..0);
    assert!(matches!(events.delta(&broken, now_ms), Ok(Verdict::Lost(_))));
    assert!(events.ask(now_ms).is_some());
    assert!(is_applied(&events.snapshot(&part(0, 0..1, true), now_ms)));
    assert!(matches!(events.delta(&broken, now_ms), Ok(Verdict::Lost(_))));
    assert_eq!(events.ask(now_ms + 999.0), None);
    assert!(events.ask(now_ms + 1000.0).is_some());
}

#[test]
fn a_request_without_an_answer_is_made_again() {
    let mut events = live(0);
    events.lose(Gap::Audit, 0.0);
    assert!(events.ask(0.0).is_some());
    assert_eq!(events.ask(999.0), None);
    assert!(events.ask(1000.0).is_some());
    // parts that come are an answer, as long as they come
    assert!(is_applied(&events.snapshot(&part(1, 0..1, false), 2500.0)));
    assert_eq!(events.ask(3500.0), None);
    assert!(events.ask(4500.0).is_some());
    // the new answer need not wait for the rest of the old one
    assert!(is_applied(&events.snapshot(&part(2, 0..1, true), 4600.0)));
    assert_eq!((events.live(), events.ask(1e9)), (true, None));
}

#[test]
fn reasons_are_different_words() {
    let gaps = [
        Gap::Sequence { last: 0, got: 0 }.as_str(),
        Gap::Part { snapshot: 0, got: 0 }.as_str(),
        Gap::Capacity.as_str(),
        Gap::Audit.as_str(),
        Gap::Silent.as_str(),
    ];
    let words: HashSet<_> = Ignored::ALL.map(Ignored::as_str).into_iter().chain(gaps).collect();
    assert_eq!(words.len(), Ignored::ALL.len() + gaps.len());
}

// ---- a worker and a bad way ----

#[derive(Debug, Clone)]
enum Event {
    Part(Snapshot),
    Delta(Blocks),
}

/// What the worker does, and what becomes of a frame on the way.
#[derive(Debug, Clone)]
enum Act {
    Store(u64),
    Remove(u64),
    Clear,
    /// Sends a snapshot by itself, in parts of so many keys.
    Snapshot(usize),
    /// Sends what changed.
    Flush,
    /// The oldest frame in flight arrives.
    Arrive,
    Drop,
    Double,
    Swap,
    /// So much time goes by.
    Wait(f64),
}

fn acts(chaos: bool) -> impl Strategy<Value = Vec<Act>> {
    let faults = if chaos { 2 } else { 0 };
    let act = prop_oneof![
        6 => (0..40_u64).prop_map(Act::Store),
        3 => (0..40_u64).prop_map(Act::Remove),
        1 => Just(Act::Clear),
        1 => (1..8_usize).prop_map(Act::Snapshot),
        8 => Just(Act::Flush),
        12 => Just(Act::Arrive),
        faults => Just(Act::Drop),
        faults => Just(Act::Double),
        faults => Just(Act::Swap),
        1 => (0.0..100_000.0).prop_map(Act::Wait),
    ];
    prop::collection::vec(act, 0..200)
}

#[derive(Default)]
struct Sim {
    cache: HashSet<u64>,
    stored: HashSet<u64>,
    removed: HashSet<u64>,
    cleared: bool,
    sequence: u64,
    /// The cache as of each sequence.
    truth: HashMap<u64, HashSet<u64>>,
    in_flight: VecDeque<Event>,
    view: HashSet<u64>,
    at: u64,
    now_ms: f64,
}

impl Sim {
    /// A snapshot has a number of its own: it takes the place of the delta that was due.
    fn snapshot(&mut self, keys_in_part: usize) {
        self.sequence += 1;
        self.truth.insert(self.sequence, self.cache.clone());
        (self.stored, self.removed, self.cleared) = Default::default();
        let keys: Vec<u64> = self.cache.iter().copied().collect();
        let parts: Vec<&[u64]> =
            if keys.is_empty() { vec![&[]] } else { keys.chunks(keys_in_part).collect() };
        for (i, keys) in parts.iter().enumerate() {
            let hashes = pack(keys.iter().copied());
            let last = i + 1 == parts.len();
            let part = Snapshot { epoch: EPOCH, sequence: self.sequence, hashes, last };
            self.in_flight.push_back(Event::Part(part));
        }
    }

    fn flush(&mut self) {
        self.sequence += 1;
        self.truth.insert(self.sequence, self.cache.clone());
        let blocks = Blocks {
            epoch: EPOCH,
            sequence: self.sequence,
            stored: vec![StoredRun { parent: None, hashes: pack(self.stored.drain()) }],
            removed: pack(self.removed.drain()),
            cleared: std::mem::take(&mut self.cleared),
            tier: 0,
        };
        self.in_flight.push_back(Event::Delta(blocks));
    }

    fn arrive(&mut self, events: &mut BlockEvents, event: &Event) {
        let verdict = match event {
            Event::Part(part) => events.snapshot(part, self.now_ms).unwrap(),
            Event::Delta(delta) => events.delta(delta, self.now_ms).unwrap(),
        };
        let number = match event {
            Event::Part(part) => part.sequence,
            Event::Delta(delta) => delta.sequence,
        };
        match verdict {
            Verdict::Apply(Change::Snapshot { first, keys, last: _ }) => {
                if first {
                    self.view.clear();
                }
                self.view.extend(keys_le(keys));
                self.at = number;
            }
            Verdict::Apply(Change::Delta { tier: _, cleared, removed, stored }) => {
                if cleared {
                    self.view.clear();
                }
                for key in keys_le(removed) {
                    self.view.remove(&key);
                }
                self.view.extend(stored.iter().flat_map(|run| keys_le(&run.hashes)));
                self.at = number;
            }
            Verdict::Lost(_) => self.view.clear(),
            Verdict::Ignore(_) => {}
        }
    }

    fn act(&mut self, events: &mut BlockEvents, act: &Act) {
        match *act {
            Act::Store(key) => {
                if self.cache.insert(key) && !self.removed.remove(&key) {
                    self.stored.insert(key);
                }
            }
            Act::Remove(key) => {
                if self.cache.remove(&key) && !self.stored.remove(&key) {
                    self.removed.insert(key);
                }
            }
            Act::Clear => {
                self.cache.clear();
                self.stored.clear();
                self.removed.clear();
                self.cleared = true;
            }
            Act::Snapshot(keys) => self.snapshot(keys),
            Act::Flush => self.flush(),
            Act::Arrive => {
                if let Some(event) = self.in_flight.pop_front() {
                    self.arrive(events, &event);
                }
                if events.ask(self.now_ms).is_some() {
                    self.snapshot(3);
                }
            }
            Act::Drop => drop(self.in_flight.pop_front()),
            Act::Double => {
                if let Some(event) = self.in_flight.front().cloned() {
                    self.in_flight.insert(self.in_flight.len() / 2, event);
                }
            }
            Act::Swap => {
                let len = self.in_flight.len();
                if len > 1 {
                    self.in_flight.swap(0, len / 2);
                }
            }
            Act::Wait(ms) => self.now_ms += ms,
        }
    }
}

proptest! {
    #[test]
    fn a_view_that_is_live_never_holds_what_the_worker_did_not(acts in acts(true)) {
        let (mut sim, mut events) = (Sim::default(), events());
        for act in &acts {
            sim.act(&mut events, act);
            if events.live() {
                prop_assert!(sim.view.is_subset(&sim.truth[&sim.at]));
            } else if !matches!(events.state, State::Filling { .. }) {
                prop_assert!(sim.view.is_empty());
            }
        }
        // then the way is good again: a snapshot arrives whole, and whatever comes after it
        sim.in_flight.clear();
        sim.now_ms += LONGEST_PAUSE_MS;
        if events.ask(sim.now_ms).is_none() {
            sim.snapshot(5);
        } else {
            sim.snapshot(3);
        }
        sim.act(&mut events, &Act::Store(99));
        sim.flush();
        while let Some(event) = sim.in_flight.pop_front() {
            sim.arrive(&mut events, &event);
        }
        prop_assert!(events.live());
        prop_assert_eq!(&sim.view, &sim.cache);
        prop_assert_eq!(events.blocks(), sim.cache.len() as u64);
    }

    #[test]
    fn on_a_good_way_a_live_view_is_the_worker_s(acts in acts(false)) {
        let (mut sim, mut events) = (Sim::default(), events());
        sim.snapshot(4);
        for act in &acts {
            sim.act(&mut events, act);
            if events.live() {
                prop_assert_eq!(&sim.view, &sim.truth[&sim.at]);
            }
            prop_assert_eq!(events.lost, None);
        }
    }
}
