//! The log of the process: what it looks like, what becomes of it where stderr takes nothing, and panics in it.
//!
//! Nobody ever waits for the log. A line costs a copy into the bounded buffer of [`lines`]; where a pipe is not read, a
//! terminal is stopped or a disk is full, lines are lost, counted in `/metrics` and named by the next line that gets
//! through. `tracing-appender` bounds lines and not bytes, says nothing of a write that failed, and may lose what waits
//! at the end without a word.

#[cfg(test)]
mod kept;
mod lines;
mod rate;
pub(crate) mod requests;
mod stderr;
pub(crate) mod traces;

use std::backtrace::{Backtrace, BacktraceStatus};
use std::borrow::Cow;
use std::fmt;
use std::io::{self, IsTerminal as _, Write as _};
use std::panic::PanicHookInfo;
use std::sync::OnceLock;
use std::time::Duration;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::DescriptorEncoder;
use tracing_subscriber::fmt::MakeWriter;
use tracing_subscriber::{EnvFilter, reload};

use self::lines::{Lines, Lost};
use self::stderr::Stderr;
use crate::config::LogConfig;
use crate::metrics::Scrape;

/// At the end of the process its last lines get this long to be written. A guess: a pipe that is read at all takes them in
/// far less, and what waits for the process to end hardly notices.
pub const LAST_LINES: Duration = Duration::from_millis(200);

/// The log of this process; there is one stderr.
static LINES: OnceLock<Lines> = OnceLock::new();

/// Puts another filter in the place of the one that the log of this process began with.
static CHANGE_FILTER: OnceLock<ChangeFilter> = OnceLock::new();

type ChangeFilter = Box<dyn Fn(EnvFilter) -> Result<(), reload::Error> + Send + Sync>;

/// Sends the log to stderr. Without effect where the process has a log already.
///
/// # Errors
/// There is no thread for it.
pub fn init_log(log: &LogConfig) -> io::Result<()> {
    if LINES.get().is_some() {
        return Ok(());
    }
    let lines = Lines::start(Stderr, log.json)?;
    if LINES.set(lines).is_err() {
        return Ok(()); // somebody was quicker, and what was begun here ends with its handle
    }
    let filter = EnvFilter::try_new(&log.filter).expect("checked by config");
    let format = tracing_subscriber::fmt().with_env_filter(filter).with_writer(ToLines);
    let format = format.with_ansi(io::stderr().is_terminal());
    // the handle names the form in its type
    let (begun, change): (_, ChangeFilter) = if log.json {
        let format = format.json().with_filter_reloading();
        let handle = format.reload_handle();
        (format.try_init(), Box::new(move |filter| handle.reload(filter)))
    } else {
        let format = format.with_filter_reloading();
        let handle = format.reload_handle();
        (format.try_init(), Box::new(move |filter| handle.reload(filter)))
    };
    if begun.is_ok() {
        // Rust's own hook writes to stderr itself, and would wait for it
        std::panic::set_hook(Box::new(log_panic));
        let _ = CHANGE_FILTER.set(change); // it is the first: `LINES` let one in
    }
    Ok(())
}

/// Logs by another filter from now on. Without effect where the log is not this module's.
///
/// # Errors
/// The log of this process is gone.
pub(crate) fn change_filter(log: &LogConfig) -> Result<(), String> {
    let Some(change) = CHANGE_FILTER.get() else { return Ok(()) };
    let filter = EnvFilter::try_new(&log.filter).expect("checked by config");
    change(filter).map_err(|error| error.to_string())
}

/// A line as it is, without time and level: the last words of a program that fails.
pub(crate) fn say(line: &str) {
    match LINES.get() {
        Some(lines) => lines.push(format!("{line}\n").as_bytes()),
        None => say_at_once(line),
    }
}

#[expect(clippy::print_stderr, reason = "there is no log yet, and nobody who would wait")]
fn say_at_once(line: &str) {
    eprintln!("{line}");
}

/// Prints a line on stdout, on a thread of its own: a pipe that nobody reads holds nobody up.
pub(crate) fn print(line: String) {
    let thread = std::thread::Builder::new().name("stdout".into());
    let print = move || {
        if let Err(error) = writeln!(io::stdout(), "{line}").and_then(|()| io::stdout().flush()) {
            tracing::warn!(%error, "stdout did not take: {line}");
        }
    };
    if let Err(error) = thread.spawn(print) {
        tracing::warn!(%error, "no thread to write to stdout");
    }
}

/// Waits until all lines are written, but not longer than `timeout`. True if they are.
pub fn flush(timeout: Duration) -> bool {
    LINES.get().is_none_or(|lines| lines.flush(timeout))
}

