//! The index against a naive model, and what it promises at its edges. Miri, which is slower by a factor of a thousand,
//! runs them with smaller numbers.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use proptest::prelude::*;

use super::*;

/// What a key of a chain is: a random function of its place in the tree of prompts.
fn key(chain: u64, depth: u64) -> u64 {
    let mut x = chain << 32 | depth;
    for _ in 0..2 {
        x = (x ^ x >> 31).wrapping_mul(0xD6E8_FEB8_6659_FD93);
    }
    x ^ x >> 32
}

fn keys(chain: u64, depths: std::ops::Range<u64>) -> Vec<u64> {
    depths.map(|depth| key(chain, depth)).collect()
}

fn overlaps(index: &BlockIndex, prompt: &[u64]) -> Vec<u32> {
    let mut out = vec![77; 3]; // whatever was there does not matter
    index.overlaps(prompt, &mut out);
    out
}

/// Block -> holders, and the capacity of all who are there.
#[derive(Default)]
struct Model {
    blocks: HashMap<u64, BTreeSet<u16>>,
    places: BTreeMap<u16, u32>,
}

impl Model {
    fn held(&self, place: u16) -> u32 {
        self.blocks.values().filter(|holders| holders.contains(&place)).count() as u32
    }

    fn holds(&self, place: u16, key: u64) -> bool {
        self.blocks.get(&key).is_some_and(|holders| holders.contains(&place))
    }

    fn store(&mut self, place: u16, keys: &[u64]) -> Result<u32, StoreError> {
        let capacity = self.places[&place];
        let (mut held, mut new) = (self.held(place), 0);
        for &key in keys {
            if self.holds(place, key) {
                continue;
            }
            if held == capacity {
                return Err(StoreError::OverCapacity { capacity });
            }
            self.blocks.entry(key).or_default().insert(place);
            held += 1;
            new += 1;
        }
        Ok(new)
    }

    fn remove(&mut self, place: u16, keys: &[u64]) -> u32 {
        let held =
            |key: &&u64| self.blocks.get_mut(key).is_some_and(|holders| holders.remove(&place));
        let removed = keys.iter().filter(held).count() as u32;
        self.blocks.retain(|_, holders| !holders.is_empty());
        removed
    }

    fn leave(&mut self, place: u16) {
        self.places.remove(&place);
        self.blocks.retain(|_, holders| {
            holders.remove(&place);
            !holders.is_empty()
        });
    }

    fn overlap(&self, place: u16, prompt: &[u64]) -> u32 {
        prompt.iter().take_while(|&&key| self.holds(place, key)).count() as u32
    }
}

/// What happens to the index; numbers are taken modulo what is there.
#[derive(Debug, Clone)]
enum Event {
    Join {
        capacity: u32,
    },
    Leave {
        place: usize,
    },
    /// The place holds the chain down to `depth`.
    Extend {
        place: usize,
        chain: u64,
        depth: u64,
    },
    /// The place evicts the leaves of the chain, down to `depth`.
    Shorten {
        place: usize,
        chain: u64,
        depth: u64,
    },
    /// All of these at once: the table grows and shrinks.
    Flood {
        place: usize,
        many: u64,
    },
    Drain {
        place: usize,
        many: u64,
    },
}

const CHAINS: u64 = if cfg!(miri) { 2 } else { 5 };
const DEPTH: u64 = if cfg!(miri) { 140 } else { 200 };
/// Blocks that come or go at once.
const FLOOD: u64 = if cfg!(miri) { 300 } else { 2000 };
/// Places that are there from the beginning, events, and how often both happen.
const FIRST: usize = if cfg!(miri) { 3 } else { 90 };
const EVENTS: usize = if cfg!(miri) { 16 } else { 150 };
const CASES: u32 = if cfg!(miri) { 4 } else { 48 };

