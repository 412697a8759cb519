//! Block events in pieces: the same as whole ones, and nothing after the worker has gone or is not believed any more.

use std::num::NonZeroUsize;

use super::*;
use crate::core::events::{Change, Gap, Verdict};
use crate::core::frame::StoredRun;

const WORKER: WorkerId = WorkerId(0);

/// An event that owns its keys.
#[derive(Debug, Clone)]
enum Event {
    Lost,
    Snapshot { first: bool, keys: Vec<u8>, last: bool },
    Delta { tier: u8, cleared: bool, removed: Vec<u8>, stored: Vec<StoredRun> },
}

impl Event {
    fn verdict(&self) -> Verdict<'_> {
        match self {
            Self::Lost => Verdict::Lost(Gap::Capacity),
            Self::Snapshot { first, keys, last } => {
                Verdict::Apply(Change::Snapshot { first: *first, keys, last: *last })
            }
            Self::Delta { tier, cleared, removed, stored } => {
                let (tier, cleared) = (*tier, *cleared);
                Verdict::Apply(Change::Delta { tier, cleared, removed, stored })
            }
        }
    }
}

fn pack(keys: impl IntoIterator<Item = u64>) -> Vec<u8> {
    keys.into_iter().flat_map(|key| spread(key).to_le_bytes()).collect()
}

fn spread(key: u64) -> u64 {
    (key + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15)
}

fn delta(removed: std::ops::Range<u64>, stored: std::ops::Range<u64>) -> Event {
    let stored = vec![StoredRun { parent: None, hashes: pack(stored) }];
    Event::Delta { tier: 0, cleared: false, removed: pack(removed), stored }
}

fn held(scheduler: &Scheduler) -> Vec<u64> {
    (0..1_500).filter(|key| scheduler.holds(WORKER, spread(*key))).collect()
}

fn most(keys: usize) -> NonZeroUsize {
    NonZeroUsize::new(keys).unwrap()
}

/// All of an event, so many keys at a time.
fn in_pieces(scheduler: &mut Scheduler, event: &Event, keys: usize) -> (Applied, usize) {
    let verdict = event.verdict();
    let mut applying = Applying::new(&verdict);
    let mut pieces = 1;
    while !scheduler.apply_piece(WORKER, &mut applying, most(keys)) {
        pieces += 1;
    }
    (applying.applied(), pieces)
}

fn packed() -> impl Strategy<Value = Vec<u8>> {
    proptest::collection::vec(0_u64..1_500, 0..300).prop_map(pack)
}

fn event() -> impl Strategy<Value = Event> {
    let run = packed().prop_map(|hashes| StoredRun { parent: None, hashes });
    let delta = (0_u8..4, proptest::bool::weighted(0.1), packed());
    let delta = (delta, proptest::collection::vec(run, 0..5));
    prop_oneof![
        1 => Just(Event::Lost),
        3 => (any::<bool>(), packed(), any::<bool>())
            .prop_map(|(first, keys, last)| Event::Snapshot { first, keys, last }),
        9 => delta.prop_map(|((tier, cleared, removed), stored)| Event::Delta {
            tier, cleared, removed, stored
        }),
    ]
}

proptest! {
    #[test]
    fn an_event_in_pieces_is_the_same_as_a_whole_one(
        events in proptest::collection::vec((event(), 1_usize..400), 1..12),
    ) {
        let (mut whole, mut pieces) = (scheduler(2), scheduler(2));
        for (event, keys) in &events {
            let applied = whole.apply(WORKER, &event.verdict());
            prop_assert_eq!(applied, in_pieces(&mut pieces, event, *keys).0);
            prop_assert_eq!(held(&whole), held(&pieces));
            let credit = |scheduler: &Scheduler| scheduler.view(WORKER).unwrap().withdrawn;
            prop_assert_eq!(credit(&whole), credit(&pieces));
        }
        for key in 0..1_500 { // what the view does not show
            let lower = |scheduler: &mut Scheduler| scheduler.removed(WORKER, Tier::Host, &[spread(key)]);
            prop_assert_eq!(lower(&mut whole), lower(&mut pieces));
        }
    }
}

