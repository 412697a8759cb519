//! Lines on their way to where a write may take for ever: a bounded buffer, and one thread that writes.
//!
//! Lines lie one after the other in one buffer, so a bound in bytes bounds them all. The thread takes the whole buffer and
//! leaves an empty one; while it writes, lines gather in that. Once a line finds no room, none does until the thread is
//! back: what is lost is one gap, and the thread says how long it was where it was.

use std::io;
use std::mem;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tracing_subscriber::fmt::format::Writer as FormatWriter;
use tracing_subscriber::fmt::time::{FormatTime as _, SystemTime};

/// Bytes that may wait; as many again are being written. Some 10,000 lines: a second of a busy debug log. A guess.
pub(super) const WAITING_BYTES: usize = 1 << 20;

/// Whole lines up to this length are written at once, which a pipe takes as one piece (`PIPE_BUF` of Linux): lines of
/// others who write to the same pipe do not get into them.
const PIECE_BYTES: usize = 4_096;

/// The way to the thread. When it drops, the thread ends after the last line.
#[derive(Debug)]
pub(super) struct Lines(Arc<Shared>);

#[derive(Debug, Default)]
struct Shared {
    state: Mutex<State>,
    /// The thread has something to do.
    news: Condvar,
    /// It has nothing left to do.
    idle: Condvar,
    too_slow: AtomicU64,
    write_failed: AtomicU64,
}

#[derive(Debug, Default)]
struct State {
    waiting: Vec<u8>,
    /// Lines that found no room since the thread last was here.
    turned_away: u64,
    /// The thread has lines in its hands.
    writing: bool,
    /// Who waits until all is written: where nobody does, nobody is woken, which is a system call a line.
    flushing: usize,
    closed: bool,
}

/// Lines that did not get out.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Lost {
    /// The buffer was full.
    pub(super) too_slow: u64,
    /// The write failed.
    pub(super) write_failed: u64,
}

impl Lines {
    /// Starts the thread. With `json`, what it has to say itself is JSON.
    ///
    /// # Errors
    /// The system refuses a thread.
    pub(super) fn start(out: impl io::Write + Send + 'static, json: bool) -> io::Result<Self> {
        let shared = Arc::new(Shared::default());
        let writer = Writer {
            shared: Arc::clone(&shared),
            out,
            json,
            torn: false,
            untold: Lost::default(),
            reason: String::new(),
        };
        std::thread::Builder::new().name("log".into()).spawn(move || writer.run())?;
        Ok(Self(shared))
    }

    /// Adds a line, its end included, or counts it as lost. Never waits for a write.
    pub(super) fn push(&self, line: &[u8]) {
        let mut state = self.0.lock();
        let sleeps = !state.writing && !state.has_work(); // else it was told already
        if state.turned_away > 0 || state.waiting.len() + line.len() > WAITING_BYTES {
            state.turned_away += 1;
            self.0.too_slow.fetch_add(1, Relaxed);
        } else {
            state.waiting.extend_from_slice(line);
        }
        drop(state); // it wakes to a lock that is free
        if sleeps {
            self.0.news.notify_one();
        }
    }

    /// All lines that were lost so far.
    pub(super) fn lost(&self) -> Lost {
        Lost {
            too_slow: self.0.too_slow.load(Relaxed),
            write_failed: self.0.write_failed.load(Relaxed),
        }
    }

    /// Waits until all is written, but not longer than `timeout`. True if it is.
    pub(super) fn flush(&self, timeout: Duration) -> bool {
        let busy = |state: &mut State| state.has_work() || state.writing;
        let mut state = self.0.lock();
        state.flushing += 1;
        let waited = self.0.idle.wait_timeout_while(state, timeout, busy);
        let (mut state, waited) = waited.unwrap_or_else(PoisonError::into_inner);
        state.flushing -= 1;
        !waited.timed_out()
    }
}

impl Drop for Lines {
    fn drop(&mut self) {
        self.0.lock().closed = true;
        self.0.news.notify_one();
    }
}

impl Shared {
    /// Nothing that can panic runs under it.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn has_work(&self) -> bool {
        !self.waiting.is_empty() || self.turned_away > 0
    }
}

/// The thread's own.
struct Writer<W> {
    shared: Arc<Shared>,
    out: W,
    json: bool,
    /// A write broke off inside of a line.
    torn: bool,
    /// Lost, and not said yet.
    untold: Lost,
    /// Of the last write that failed.
    reason: String,
}

