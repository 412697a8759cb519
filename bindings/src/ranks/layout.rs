//! Where things lie in the memory that all ranks map, and the only code that touches it.
//!
//! ```text
//! head      what the ranks agree on, a count of alarms, and which rank was lost
//! ranks     a block each: process, doorbell, the round that it aborted and why
//! channels  a pair of counters for each pair of ranks: pieces sent, pieces taken
//! slots     for each pair of ranks, by receiver and then sender, two slices for pieces
//! ```
#![expect(
    unsafe_code,
    reason = "memory that other processes write to: words by atomics, bytes by `memory::copy`"
)]

use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicU32, AtomicU64};

use pyo3::buffer::PyBuffer;

use super::Ended;
use crate::memory;

const MAGIC: u64 = u64::from_le_bytes(*b"hrranks1");
/// Words that different ranks write to lie so far apart: two lines of a cache, as one brings its neighbour.
const LINE: usize = 128;
const TEXT_BYTES: usize = 248;
const TEXT: usize = TEXT_BYTES + size_of::<u64>();
const PAGE: usize = 4096;
/// Ranks of one host; what a larger number costs in memory nobody has looked at.
const MAX_RANKS: usize = 64;
const MAX_SLICE_BYTES: usize = 1 << 26;

// head
const READY: usize = 0;
const RANKS: usize = 8;
const SLICE_BYTES: usize = 16;
const ALARMS: usize = LINE;
const LOST: usize = 2 * LINE; // 0, 1 while it is written, 2
const LOST_RANK: usize = LOST + 8;
const LOST_TEXT: usize = LOST + 16;
const HEAD: usize = 4 * LINE + LINE;

// of a rank
const PROCESS: usize = 0;
const STATE: usize = 4;
const BELL: usize = LINE;
const SLEEPS: usize = LINE + 4;
const ABORTED: usize = 2 * LINE;
const REASONS: usize = 3 * LINE; // of even and of odd rounds
const RANK: usize = 3 * LINE + 2 * TEXT;

// of a channel
const SENT: usize = 0;
const TAKEN: usize = LINE;
const CHANNEL: usize = 2 * LINE;

const ABSENT: u32 = 0;
const JOINED: u32 = 1;
const CLOSED: u32 = 2;

/// Pieces that a channel holds.
pub(crate) const SLOTS: u64 = 2;
/// Words in front of a piece.
pub(crate) const PIECE_HEAD: usize = 6;

/// Sizes of a group.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Layout {
    ranks: usize,
    slice_bytes: usize,
}

impl Layout {
    pub(crate) fn new(ranks: usize, slice_bytes: usize) -> Result<Self, String> {
        if !(1..=MAX_RANKS).contains(&ranks) {
            return Err(format!("{ranks} ranks: 1 to {MAX_RANKS} may share memory"));
        }
        if !slice_bytes.is_multiple_of(PAGE) || !(PAGE..=MAX_SLICE_BYTES).contains(&slice_bytes) {
            return Err(format!(
                "slices of {slice_bytes} bytes: a multiple of {PAGE}, at most {MAX_SLICE_BYTES}"
            ));
        }
        Ok(Self { ranks, slice_bytes })
    }

    pub(crate) fn ranks(self) -> usize {
        self.ranks
    }

    /// Bytes of a parcel that go in one piece.
    pub(crate) fn piece_bytes(self) -> usize {
        self.slice_bytes - PIECE_HEAD * size_of::<u64>()
    }

    pub(crate) fn total_bytes(self) -> usize {
        self.slots() + self.ranks * self.ranks * SLOTS as usize * self.slice_bytes
    }

    fn rank(self, rank: usize) -> usize {
        HEAD + rank * RANK
    }

    fn channel(self, from: usize, to: usize) -> usize {
        HEAD + self.ranks * RANK + (to * self.ranks + from) * CHANNEL
    }

    fn slots(self) -> usize {
        (HEAD + self.ranks * (RANK + self.ranks * CHANNEL)).next_multiple_of(PAGE)
    }

    fn slot(self, from: usize, to: usize, piece: u64) -> usize {
        let slot = (to * self.ranks + from) * SLOTS as usize + (piece % SLOTS) as usize;
        self.slots() + slot * self.slice_bytes
    }
}

/// The memory. Nobody has a reference to its bytes: they are copied in and out.
#[derive(Debug)]
pub(crate) struct Shared {
    memory: PyBuffer<u8>,
    layout: Layout,
}

impl Shared {
    pub(crate) fn new(memory: PyBuffer<u8>, layout: Layout) -> Result<Self, String> {
        let (got, due) = (memory.len_bytes(), layout.total_bytes());
        if memory.readonly() || !memory.is_c_contiguous() || got != due {
            return Err(format!("writable memory of {due} bytes, and not of {got}"));
        }
        if !(memory.buf_ptr() as usize).is_multiple_of(PAGE) {
            return Err("the memory has to be mapped: it begins inside a page".to_owned());
        }
        Ok(Self { memory, layout })
    }