fn any_event() -> impl Strategy<Value = Event> {
    let chain = || (any::<usize>(), 0..CHAINS, 0..DEPTH);
    prop_oneof![
        2 => prop_oneof![9 => 1000..4000_u32, 1 => 0..40_u32]
            .prop_map(|capacity| Event::Join { capacity }),
        1 => any::<usize>().prop_map(|place| Event::Leave { place }),
        6 => chain().prop_map(|(place, chain, depth)| Event::Extend { place, chain, depth }),
        4 => chain().prop_map(|(place, chain, depth)| Event::Shorten { place, chain, depth }),
        1 => (any::<usize>(), 0..FLOOD).prop_map(|(place, many)| Event::Flood { place, many }),
        1 => (any::<usize>(), 0..FLOOD).prop_map(|(place, many)| Event::Drain { place, many }),
    ]
}

/// Applies an event to both and compares what they answer.
fn apply(event: &Event, index: &mut BlockIndex, model: &mut Model) {
    let pick = |nth: usize| {
        let here: Vec<u16> = model.places.keys().copied().collect();
        (!here.is_empty()).then(|| here[nth % here.len()])
    };
    match *event {
        Event::Join { capacity } => {
            let place = index.join(capacity).unwrap().0;
            assert_eq!(model.places.insert(place, capacity), None, "a number given out twice");
            assert_eq!(index.held(BlockHolder(place)), 0);
        }
        Event::Leave { place } => {
            let Some(place) = pick(place) else { return };
            index.leave(BlockHolder(place));
            model.leave(place);
            assert_eq!(index.store(BlockHolder(place), &[1]), Err(StoreError::NotJoined));
            assert_eq!(index.remove(BlockHolder(place), &keys(0, 0..DEPTH)), 0);
        }
        Event::Extend { place, chain, depth } => {
            let Some(place) = pick(place) else { return };
            let keys = keys(chain, 0..depth);
            assert_eq!(index.store(BlockHolder(place), &keys), model.store(place, &keys));
        }
        Event::Shorten { place, chain, depth } => {
            let Some(place) = pick(place) else { return };
            let keys = keys(chain, depth..DEPTH);
            assert_eq!(index.remove(BlockHolder(place), &keys), model.remove(place, &keys));
        }
        Event::Flood { place, many } => {
            let Some(place) = pick(place) else { return };
            let keys = keys(99, 0..many);
            assert_eq!(index.store(BlockHolder(place), &keys), model.store(place, &keys));
        }
        Event::Drain { place, many } => {
            let Some(place) = pick(place) else { return };
            let keys = keys(99, many..FLOOD);
            assert_eq!(index.remove(BlockHolder(place), &keys), model.remove(place, &keys));
        }
    }
}

fn compare(index: &BlockIndex, model: &Model) {
    assert!(index.len() >= model.blocks.len());
    for (chain, depth) in (0..CHAINS).map(|chain| (chain, DEPTH)).chain([(99, 300), (500, 20)]) {
        let prompt = keys(chain, 0..depth);
        let found = overlaps(index, &prompt);
        assert_eq!(found.len(), index.places());
        for (place, &overlap) in (0..).zip(&found) {
            assert_eq!(overlap, model.overlap(place, &prompt), "chain {chain}, place {place}");
        }
        assert!(model.places.keys().all(|&place| usize::from(place) < found.len()));
    }
    for &place in model.places.keys() {
        assert_eq!(index.held(BlockHolder(place)), model.held(place));
        for key in keys(1, 0..DEPTH).into_iter().step_by(9) {
            assert_eq!(index.holds(BlockHolder(place), key), model.holds(place, key));
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: CASES, ..ProptestConfig::default() })]

    #[test]
    fn the_index_answers_what_a_naive_model_answers(
        first in 0..FIRST,
        events in proptest::collection::vec(any_event(), 1..EVENTS),
    ) {
        let (mut index, mut model) = (BlockIndex::new(), Model::default());
        for _ in 0..first {
            apply(&Event::Join { capacity: 3000 }, &mut index, &mut model);
        }
        for (i, event) in events.iter().enumerate() {
            apply(event, &mut index, &mut model);
            if i % 16 == 0 {
                compare(&index, &model);
            }
        }
        compare(&index, &model);
        for place in model.places.keys() {
            index.leave(BlockHolder(*place));
        }
        assert_swept(&mut index);
    }
}

