//! The descriptor 2, without the lock of `std::io::stderr`: whoever waits in a write holds nobody else up.

use std::io;

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;

/// Waits as long as it takes, also where somebody who shares the descriptor has made it non-blocking.
#[derive(Debug, Clone, Copy)]
pub(super) struct Stderr;

impl io::Write for Stderr {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let stderr = rustix::stdio::stderr();
        loop {
            match rustix::io::write(stderr, bytes) {
                Ok(written) => return Ok(written),
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => {
                    let _ = poll(&mut [PollFd::new(&stderr, PollFlags::OUT)], None); // else it is tried again
                }
                Err(error) => return Err(error.into()),
            }
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