    pub(crate) fn layout(&self) -> Layout {
        self.layout
    }

    fn at(&self, offset: usize, len: usize) -> *mut u8 {
        assert!(offset + len <= self.memory.len_bytes(), "the layout lies inside the memory");
        // SAFETY: the offset is inside the buffer, as just checked
        unsafe { self.memory.buf_ptr().cast::<u8>().add(offset) }
    }

    fn word(&self, offset: usize) -> &AtomicU64 {
        let at = self.at(offset, size_of::<u64>());
        assert!(at.addr().is_multiple_of(align_of::<AtomicU64>()), "words are aligned");
        // SAFETY: aligned and inside the memory, which the buffer keeps where it is as long as `self` lives. The layout
        // gives these bytes to this word alone: each rank reads and writes them by atomic instructions of this width.
        unsafe { AtomicU64::from_ptr(at.cast()) }
    }

    fn half(&self, offset: usize) -> &AtomicU32 {
        let at = self.at(offset, size_of::<u32>());
        assert!(at.addr().is_multiple_of(align_of::<AtomicU32>()), "words are aligned");
        // SAFETY: as `word`
        unsafe { AtomicU32::from_ptr(at.cast()) }
    }

    fn copy_in(&self, from: *const u8, offset: usize, len: usize) {
        let to = self.at(offset, len);
        // SAFETY: `from` is good for `len` bytes, as each caller in this file shows; the target lies inside the memory.
        // Of what the layout has bytes for, one rank writes at a time, and others read after an atomic word says so; a
        // rank that breaks this is another process, and gets or makes wrong bytes, which `memory::copy` allows for.
        unsafe { memory::copy(from, to, len) };
    }

    fn copy_out(&self, offset: usize, to: *mut u8, len: usize) {
        let from = self.at(offset, len);
        // SAFETY: the source lies inside the memory and may change meanwhile; `to` is the caller's for `len` bytes, as
        // each caller in this file shows, and does not lie in this memory
        unsafe { memory::copy(from, to, len) };
    }

    fn write_text(&self, offset: usize, text: &str) {
        let end = (0..=TEXT_BYTES.min(text.len())).rev().find(|&end| text.is_char_boundary(end));
        let bytes = &text.as_bytes()[..end.unwrap_or(0)];
        self.copy_in(bytes.as_ptr(), offset + size_of::<u64>(), bytes.len());
        self.word(offset).store(bytes.len() as u64, Relaxed);
    }

    fn read_text(&self, offset: usize) -> String {
        let len = (self.word(offset).load(Relaxed) as usize).min(TEXT_BYTES);
        let mut bytes = [0; TEXT_BYTES];
        self.copy_out(offset + size_of::<u64>(), bytes.as_mut_ptr(), len);
        String::from_utf8_lossy(&bytes[..len]).into_owned()
    }

    // --- the group ---

    /// The first rank says what the group is. The memory is fresh: all bytes are zero.
    pub(crate) fn format(&self) {
        self.word(RANKS).store(self.layout.ranks as u64, Relaxed);
        self.word(SLICE_BYTES).store(self.layout.slice_bytes as u64, Relaxed);
        self.word(READY).store(MAGIC, Release);
    }

    /// Whether the first rank has said what the group is.
    pub(crate) fn ready(&self) -> Result<bool, String> {
        match self.word(READY).load(Acquire) {
            0 => return Ok(false),
            MAGIC => {}
            other => return Err(format!("this is no memory of ranks: it begins with {other:#x}")),
        }
        let (ranks, slice) = (self.word(RANKS).load(Relaxed), self.word(SLICE_BYTES).load(Relaxed));
        let (our_ranks, our_slice) = (self.layout.ranks, self.layout.slice_bytes);
        if (ranks, slice) != (our_ranks as u64, our_slice as u64) {
            return Err(format!(
                "the group has {ranks} ranks and slices of {slice} bytes, this rank was started with {our_ranks} and {our_slice}"
            ));
        }
        Ok(true)
    }

    /// How often something was said that ends a wait.
    pub(crate) fn alarms(&self) -> u64 {
        self.word(ALARMS).load(Acquire)
    }

    fn alarm(&self) {
        self.word(ALARMS).fetch_add(1, Release);
    }

    pub(crate) fn lost(&self) -> Option<Ended> {
        (self.word(LOST).load(Acquire) == 2).then(|| Ended::Lost {
            rank: self.word(LOST_RANK).load(Relaxed) as usize,
            waited_for: self.read_text(LOST_TEXT),
        })
    }

