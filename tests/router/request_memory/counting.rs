//! An allocator that counts, and who may look at its count: one test at a time.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Mutex, MutexGuard, PoisonError};

struct Counting;

static LIVE: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);

// SAFETY: both methods pass on to the system's allocator what they were given. Growing is the trait's own: a new
// allocation beside the old one, which is the most that it may take.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let live = LIVE.fetch_add(layout.size(), Relaxed) + layout.size();
        PEAK.fetch_max(live, Relaxed);
        // SAFETY: the caller's promise.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        LIVE.fetch_sub(layout.size(), Relaxed);
        // SAFETY: the caller's promise.
        unsafe { System.dealloc(at, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

static ALONE: Mutex<()> = Mutex::new(());

pub(super) fn alone() -> MutexGuard<'static, ()> {
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Memory from here on.
pub(super) struct Measure {
    before: usize,
}

impl Measure {
    pub(super) fn begin() -> Self {
        let before = LIVE.load(Relaxed);
        PEAK.store(before, Relaxed);
        Self { before }
    }

    /// What is there now and was not before.
    pub(super) fn grown(&self) -> usize {
        LIVE.load(Relaxed).saturating_sub(self.before)
    }

    pub(super) fn peak(&self) -> usize {
        PEAK.load(Relaxed).saturating_sub(self.before)
    }
}