/// All places left: bounded work clears everything.
fn assert_swept(index: &mut BlockIndex) {
    assert!(overlaps(index, &keys(0, 0..DEPTH)).iter().all(|&overlap| overlap == 0));
    for _ in 0..30 {
        let place = index.join(1).unwrap();
        index.leave(place);
    }
    assert_eq!((index.len(), index.places()), (0, 0));
}

#[test]
fn overlaps_of_all_places_are_answered_at_once() {
    let mut index = BlockIndex::new();
    let prompt = keys(1, 0..768);
    let depths: Vec<u64> = (0..40).map(|i| i * 77 % 769).collect();
    for &depth in &depths {
        let place = index.join(1000).unwrap();
        assert_eq!(index.store(place, &prompt[..depth as usize]), Ok(depth as u32));
    }
    let found = overlaps(&index, &prompt);
    assert_eq!(found, depths.iter().map(|&depth| depth as u32).collect::<Vec<_>>());
    assert_eq!(overlaps(&index, &[]), vec![0; 40]);
    assert_eq!(overlaps(&index, &keys(2, 0..768)), vec![0; 40]);
    for length in (1..300).step_by(if cfg!(miri) { 60 } else { 1 }) {
        let found = overlaps(&index, &prompt[..length]);
        assert!(found.iter().zip(&depths).all(|(&f, &d)| u64::from(f) == d.min(length as u64)));
    }
}

#[test]
fn a_place_never_holds_more_than_its_capacity() {
    let mut index = BlockIndex::new();
    let place = index.join(100).unwrap();
    assert_eq!(index.store(place, &keys(1, 0..90)), Ok(90));
    let refused = Err(StoreError::OverCapacity { capacity: 100 });
    assert_eq!(index.store(place, &keys(1, 80..200)), refused);
    assert_eq!(index.held(place), 100);
    assert_eq!(overlaps(&index, &keys(1, 0..200)), [100]);
    assert_eq!(index.store(place, &keys(1, 0..100)), Ok(0), "nothing new: no error");
    assert_eq!(index.remove(place, &keys(1, 99..100)), 1);
    assert_eq!(index.store(place, &keys(2, 0..1)), Ok(1));
    let text = StoreError::OverCapacity { capacity: 100 }.to_string();
    assert!(text.contains("100"), "{text}");
}

#[test]
fn duplicates_and_unknown_blocks_show_in_the_counts_and_harm_nothing() {
    let mut index = BlockIndex::new();
    let (a, b) = (index.join(1000).unwrap(), index.join(1000).unwrap());
    assert_eq!(index.store(a, &keys(1, 0..10)), Ok(10));
    assert_eq!(index.store(a, &keys(1, 0..15)), Ok(5));
    assert_eq!(index.store(a, &[7, 7, 7, 0, 0, u64::MAX]), Ok(3));
    assert_eq!(index.remove(b, &keys(1, 0..10)), 0);
    assert_eq!(index.remove(a, &keys(2, 0..10)), 0);
    assert_eq!(index.remove(a, &[0, 0, 7, u64::MAX, 7]), 3);
    assert_eq!((index.held(a), index.held(b), index.len()), (15, 0, 15));
    let never = BlockHolder(9);
    assert_eq!(index.store(never, &[1]), Err(StoreError::NotJoined));
    assert_eq!((index.remove(never, &[1]), index.held(never)), (0, 0));
    assert!(!index.holds(never, 7));
    index.leave(never);
    assert_eq!(index.remove(a, &keys(1, 0..15)), 15);
    assert!(index.is_empty());
}

#[test]
fn who_lacks_the_first_block_has_no_overlap_whatever_comes_after_it() {
    let mut index = BlockIndex::new();
    let (a, b) = (index.join(1000).unwrap(), index.join(1000).unwrap());
    let prompt = keys(1, 0..100);
    index.store(a, &prompt).unwrap();
    index.store(b, &prompt[1..]).unwrap();
    assert_eq!(overlaps(&index, &prompt), [100, 0]);
    assert_eq!(overlaps(&index, &prompt[1..]), [99, 99]);
}

