//! Bytes of a stranger on the workers' port.
#![no_main]

use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::time::Duration;

use headrace_fuzz::{Stand, abort_on_panic};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    abort_on_panic();
    let stand = Stand::get();
    let mut socket = TcpStream::connect(&stand.workers).expect("the router listens to workers");
    socket.set_read_timeout(Some(Duration::from_secs(5))).expect("the time is above 0");
    // with its length before it, as frames travel; what is longer is cut off
    let length = u32::try_from(bytes.len()).expect("inputs are short");
    let _ = socket.write_all(&length.to_le_bytes()).and_then(|()| socket.write_all(bytes));
    let _ = socket.shutdown(std::net::Shutdown::Write);
    let mut said = Vec::new();
    if let Err(error) = socket.read_to_end(&mut said) {
        let reset = error.kind() == std::io::ErrorKind::ConnectionReset;
        assert!(reset, "the link stays open: {error}");
    }
    stand.check();
});