#[test]
fn a_piece_has_as_many_keys_as_it_may_and_every_run_counts_as_one() {
    let mut one = scheduler(1);
    assert_eq!(in_pieces(&mut one, &delta(0..0, 0..99), 100).1, 1);
    assert_eq!(in_pieces(&mut one, &delta(0..50, 100..199), 100).1, 2);
    assert_eq!(held(&one), (50..99).chain(100..199).collect::<Vec<_>>());
    let runs = (0..300).map(|key| StoredRun { parent: None, hashes: pack([key]) });
    let runs = Event::Delta { tier: 0, cleared: true, removed: vec![], stored: runs.collect() };
    assert_eq!(in_pieces(&mut one, &runs, 100).1, 6);
    assert_eq!(held(&one), (0..300).collect::<Vec<_>>());
    let empty = StoredRun { parent: None, hashes: Vec::new() };
    let empty = Event::Delta { tier: 0, cleared: false, removed: vec![], stored: vec![empty; 299] };
    assert_eq!(in_pieces(&mut one, &empty, 100).1, 3);
}

#[test]
fn a_snapshot_begins_with_its_first_piece_and_is_believed_with_its_last() {
    let mut one = scheduler(1);
    assert_eq!(one.apply(WORKER, &delta(0..0, 500..700).verdict()), Applied::default());
    let snapshot = Event::Snapshot { first: true, keys: pack(0..250), last: true };
    let verdict = snapshot.verdict();
    let mut applying = Applying::new(&verdict);
    for keys in [100, 200] {
        assert!(!one.apply_piece(WORKER, &mut applying, most(100)));
        assert_eq!(held(&one), (0..keys).collect::<Vec<_>>());
        assert_eq!(one.view(WORKER).unwrap().withdrawn, Some(Withdrawal::Unknown));
    }
    assert!(one.apply_piece(WORKER, &mut applying, most(100)));
    assert_eq!(held(&one), (0..250).collect::<Vec<_>>());
    assert_eq!(one.view(WORKER).unwrap().withdrawn, None);
}

#[test]
fn a_piece_after_a_withdrawal_is_not_applied_and_says_why() {
    for why in [Withdrawal::Overclaimed, Withdrawal::Silent] {
        let mut one = scheduler(1);
        let delta = delta(0..0, 0..300);
        let verdict = delta.verdict();
        let mut applying = Applying::new(&verdict);
        assert!(!one.apply_piece(WORKER, &mut applying, most(100)));
        one.withdraw(WORKER, why);
        assert!(one.apply_piece(WORKER, &mut applying, most(100)));
        assert_eq!(applying.applied().withdrawn, Some(why));
        assert!(one.apply_piece(WORKER, &mut applying, most(100)), "nothing is left");
        assert!(held(&one).is_empty());
        let snapshot = Event::Snapshot { first: true, keys: pack(0..7), last: true };
        assert_eq!(in_pieces(&mut one, &snapshot, 100), (Applied::default(), 1));
        assert_eq!((held(&one).len(), one.view(WORKER).unwrap().withdrawn), (7, None));
    }
}

#[test]
fn pieces_end_where_the_blocks_do_not_fit() {
    let mut one = scheduler(1);
    let (applied, pieces) = in_pieces(&mut one, &delta(0..0, 0..1_500), 100);
    assert_eq!((applied.withdrawn, pieces), (Some(Withdrawal::OverCapacity), 11));
    assert!(held(&one).is_empty());
}

/// Of a worker of which the index keeps so many blocks, fewer than it can hold.
fn with_room(blocks: u32) -> Scheduler {
    let mut scheduler = scheduler(0);
    let index_room = [blocks, 0, 0];
    scheduler.join(Joining { index_room, step_prior: None, ..joining(0) }, ());
    scheduler
}

#[test]
fn nothing_counts_of_a_worker_beyond_its_share_until_its_next_snapshot() {
    let mut one = with_room(200);
    let stored = |one: &mut Scheduler, blocks| {
        let why = one.stored(WORKER, Tier::Device, &keys(1, blocks, 0));
        (why, one.view(WORKER).unwrap().held_blocks)
    };
    one.snapshot_begins(WORKER);
    one.snapshot_complete(WORKER);
    assert_eq!(stored(&mut one, 300), (Some(Withdrawal::OverShare), 0));
    assert_eq!(stored(&mut one, 300), (None, 0), "which it was told");
    assert_eq!(stored(&mut one, 10), (None, 0), "blocks before these are not known");
    one.snapshot_begins(WORKER);
    assert_eq!(stored(&mut one, 10), (None, 10));
}