#[test]
fn a_place_that_left_holds_nothing_though_its_entries_are_still_there() {
    let mut index = BlockIndex::new();
    let (a, b) = (index.join(1000).unwrap(), index.join(1000).unwrap());
    index.store(a, &[7, 8]).unwrap();
    index.store(b, &[7]).unwrap();
    index.leave(a);
    assert_eq!(index.len(), 2, "nothing was swept");
    assert!(!index.holds(a, 7) && index.holds(b, 7));
    assert_eq!((index.held(a), index.held(b)), (0, 1));
}

#[test]
fn the_lowest_free_number_is_given_out_first() {
    let mut index = BlockIndex::new();
    let places: Vec<_> = (0..4).map(|_| index.join(10).unwrap()).collect();
    index.leave(places[1]);
    index.leave(places[0]);
    assert_eq!((index.join(10), index.join(10)), (Some(places[0]), Some(places[1])));
}

#[test]
#[cfg_attr(miri, ignore = "thirty thousand blocks")]
fn memory_falls_with_the_blocks() {
    let mut index = BlockIndex::new();
    let place = index.join(u32::MAX).unwrap();
    let empty = index.bytes();
    index.store(place, &keys(1, 0..30_000)).unwrap();
    assert!(index.bytes() > 4 * empty);
    assert_eq!(index.remove(place, &keys(1, 0..30_000)), 30_000);
    for _ in 0..50 {
        let other = index.join(1).unwrap();
        index.leave(other);
    }
    assert!(index.bytes() < 2 * empty, "{} bytes for nothing, {empty} before", index.bytes());
}

/// The price of reading every 64th block only, as the module says.
#[test]
fn an_eviction_out_of_order_is_credited_to_the_end_of_its_chain() {
    let mut index = BlockIndex::new();
    let place = index.join(1000).unwrap();
    let prompt = keys(1, 0..100);
    index.store(place, &prompt).unwrap();
    index.remove(place, &prompt[40..41]);
    assert_eq!(overlaps(&index, &prompt), [100], "60 too many: nobody looked at block 40");
    index.remove(place, &prompt[64..65]);
    assert_eq!(overlaps(&index, &prompt), [64], "block 64 is one of those read first");
    index.remove(place, &prompt[41..]);
    assert_eq!(overlaps(&index, &prompt), [40], "leaves first, it is exact");
}

#[test]
#[cfg_attr(miri, ignore = "fifty thousand blocks")]
fn a_place_that_left_is_gone_at_once_and_its_number_comes_back_when_it_is_swept() {
    let mut index = BlockIndex::new();
    let (a, b) = (index.join(100_000).unwrap(), index.join(100_000).unwrap());
    let (mine, shared) = (keys(1, 0..50_000), keys(2, 0..1000));
    index.store(a, &mine).unwrap();
    index.store(a, &shared).unwrap();
    index.store(b, &shared).unwrap();
    index.leave(a);
    index.leave(a); // once is enough
    assert_eq!(overlaps(&index, &shared), [0, 1000]);
    assert_eq!(overlaps(&index, &mine), [0, 0]);
    assert_eq!(index.join(10).unwrap(), BlockHolder(2), "entries still name 0");
    let mut joined = 0;
    while index.places() > 2 || index.len() > 1000 {
        let place = index.join(10).unwrap();
        index.leave(place);
        index.leave(BlockHolder(2));
        joined += 1;
        assert!(joined < 60, "{} entries left", index.len());
    }
    assert_eq!(index.join(10), Some(a));
    assert_eq!(overlaps(&index, &shared), [0, 1000]);
    assert_eq!(index.remove(b, &shared), 1000);
    assert!(index.is_empty());
}

