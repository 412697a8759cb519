//! Bytes of a peer as a frame: read or refused, and what was read is written as it was understood.
#![no_main]

use headrace_router::fleet::codec::{decode, encode};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let Ok(frame) = decode(bytes) else { return };
    let mut written = Vec::new();
    encode(&frame, &mut written).expect("a frame that was read can be sent");
    let again = decode(&written).expect("a frame that was written can be read");
    let mut twice = Vec::new();
    encode(&again, &mut twice).expect("and sent again");
    assert_eq!(written, twice); // NaN is not itself, its bytes are
});
