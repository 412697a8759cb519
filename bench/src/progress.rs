//! A line on a terminal that says how far a run is.

use std::io::{IsTerminal as _, Write as _};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::{Duration, Instant};

use crate::report::sample::Sample;

const EVERY: Duration = Duration::from_millis(200);
const WIDTH: usize = 24;

/// What was sent and what came back. Its line is drawn until it is dropped, and only on a terminal.
#[derive(Debug)]
pub(crate) struct Progress {
    counts: Arc<Counts>,
    drawing: Option<tokio::task::JoinHandle<()>>,
}

#[derive(Debug, Default)]
struct Counts {
    /// 0 where it is not known beforehand.
    all: usize,
    sent: AtomicUsize,
    done: AtomicUsize,
    errors: AtomicUsize,
}

impl Progress {
    /// `all` is the number of requests, 0 where a time ends the run.
    pub(crate) fn new(name: &'static str, all: usize) -> Self {
        let counts = Arc::new(Counts { all, ..Counts::default() });
        let drawing = std::io::stderr().is_terminal().then(|| {
            let counts = Arc::clone(&counts);
            tokio::spawn(async move {
                let began = Instant::now();
                loop {
                    tokio::time::sleep(EVERY).await;
                    draw(&counts.line(name, began.elapsed()));
                }
            })
        });
        Self { counts, drawing }
    }

    pub(crate) fn sent(&self) {
        self.counts.sent.fetch_add(1, Relaxed);
    }

    pub(crate) fn done(&self, sample: &Sample) {
        self.counts.done.fetch_add(1, Relaxed);
        self.counts.errors.fetch_add(usize::from(sample.result.is_err()), Relaxed);
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        if let Some(drawing) = self.drawing.take() {
            drawing.abort();
            draw("");
        }
    }
}

/// Replaces the line.
fn draw(line: &str) {
    let _ = write!(std::io::stderr(), "\r\x1b[2K{line}"); // without a terminal nobody misses it
}

impl Counts {
    fn line(&self, name: &str, elapsed: Duration) -> String {
        let (sent, done) = (self.sent.load(Relaxed), self.done.load(Relaxed));
        let errors = self.errors.load(Relaxed);
        let seconds = elapsed.as_secs();
        let in_flight = sent.saturating_sub(done);
        let tail = format!("{done} answered, {in_flight} in flight, {errors} errors, {seconds} s");
        if self.all == 0 {
            return format!("{name}  {tail}");
        }
        let full = (WIDTH * done / self.all).min(WIDTH);
        let bar = format!("{}{}", "=".repeat(full), " ".repeat(WIDTH - full));
        format!("{name} [{bar}] of {}: {tail}", self.all)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_line_says_what_is_known() {
        let counts = Counts { all: 8, ..Counts::default() };
        counts.sent.store(4, Relaxed);
        counts.done.store(2, Relaxed);
        counts.errors.store(1, Relaxed);
        let line = counts.line("replay", Duration::from_secs(3));
        assert_eq!(
            line,
            "replay [======                  ] of 8: 2 answered, 2 in flight, 1 errors, 3 s"
        );
        let unknown = Counts::default().line("load", Duration::ZERO);
        assert_eq!(unknown, "load  0 answered, 0 in flight, 0 errors, 0 s");
    }
}
