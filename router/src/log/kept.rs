//! For tests: what is logged, in memory.

use std::io;
use std::sync::{Arc, Mutex};

use tracing_subscriber::fmt::MakeWriter;

/// All clones keep the same.
#[derive(Debug, Clone, Default)]
pub(super) struct KeptLog(Arc<Mutex<Vec<u8>>>);

impl KeptLog {
    pub(super) fn text(&self) -> String {
        String::from_utf8(self.0.lock().unwrap().clone()).unwrap()
    }
}

impl io::Write for KeptLog {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap().write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl MakeWriter<'_> for KeptLog {
    type Writer = Self;

    fn make_writer(&self) -> Self {
        self.clone()
    }
}
