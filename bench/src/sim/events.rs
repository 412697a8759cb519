//! What happens when: the earliest first, and of those at one time the one that was known first.

use std::cmp::{Ordering, Reverse};
use std::collections::BinaryHeap;

/// Something that is due. Workers and requests go by their numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Event {
    /// A request comes.
    Arrives(usize),
    /// A request has waited long enough in the router, under this ticket.
    GivesUp {
        request: usize,
        ticket: u64,
    },
    /// Those who gathered at a router are placed.
    Gathered(usize),
    /// A worker's step ends, unless the worker has been another since.
    StepEnds {
        worker: usize,
        life: u64,
    },
    /// A worker's faults may begin or end.
    Changes(usize),
    /// A worker has been silent for a while, or too long.
    Silent {
        worker: usize,
        life: u64,
    },
    Lost {
        worker: usize,
        life: u64,
    },
    /// Something that other workers did is due on a worker.
    News(usize),
    /// The autoscaler looks at what is needed.
    Scales,
    /// A worker that it started is there, unless it was stopped since.
    Started {
        worker: usize,
        life: u64,
    },
    /// The router looks after everything that no frame looks after; idle workers give a sign of life.
    Sweep,
}

#[derive(Debug, Default)]
pub(super) struct Events {
    heap: BinaryHeap<Reverse<Due>>,
    count: u64,
}

#[derive(Debug)]
struct Due {
    at_ms: f64,
    number: u64,
    event: Event,
}

impl Events {
    pub(super) fn at(&mut self, at_ms: f64, event: Event) {
        self.count += 1;
        self.heap.push(Reverse(Due { at_ms, number: self.count, event }));
    }

    pub(super) fn next(&mut self) -> Option<(f64, Event)> {
        self.heap.pop().map(|Reverse(due)| (due.at_ms, due.event))
    }
}

impl PartialEq for Due {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl Eq for Due {}

impl PartialOrd for Due {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Due {
    fn cmp(&self, other: &Self) -> Ordering {
        self.at_ms.total_cmp(&other.at_ms).then(self.number.cmp(&other.number))
    }
}
