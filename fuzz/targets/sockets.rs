//! Bytes on a client's connection: heads, chunks, HTTP/2 prefaces, whatever; the router closes and serves the next one.
#![no_main]

use headrace_fuzz::{Stand, abort_on_panic};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    abort_on_panic();
    let stand = Stand::get();
    let said = stand.send_and_close(bytes);
    assert_ne!(said.status(), Some(500), "{}", String::from_utf8_lossy(&said.bytes));
    stand.check();
});