    /// Only the first call of all ranks has effect; what that one said, where it was not this.
    pub(crate) fn set_lost(&self, rank: usize, waited_for: &str) -> Option<Ended> {
        if self.word(LOST).compare_exchange(0, 1, AcqRel, Acquire).is_err() {
            return self.lost();
        }
        self.word(LOST_RANK).store(rank as u64, Relaxed);
        self.write_text(LOST_TEXT, waited_for);
        self.word(LOST).store(2, Release);
        self.alarm();
        None
    }

    // --- a rank ---

    /// Whether `rank` was free.
    pub(crate) fn set_joined(&self, rank: usize, process: u32) -> bool {
        let at = self.layout.rank(rank);
        // The process is written by whoever has the place, after which others may read it.
        if self.half(at + PROCESS).compare_exchange(0, process, AcqRel, Acquire).is_err() {
            return false;
        }
        self.half(at + STATE).store(JOINED, Release);
        true
    }

    /// Its process, once it has joined.
    pub(crate) fn process(&self, rank: usize) -> Option<u32> {
        let at = self.layout.rank(rank);
        (self.half(at + STATE).load(Acquire) != ABSENT)
            .then(|| self.half(at + PROCESS).load(Relaxed))
    }

    pub(crate) fn closed(&self, rank: usize) -> bool {
        self.half(self.layout.rank(rank) + STATE).load(Acquire) == CLOSED
    }

    pub(crate) fn set_closed(&self, rank: usize) {
        self.half(self.layout.rank(rank) + STATE).store(CLOSED, Release);
        self.alarm();
    }

    /// The last round that the rank aborted.
    pub(crate) fn aborted(&self, rank: usize) -> u64 {
        self.word(self.layout.rank(rank) + ABORTED).load(Acquire)
    }

    pub(crate) fn abort_reason(&self, rank: usize, round: u64) -> String {
        self.read_text(self.layout.rank(rank) + REASONS + (round % 2) as usize * TEXT)
    }

    pub(crate) fn set_aborted(&self, rank: usize, round: u64, reason: &str) {
        let at = self.layout.rank(rank);
        self.write_text(at + REASONS + (round % 2) as usize * TEXT, reason);
        self.word(at + ABORTED).store(round, Release);
        self.alarm();
    }

    /// The word that a rank sleeps on.
    pub(crate) fn bell(&self, rank: usize) -> &AtomicU32 {
        self.half(self.layout.rank(rank) + BELL)
    }

    /// 1 while the rank sleeps, or is about to.
    pub(crate) fn sleeps(&self, rank: usize) -> &AtomicU32 {
        self.half(self.layout.rank(rank) + SLEEPS)
    }

    // --- a channel ---

    pub(crate) fn sent(&self, from: usize, to: usize) -> &AtomicU64 {
        self.word(self.layout.channel(from, to) + SENT)
    }

    pub(crate) fn taken(&self, from: usize, to: usize) -> &AtomicU64 {
        self.word(self.layout.channel(from, to) + TAKEN)
    }

    pub(crate) fn write_head(&self, from: usize, to: usize, piece: u64, head: [u64; PIECE_HEAD]) {
        let at = self.layout.slot(from, to, piece);
        for (i, word) in head.into_iter().enumerate() {
            self.word(at + i * size_of::<u64>()).store(word, Relaxed);
        }
    }

    pub(crate) fn read_head(&self, from: usize, to: usize, piece: u64) -> [u64; PIECE_HEAD] {
        let at = self.layout.slot(from, to, piece);
        std::array::from_fn(|i| self.word(at + i * size_of::<u64>()).load(Relaxed))
    }

    /// Bytes `start` and on of a piece.
    fn payload(&self, from: usize, to: usize, piece: u64, start: usize, len: usize) -> usize {
        assert!(start + len <= self.layout.piece_bytes(), "a piece fits its slice");
        self.layout.slot(from, to, piece) + PIECE_HEAD * size_of::<u64>() + start
    }

    /// # Safety
    /// `source` is good for reads of `len` bytes.
    pub(crate) unsafe fn write_piece(
        &self,
        (from, to, piece): (usize, usize, u64),
        start: usize,
        source: *const u8,
        len: usize,
    ) {
        self.copy_in(source, self.payload(from, to, piece, start, len), len);
    }

    /// # Safety
    /// `target` is good for writes of `len` bytes, which nobody else touches meanwhile.
    pub(crate) unsafe fn read_piece(
        &self,
        (from, to, piece): (usize, usize, u64),
        start: usize,
        target: *mut u8,
        len: usize,
    ) {
        self.copy_out(self.payload(from, to, piece, start, len), target, len);
    }
}