#[test]
#[cfg_attr(miri, ignore = "half a million blocks")]
fn sweeping_goes_on_while_the_table_grows_and_shrinks() {
    let mut index = BlockIndex::new();
    let stay = index.join(u32::MAX).unwrap();
    let mut stored = 0;
    for round in 0..60_u64 {
        let guest = index.join(10_000).unwrap();
        index.store(guest, &keys(round, 0..3000)).unwrap();
        stored += u64::from(index.store(stay, &keys(round, 0..1000 + round * 20)).unwrap());
        index.leave(guest);
        if round % 3 == 2 {
            for old in round - 2..round {
                stored -= u64::from(index.remove(stay, &keys(old, 0..5000)));
            }
        }
        assert_eq!(overlaps(&index, &keys(round, 0..3000))[0], 1000 + round as u32 * 20);
        assert_eq!(u64::from(index.held(stay)), stored);
    }
    assert!(index.places() < 30, "{} numbers in use", index.places());
}

#[test]
#[cfg_attr(miri, ignore = "a million blocks")]
fn ten_thousand_workers_that_come_and_go_leave_memory_flat() {
    let mut index = BlockIndex::new();
    let system_prompt = keys(0, 0..20);
    let mut here = std::collections::VecDeque::new();
    let (mut early, mut most) = (0, 0);
    for worker in 1..=10_000 {
        let place = index.join(1000).unwrap();
        index.store(place, &system_prompt).unwrap();
        index.store(place, &keys(worker, 20..100)).unwrap();
        here.push_back(place);
        if here.len() > 50 {
            index.leave(here.pop_front().unwrap());
        }
        let peak = if worker < 2000 { &mut early } else { &mut most };
        *peak = index.bytes().max(*peak);
    }
    assert!(most <= early * 11 / 10, "{early} bytes grew to {most}");
    assert!(index.places() < 200, "{} numbers in use for 50 places", index.places());
    here.into_iter().for_each(|place| index.leave(place));
    assert_swept(&mut index);
}

#[test]
#[cfg_attr(miri, ignore = "65,536 places")]
fn as_many_places_as_there_are_numbers() {
    let mut index = BlockIndex::new();
    for number in 0..=u16::MAX {
        assert_eq!(index.join(1), Some(BlockHolder(number)));
    }
    assert_eq!(index.join(1), None);
    index.leave(BlockHolder(123));
    assert_eq!(index.join(1), Some(BlockHolder(123)));
    index.store(BlockHolder(u16::MAX), &[5]).unwrap();
    let found = overlaps(&index, &[5, 6]);
    assert_eq!((found.len(), found[65_535]), (65_536, 1));
}

/// Keys that a worker made up, all with the same home.
#[test]
#[cfg_attr(miri, ignore = "chains of thousands of steps")]
fn made_up_keys_cost_credit_and_nothing_else() {
    let mut index = BlockIndex::new();
    let (liar, honest) = (index.join(100_000).unwrap(), index.join(100_000).unwrap());
    // times the inverse of the table's constant, so that the products are 1, 2, 3...: one home
    let mut inverse = 1_u64;
    for _ in 0..6 {
        inverse =
            inverse.wrapping_mul(2_u64.wrapping_sub(inverse.wrapping_mul(0x9E37_79B9_7F4A_7C15)));
    }
    let made_up: Vec<u64> = (1..=6000).map(|i: u64| i.wrapping_mul(inverse)).collect();
    let stored = index.store(liar, &made_up).unwrap();
    assert!((4000..=4096).contains(&stored), "{stored}");
    assert_eq!(index.held(liar), stored);
    let honestly = index.store(honest, &keys(1, 0..20_000)).unwrap();
    assert!(honestly > 20_000 - stored, "{honestly}");
    assert_eq!(index.held(honest), honestly);
    assert!(
        index.held(liar) <= stored,
        "those that crowd the larger table are let go, and counted"
    );
    let left = index.held(liar);
    assert_eq!(index.remove(liar, &made_up), left);
    assert_eq!(index.remove(honest, &keys(1, 0..20_000)), honestly);
    assert!(index.is_empty());
}