impl<W: io::Write> Writer<W> {
    fn run(mut self) {
        let mut batch = Vec::new();
        while let Some(turned_away) = self.take(&mut batch) {
            let mut rest = &batch[..];
            while !rest.is_empty() {
                let (piece, after) = rest.split_at(first_piece(rest));
                self.write(piece);
                rest = after;
            }
            self.untold.too_slow += turned_away;
            if turned_away > 0 {
                self.write(&[]); // only what is to be said of it
            }
            batch.clear();
        }
    }

    /// Waits for lines; how many were turned away behind them. `None` at the end.
    fn take(&mut self, batch: &mut Vec<u8>) -> Option<u64> {
        let mut state = self.shared.lock();
        state.writing = false;
        if !state.has_work() {
            if state.flushing > 0 {
                self.shared.idle.notify_all();
            }
            let nothing = |state: &mut State| !state.has_work() && !state.closed;
            let waited = self.shared.news.wait_while(state, nothing);
            state = waited.unwrap_or_else(PoisonError::into_inner);
        }
        if !state.has_work() {
            return None;
        }
        state.writing = true;
        mem::swap(&mut state.waiting, batch);
        Some(mem::take(&mut state.turned_away))
    }

    /// Writes lines, and before them how many were lost; counts those that are lost now.
    fn write(&mut self, lines: &[u8]) {
        let mut told = Ok(());
        if self.untold != Lost::default() {
            let notice = notice(self.untold, &self.reason, self.json);
            told = self.write_whole(notice.as_bytes());
            if told.is_ok() {
                self.untold = Lost::default();
            }
        }
        let written = match told {
            Ok(()) => self.write_whole(lines),
            Err((error, _)) => Err((error, lines.len())),
        };
        if let Err((error, left)) = written {
            let lost = lines[lines.len() - left..].iter().filter(|byte| **byte == b'\n').count();
            self.shared.write_failed.fetch_add(lost as u64, Relaxed);
            self.untold.write_failed += lost as u64;
            self.reason = error.to_string();
        }
    }

    /// An error comes with the number of bytes that are left.
    fn write_whole(&mut self, bytes: &[u8]) -> Result<(), (io::Error, usize)> {
        let mut rest = bytes;
        while !rest.is_empty() {
            let begin: &[u8] = if self.torn { b"\n" } else { rest };
            match self.out.write(begin) {
                Ok(0) => return Err((io::ErrorKind::WriteZero.into(), rest.len())),
                Ok(_) if self.torn => self.torn = false,
                Ok(written) => rest = &rest[written..],
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => {
                    let written = bytes.len() - rest.len();
                    self.torn |= written > 0 && bytes[written - 1] != b'\n';
                    return Err((error, rest.len()));
                }
            }
        }
        Ok(())
    }
}

/// Bytes of as many whole lines as are written at once, at least one.
fn first_piece(lines: &[u8]) -> usize {
    let end = |bytes: &[u8]| bytes.iter().rposition(|byte| *byte == b'\n').map(|at| at + 1);
    let short = &lines[..lines.len().min(PIECE_BYTES)];
    end(short)
        .or_else(|| lines.iter().position(|byte| *byte == b'\n').map(|at| at + 1))
        .unwrap_or(lines.len())
}

/// The line about lost ones.
fn notice(lost: Lost, reason: &str, json: bool) -> String {
    let mut time = String::new();
    let _ = SystemTime.format_time(&mut FormatWriter::new(&mut time)); // without, it says less
    let Lost { too_slow, write_failed } = lost;
    if json {
        let line = serde_json::json!({
            "timestamp": time,
            "level": "WARN",
            "fields": {
                "message": "lines of the log were lost",
                "too_slow": too_slow,
                "write_failed": write_failed,
                "error": reason,
            },
            "target": "headrace_router::log",
        });
        return format!("{line}\n");
    }
    let mut why = Vec::new();
    if too_slow > 0 {
        why.push(format!("{too_slow} because stderr took them too slowly"));
    }
    if write_failed > 0 {
        why.push(format!("{write_failed} because it could not be written ({reason})"));
    }
    let why = why.join(", ");
    format!("{time}  WARN headrace_router::log: lines of the log were lost here: {why}\n")
}

#[cfg(test)]
mod tests;
