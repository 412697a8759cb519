//! Copies out of memory that others may write to meanwhile: pools that are shared with other processes, and buffers of
//! Python, whose threads go on while the GIL is given up.
//!
//! A reference to such memory, or a plain read of it, promises the compiler that nobody writes: a broken promise is
//! undefined behaviour, whatever becomes of the bytes. So no reference is made, and the reads are either one instruction
//! that the compiler cannot look into, or atomic. Bytes that were written meanwhile are old or new, each by itself;
//! whether they are of use is for the caller to know (they are not where a ticket was withdrawn).
//!
//! Why this is sound:
//! - `rep movsb` in `asm!` is opaque: the compiler assumes no more than that some bytes behind the target pointer changed.
//!   The direction flag is clear when `asm!` begins, the three registers that change are outputs, and the stack is not used.
//! - The other way, relaxed atomic loads race with nobody. Writers are no Rust code: they are Python's C code and other
//!   processes, which are outside of Rust's memory model.
//! - Targets are written plainly. Nobody else has them: they are blocks that are reserved for this copy, or on our stack.
#![expect(unsafe_code, reason = "reads through raw pointers; see above")]

/// Bytes that are copied by way of the stack in one go; a page, so that they stay in the first-level cache.
const PIECE: usize = 4096;

/// Copies `len` bytes; the two ranges may overlap.
///
/// # Safety
/// `from` is good for reads and `to` for writes of `len` bytes, and nobody else reads or writes those behind `to` until
/// this returns. Others may write to those behind `from`, which was not made of a shared reference.
pub(crate) unsafe fn copy(from: *const u8, to: *mut u8, len: usize) {
    let ahead = to.addr().wrapping_sub(from.addr());
    if ahead == 0 || ahead >= len {
        // SAFETY: as the caller promises; going forward, no byte is overwritten before it was read
        unsafe { forward(from, to, len) };
        return;
    }
    // The target begins inside the source: from the end to the beginning, each piece by way of the stack.
    let mut piece = [0; PIECE];
    let mut left = len;
    while left > 0 {
        let count = left.min(PIECE);
        left -= count;
        // SAFETY: `left + count <= len`, and `piece` holds `count` bytes and overlaps with nothing
        unsafe {
            forward(from.add(left), piece.as_mut_ptr(), count);
            forward(piece.as_mut_ptr(), to.add(left), count);
        }
    }
}

/// Gives the bytes to `take`, in order and in pieces.
///
/// # Safety
/// `from` is good for reads of `len` bytes, and was not made of a shared reference. Others may write to them.
pub(crate) unsafe fn read(from: *const u8, len: usize, mut take: impl FnMut(&[u8])) {
    let mut piece = [0; PIECE];
    let mut done = 0;
    while done < len {
        let count = (len - done).min(PIECE);
        // SAFETY: `done + count <= len`, and `piece` holds `count` bytes and overlaps with nothing
        unsafe { forward(from.add(done), piece.as_mut_ptr(), count) };
        take(&piece[..count]);
        done += count;
    }
}

/// Byte after byte from the first to the last, as far as anybody can tell.
///
/// # Safety
/// As [`copy`], and `to` does not lie inside the source past its first byte.
#[cfg(all(target_arch = "x86_64", not(miri)))]
unsafe fn forward(from: *const u8, to: *mut u8, len: usize) {
    // SAFETY: as the caller promises; see the top of the file
    unsafe {
        std::arch::asm!(
            "rep movsb",
            inout("rcx") len => _,
            inout("rsi") from => _,
            inout("rdi") to => _,
            options(nostack, preserves_flags)
        );
    }
}

/// # Safety
/// As [`copy`], and `to` does not lie inside the source past its first byte.
#[cfg(any(not(target_arch = "x86_64"), miri))]
unsafe fn forward(from: *const u8, to: *mut u8, len: usize) {
    use std::sync::atomic::{AtomicU8, AtomicU64, Ordering::Relaxed};

    const WORD: usize = size_of::<u64>();
    let mut done = 0;
    while done < len {
        // SAFETY: what is read and written lies before `len`, and a word is read where it is aligned
        unsafe {
            let at = from.add(done).cast_mut();
            if len - done >= WORD && at.addr().is_multiple_of(WORD) {
                let word = AtomicU64::from_ptr(at.cast()).load(Relaxed);
                to.add(done).cast::<u64>().write_unaligned(word);
                done += WORD;
            } else {
                to.add(done).write(AtomicU8::from_ptr(at).load(Relaxed));
                done += 1;
            }
        }
    }
}
