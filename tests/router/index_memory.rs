//! The block index takes no more memory after millions of blocks than after the first ones, measured at the allocator.
//! Alone in its process, because the allocator counts for all threads. `make soak` runs the long one.

use std::alloc::System;
use std::collections::VecDeque;
use std::sync::Mutex;

use headrace_router::core::index::{BlockHolder, BlockIndex};
use stats_alloc::{INSTRUMENTED_SYSTEM, Region, StatsAlloc};

#[global_allocator]
static ALLOCATOR: &StatsAlloc<System> = &INSTRUMENTED_SYSTEM;

/// One test at a time, for the same reason.
static ALONE: Mutex<()> = Mutex::new(());

const WORKERS: usize = 8;
const CAPACITY: u32 = 5_000;

/// A worker with the runs of blocks it holds, oldest first; each is a range of numbers.
struct Worker {
    place: BlockHolder,
    runs: VecDeque<std::ops::Range<u64>>,
}

impl Worker {
    fn join(index: &mut BlockIndex) -> Self {
        Self { place: index.join(CAPACITY).expect("few places"), runs: VecDeque::new() }
    }

    /// Stores a run; evicts the oldest ones where there is no room.
    fn store(&mut self, index: &mut BlockIndex, run: std::ops::Range<u64>, keys: &mut Vec<u64>) {
        while index.held(self.place) + length(&run) > CAPACITY {
            let oldest = self.runs.pop_front().expect("held blocks are in runs");
            assert_eq!(index.remove(self.place, keys_of(&oldest, keys)), length(&oldest));
        }
        assert_eq!(index.store(self.place, keys_of(&run, keys)), Ok(length(&run)));
        self.runs.push_back(run);
    }
}

fn length(run: &std::ops::Range<u64>) -> u32 {
    u32::try_from(run.end - run.start).expect("a short run")
}

/// Random keys, each from the number of a block: a bijection (splitmix64).
fn keys_of<'a>(run: &std::ops::Range<u64>, keys: &'a mut Vec<u64>) -> &'a [u64] {
    keys.clear();
    keys.extend(run.clone().map(mix));
    keys
}

fn mix(x: u64) -> u64 {
    let x = x.wrapping_add(1).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    let x = (x ^ x >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let x = (x ^ x >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
    x ^ x >> 31
}

/// `blocks` unique blocks come and go, a third of them on two workers; now and then a worker dies with all it holds.
fn soak(blocks: u64) {
    let _alone = ALONE.lock();
    let region = Region::new(ALLOCATOR);
    let live = || {
        let change = region.change();
        change.bytes_allocated - change.bytes_deallocated
    };
    let mut index = BlockIndex::new();
    let mut workers: Vec<Worker> = (0..WORKERS).map(|_| Worker::join(&mut index)).collect();
    let mut keys = Vec::new();
    let (mut next, mut turn) = (0, 0_u64);
    let (mut first_peak, mut later_peak) = (0, 0);
    let (mut first_counted, mut later_counted) = (0, 0);
    while next < blocks {
        turn += 1;
        let random = mix(turn);
        let run = next..next + 1 + random % 64;
        next = run.end;
        let at = (random >> 8) as usize % WORKERS;
        if random >> 16 & 3 == 0 {
            workers[(at + 1) % WORKERS].store(&mut index, run.clone(), &mut keys);
        }
        workers[at].store(&mut index, run, &mut keys);
        if turn.is_multiple_of(2_000) {
            index.leave(workers[at].place);
            workers[at] = Worker::join(&mut index);
        }
        let (peak, counted) = if next < blocks / 5 {
            (&mut first_peak, &mut first_counted)
        } else {
            (&mut later_peak, &mut later_counted)
        };
        *peak = live().max(*peak);
        *counted = index.bytes().max(*counted);
    }
    assert!(later_peak <= first_peak * 21 / 20, "{first_peak} bytes grew to {later_peak}");
    assert!(later_counted <= first_counted, "{first_counted} bytes grew to {later_counted}");
    // `bytes` tells what the allocator sees, but for the runs that this test keeps
    assert!(later_counted.abs_diff(later_peak) < later_peak / 4, "{later_counted}, {later_peak}");
    for worker in workers {
        for run in worker.runs {
            index.remove(worker.place, keys_of(&run, &mut keys));
        }
        index.leave(worker.place);
    }
    assert!(index.bytes() < first_counted / 4, "{} bytes for nothing", index.bytes());
}

#[test]
fn memory_stays_flat_while_blocks_come_and_go() {
    soak(500_000);
}

#[test]
#[ignore = "ten million: `make soak`"]
fn memory_stays_flat_over_ten_million_blocks() {
    soak(10_000_000);
}
