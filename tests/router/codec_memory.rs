//! How much memory decoding takes, measured. Alone in its process, because the allocator counts for all threads.

use std::alloc::System;

use headrace_router::core::frame::{Frame, Hello, MAX_FRAME_BYTES};
use headrace_router::fleet::codec::{FrameReader, decode};
use stats_alloc::{INSTRUMENTED_SYSTEM, Region, StatsAlloc};
use tokio::io::AsyncWriteExt;

#[global_allocator]
static ALLOCATOR: &StatsAlloc<System> = &INSTRUMENTED_SYSTEM;

/// Bytes of memory per byte of input. The worst field is a list of empty strings: 24 bytes for 1. Three nested lists
/// that each promise more than follows come to 31.
const FACTOR: usize = 32;

/// Allocated by `run`, freed again or not.
fn allocated(run: impl FnOnce()) -> usize {
    let region = Region::new(ALLOCATOR);
    run();
    region.change().bytes_allocated
}

/// A Hello whose `transfer` is this, as bytes.
fn hello_with_transfer(transfer: &[u8]) -> Vec<u8> {
    let mut body = b"\xdc\x00\x12\x01\x09\xa1w\x01\xa4both\xa1m".to_vec();
    body.extend(b"\x96\xa1a\xa1b\xa1c\xa1d\xa1e\x10\x96\x01\x01\x01\x01\0\0\x01\xc0");
    body.extend(transfer);
    body
}

#[test]
fn memory_is_bounded_by_the_input() {
    // honest and large: a million empty strings
    let mut transfer = b"\xdd\x00\x0f\x42\x40".to_vec();
    transfer.resize(transfer.len() + 1_000_000, 0xa0);
    transfer.extend(b"\xc4\x00\xc0\x00\xa1d\x90\x00\xa6halves");
    let body = hello_with_transfer(&transfer);
    let used = allocated(|| {
        let Ok(Frame::Hello(Hello { transfer, .. })) = decode(&body) else { panic!("a Hello") };
        assert_eq!(transfer.len(), 1_000_000);
    });
    assert!(used < FACTOR * body.len() && used > 20_000_000, "{used} for {}", body.len());

    // every length a lie: whatever follows is too short
    let lies: &[&[u8]] = &[
        b"\xdd\xff\xff\xff\xff",             // an array of 4 G items
        b"\x91\xdb\xff\xff\xff\xff",         // a string of 4 GB
        b"\xdd\x00\x00\x00\x05\xa0\xa0\xa0", // two short
    ];
    for lie in lies {
        let body = hello_with_transfer(lie);
        let used = allocated(|| assert!(decode(&body).is_err()));
        assert!(used < FACTOR * body.len() + 256, "{used} for {}", body.len());
    }

    // nested lies: outputs, their logprobs and their top all claim every byte that is left
    let mut body =
        b"\x9d\x05\x01\xcb\0\0\0\0\0\0\0\0\0\x01\x01\x01\x01\x01\x00\x00\x95\0\0\0\0\0".to_vec();
    let claim = |body: &mut Vec<u8>, left: u32| {
        body.push(0xdd);
        body.extend(left.to_be_bytes());
    };
    const LEFT: u32 = 3_000_000;
    claim(&mut body, LEFT / 7);
    body.extend(b"\x96\x01\x90");
    claim(&mut body, LEFT / 3);
    body.extend(b"\x92\xcb\0\0\0\0\0\0\0\0");
    claim(&mut body, LEFT / 3);
    body.resize(body.len() + LEFT as usize, 0x92); // no f64 anywhere
    let used = allocated(|| assert!(decode(&body).is_err()));
    assert!(used < FACTOR * body.len(), "{used} for {}", body.len());

    // a header may promise 64 MiB; the reader takes memory for what came
    let runtime = tokio::runtime::Builder::new_current_thread().build().expect("a runtime");
    let used = allocated(|| {
        runtime.block_on(async {
            let (mut near, far) = tokio::io::duplex(1 << 10);
            let header = u32::try_from(MAX_FRAME_BYTES).expect("64 MiB").to_le_bytes();
            near.write_all(&header).await.expect("room");
            near.write_all(&[0; 1000]).await.expect("room");
            drop(near);
            assert!(FrameReader::new(far, MAX_FRAME_BYTES).next().await.is_err());
        });
    });
    assert!(used < 256 << 10, "{used}");
}