/// Lines that were lost, for `/metrics`.
#[derive(Debug)]
pub(crate) struct LostLines(fn() -> Lost);

impl LostLines {
    pub(crate) fn of_this_process() -> Self {
        Self(|| LINES.get().map_or_else(Default::default, Lines::lost))
    }
}

impl Collector for LostLines {
    fn encode(&self, encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let lost = (self.0)();
        Scrape::new(encoder).counters(
            "headrace_log_lines_dropped_total",
            "Lines of the log that stderr did not take: it was too slow, or could not be written.",
            [
                ([("why", "too_slow")], lost.too_slow),
                ([("why", "write_failed")], lost.write_failed),
            ],
        )
    }
}

fn log_panic(panic: &PanicHookInfo<'_>) {
    let thread = std::thread::current();
    let (thread, place) = (thread.name().unwrap_or("?"), panic.location());
    let place = place.map_or_else(|| "?".to_owned(), ToString::to_string);
    let text = panic.payload().downcast_ref::<&str>().copied();
    let text = text.or_else(|| panic.payload().downcast_ref::<String>().map(String::as_str));
    let backtrace = Backtrace::capture(); // where RUST_BACKTRACE asks for one
    let backtrace = (backtrace.status() == BacktraceStatus::Captured).then_some(backtrace);
    let backtrace = backtrace.map(|backtrace| format!("\n{backtrace}")).unwrap_or_default();
    tracing::error!("thread {thread} panicked at {place}: {}{backtrace}", text.unwrap_or("?"));
}

/// What gives `tracing` its writers. Each event comes as one call of `write`.
struct ToLines;

impl io::Write for ToLines {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        if let Some(lines) = LINES.get() {
            lines.push(&one_line(line));
        }
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl MakeWriter<'_> for ToLines {
    type Writer = Self;

    fn make_writer(&self) -> Self {
        Self
    }
}

/// Longest line, in bytes: a backtrace fits. What workers and clients say is a part of some.
const LINE_BYTES: usize = 16 << 10;
/// Stands before what follows a line's first part, so that no text of a stranger passes for a line of its own.
const CONTINUED: &[u8] = b"\n    | ";

/// An event as one line: bounded, and whatever looks like further lines is marked as a part of it.
fn one_line(event: &[u8]) -> Cow<'_, [u8]> {
    let text = event.strip_suffix(b"\n").unwrap_or(event);
    if text.first() == Some(&b'{') {
        return event.into(); // JSON: it escapes line ends itself, and half an object is none
    }
    if text.len() <= LINE_BYTES && !text.iter().any(|byte| matches!(byte, b'\n' | b'\r')) {
        return event.into();
    }
    let mut line = Vec::with_capacity(text.len().min(LINE_BYTES) + 64);
    let mut end = text.len().min(LINE_BYTES);
    while end < text.len() && end > 0 && text[end] & 0xC0 == 0x80 {
        end -= 1; // the middle of a character
    }
    for byte in &text[..end] {
        match byte {
            b'\n' => line.extend_from_slice(CONTINUED),
            b'\r' => line.extend_from_slice(b"\\r"),
            byte => line.push(*byte),
        }
    }
    if text.len() > LINE_BYTES {
        line.extend_from_slice(b"...");
    }
    line.push(b'\n');
    line.into()
}

#[cfg(test)]
mod tests {
    use prometheus_client::registry::Registry;

    use super::*;
    use crate::metrics::Exposition;

    #[test]
    fn lost_lines_are_counted_by_why() {
        let mut registry = Registry::default();
        let lost = || Lost { too_slow: 3, write_failed: 5 };
        registry.register_collector(Box::new(LostLines(lost)));
        let text = Exposition::Text.render(&registry);
        assert!(text.contains("{why=\"too_slow\"} 3\n"), "{text}");
        assert!(text.contains("{why=\"write_failed\"} 5\n"), "{text}");
    }

    #[test]
    fn an_event_is_one_line_whatever_strangers_put_into_it() {
        let text =
            |event: &str| String::from_utf8(one_line(event.as_bytes()).into_owned()).unwrap();
        assert_eq!(text("as it is\n"), "as it is\n");
        let forged = "a worker said no\n2026-01-01T00:00:00Z  INFO all is well\r\n";
        assert_eq!(
            text(forged),
            "a worker said no\n    | 2026-01-01T00:00:00Z  INFO all is well\\r\n"
        );
        let long = text(&format!("{}\n", "x".repeat(LINE_BYTES + 9)));
        assert!(long.ends_with("x...\n") && long.len() == LINE_BYTES + 4, "{}", long.len());
    }
}