#[test]
fn what_is_passed_over_takes_no_pieces_until_a_snapshot_fits() {
    let mut none = with_room(200);
    let part = |first, keys, last| Event::Snapshot { first, keys: pack(keys), last };
    let over = Applied { withdrawn: Some(Withdrawal::OverShare), ..Applied::default() };
    assert_eq!(in_pieces(&mut none, &part(true, 0..300, false), 100), (over, 3));
    assert_eq!(in_pieces(&mut none, &part(false, 300..900, true), 100), (Applied::default(), 1));
    assert_eq!(none.view(WORKER).unwrap().withdrawn, Some(Withdrawal::OverShare));
    assert_eq!(in_pieces(&mut none, &delta(0..0, 0..900), 100), (Applied::default(), 1));
    assert_eq!(in_pieces(&mut none, &part(true, 0..150, true), 100), (Applied::default(), 2));
    assert_eq!((held(&none).len(), none.view(WORKER).unwrap().withdrawn), (150, None));
}

#[test]
fn what_is_left_of_a_worker_that_went_is_nothing() {
    let mut two = scheduler(2);
    let delta = delta(0..0, 0..300);
    let verdict = delta.verdict();
    let mut applying = Applying::new(&verdict);
    assert!(!two.apply_piece(WORKER, &mut applying, most(100)));
    two.leave(WORKER, 0.0);
    join(&mut two, 2); // with the place of the one that went, perhaps
    assert!(two.apply_piece(WORKER, &mut applying, most(100)));
    assert_eq!(applying.applied(), Applied::default());
    for worker in [1, 2] {
        assert!((0..300).all(|key| !two.holds(WorkerId(worker), spread(key))));
    }
}

#[test]
fn a_promise_shrinks_with_each_piece_of_an_eviction() {
    let mut one = scheduler(1);
    let chain: Arc<[u64]> = (0..40).map(spread).collect();
    assert_eq!(one.stored(WORKER, Tier::Device, &chain), None);
    let placement = one.place(&want(1, &chain), 0.0).unwrap();
    let leaves =
        Event::Delta { tier: 0, cleared: false, removed: pack((10..40).rev()), stored: vec![] };
    assert_eq!(in_pieces(&mut one, &leaves, 7), (Applied::default(), 5));
    let begun = one.begun(placement.request, 10 * BLOCK, 1.0).unwrap();
    assert_eq!((begun.held_tokens, begun.withdrawn), (10 * BLOCK, None));
}

#[test]
fn the_last_worker_takes_the_index_with_it() {
    let mut one = scheduler(1);
    assert_eq!(one.apply(WORKER, &delta(0..0, 0..900).verdict()), Applied::default());
    let (blocks, bytes) = one.holdings.size();
    one.leave(WORKER, 0.0);
    let (left, left_bytes) = one.holdings.size();
    assert_eq!((blocks, left), (900, 0));
    assert!(left_bytes < bytes);
    join(&mut one, 1);
    assert_eq!(one.stored(WorkerId(1), Tier::Device, &keys(1, 40, 0)), None);
}

#[test]
fn large_tables_are_handed_over_once_and_small_ones_are_not() {
    let mut one = scheduler(0);
    join_with(&mut one, 0, Role::Both, Capacity { blocks: 200_000, ..capacity() });
    let mut handed_over = Vec::new();
    for begin in (0..100_000).step_by(1_000) {
        in_pieces(&mut one, &delta(0..0, begin..begin + 1_000), 250);
        let held = begin + 1_000;
        handed_over.extend(one.take_leftovers().map(|_| held));
        assert!(one.take_leftovers().is_none(), "once");
    }
    // slots of 16 bytes: a table is one of 1 MiB when it has been outgrown by 3/4 of 65,536 blocks
    assert!(matches!(handed_over[..], [49_153..60_000, ..]), "{handed_over:?}");
    one.leave(WORKER, 0.0);
    assert!(one.take_leftovers().is_some() && one.take_leftovers().is_none());
    join(&mut one, 1);
    one.leave(WorkerId(1), 1.0);
    assert!(one.take_leftovers().is_none(), "it held little");
}

#[test]
fn a_snapshot_is_whole_with_its_last_event_and_never_if_it_holds_too_much() {
    let mut one = scheduler(1);
    let part = |first, keys, last| Event::Snapshot { first, keys: pack(keys), last };
    let withdrawn = |one: &Scheduler| one.view(WORKER).unwrap().withdrawn;
    assert_eq!(one.apply(WORKER, &part(true, 0..10, false).verdict()), Applied::default());
    assert_eq!(withdrawn(&one), Some(Withdrawal::Unknown));
    assert_eq!(one.apply(WORKER, &part(false, 10..20, true).verdict()), Applied::default());
    assert_eq!(withdrawn(&one), None);
    let over = one.apply(WORKER, &part(true, 0..1_001, true).verdict());
    assert_eq!(over.withdrawn, Some(Withdrawal::OverCapacity));
    assert_eq!(withdrawn(&one), over.withdrawn);
}
