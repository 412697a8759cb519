//! Copies and reads of memory that others may write to (`bindings/src/memory.rs`), at every alignment and overlap. Miri runs
//! them, too, with the atomic loads that stand in for the instruction there.
#![expect(unsafe_code, reason = "what is tested takes raw pointers")]

#[path = "../../bindings/src/memory.rs"]
mod memory;

/// Bytes that go through the stack at once.
const PIECE: usize = 4096;
/// Offsets of source and target.
const OFFSETS: usize = if cfg!(miri) { 3 } else { 17 };

fn bytes(len: usize) -> Vec<u8> {
    (0..len).map(|i| (i * 31 + i / 251) as u8).collect()
}

fn lengths() -> Vec<usize> {
    let long = if cfg!(miri) { vec![PIECE + 3] } else { vec![PIECE - 1, PIECE, 2 * PIECE + 9] };
    [&[0, 1, 7, 8, 9, 23][..], &long].concat()
}

#[test]
fn shared_memory_is_copied_whole_wherever_source_and_target_begin() {
    for len in lengths() {
        for (from, to) in (0..OFFSETS).flat_map(|from| (0..OFFSETS).map(move |to| (from, to))) {
            let (mut source, mut target) = (bytes(from + len), vec![0xEE; to + len + 1]);
            // SAFETY: both have `len` bytes from there on, and nobody else has them
            unsafe {
                memory::copy(source.as_mut_ptr().add(from), target.as_mut_ptr().add(to), len);
            }
            assert_eq!(target[to..to + len], source[from..], "{len} bytes from {from} to {to}");
            assert!(target[..to].iter().chain(&target[to + len..]).all(|&byte| byte == 0xEE));
        }
    }
}

#[test]
fn shared_memory_is_copied_whole_where_source_and_target_overlap() {
    for len in lengths() {
        for apart in [0, 1, 7, 8, 9, len / 2, len.saturating_sub(1), len] {
            for (from, to) in [(0, apart), (apart, 0), (3, 3 + apart), (3 + apart, 3)] {
                let mut shared = bytes(len + apart + 3);
                let mut expected = shared.clone();
                expected.copy_within(from..from + len, to);
                let base = shared.as_mut_ptr();
                // SAFETY: both ranges lie inside of `shared`, which nobody else has
                unsafe {
                    memory::copy(base.add(from), base.add(to), len);
                }
                assert_eq!(shared, expected, "{len} bytes from {from} to {to}");
            }
        }
    }
}

#[test]
fn shared_memory_is_read_in_order_and_in_pieces() {
    for len in lengths() {
        for from in 0..OFFSETS {
            let mut source = bytes(from + len);
            let mut seen = Vec::new();
            // SAFETY: there are `len` bytes from there on, and nobody else has them
            unsafe {
                memory::read(source.as_mut_ptr().add(from), len, |piece| {
                    assert!((1..=PIECE).contains(&piece.len()));
                    seen.extend_from_slice(piece);
                });
            }
            assert_eq!(seen, source[from..], "{len} bytes from {from}");
        }
    }
}
