//! Decisions as lines of JSON in a file, written by one thread. The file and the one before it, `PATH.1`, together never
//! take more than the bound.
//!
//! Placing a request costs one attempt to put a pointer into a bounded channel: if the disk cannot keep up or is full, lines
//! are dropped and counted, and requests go on. With the first write that works again, so does the log. Where somebody has
//! removed the file, to make room, or put it aside, a new one is begun: that is looked at once a second while lines come.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read as _, Seek as _, SeekFrom, Write as _};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use serde::Serialize;

use crate::config::DecisionLogConfig;
use crate::metrics::Metrics;

/// Lines that may wait for the disk.
const WAITING: usize = 4_096;
/// The disk gets at least so much at once while lines wait.
const BUFFER_BYTES: usize = 64 << 10;
/// Whether the file is still there is looked at so often at most. A guess: lines of one second are little to lose, and a
/// look costs some us.
const LOOK: Duration = Duration::from_secs(1);

/// The way to the thread that writes. Dropping it waits until all lines are written.
#[derive(Debug)]
pub(crate) struct DecisionLog<T> {
    /// `None` only while it drops.
    lines: Option<SyncSender<Arc<T>>>,
    thread: Option<JoinHandle<()>>,
    metrics: Arc<Metrics>,
}

impl<T: Serialize + Send + Sync + 'static> DecisionLog<T> {
    /// Opens the file, to go on after what it holds, and starts the thread. On a full disk it is opened later.
    ///
    /// # Errors
    /// It cannot be opened, or holds something else.
    pub(crate) fn start(config: &DecisionLogConfig, metrics: Arc<Metrics>) -> io::Result<Self> {
        let file = LogFile::open(&config.path, config.max_bytes / 2)?;
        let (lines, inbox) = sync_channel(WAITING);
        let metrics_of_writer = Arc::clone(&metrics);
        let mut writer = Writer { file, metrics: metrics_of_writer, failing: false, looked: None };
        let thread = std::thread::Builder::new().name("decision-log".into());
        let thread = thread.spawn(move || writer.run(&inbox))?;
        Ok(Self { lines: Some(lines), thread: Some(thread), metrics })
    }

    /// Writes a line soon, or counts it as dropped.
    pub(crate) fn write(&self, line: &Arc<T>) {
        let Some(lines) = &self.lines else { return };
        match lines.try_send(Arc::clone(line)) {
            Ok(()) => {}
            Err(TrySendError::Full(_) | TrySendError::Disconnected(_)) => {
                self.metrics.scheduling.log_dropped.inc();
            }
        }
    }
}

impl<T> Drop for DecisionLog<T> {
    fn drop(&mut self) {
        self.lines = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join(); // it has nothing to say
        }
    }
}

struct Writer {
    file: LogFile,
    metrics: Arc<Metrics>,
    /// The last write failed, which the log says already.
    failing: bool,
    /// When it last was looked whether the file is still there.
    looked: Option<Instant>,
}

impl Writer {
    fn run<T: Serialize>(&mut self, inbox: &Receiver<Arc<T>>) {
        let mut line = Vec::new();
        while let Ok(first) = inbox.recv() {
            let mut next = Some(first);
            while let Some(decision) = next {
                line.clear();
                serde_json::to_writer(&mut line, &*decision).expect("plain data");
                line.push(b'\n');
                self.look(Instant::now());
                let written = self.file.append(&line);
                self.note(written);
                next = inbox.try_recv().ok();
            }
            let written = self.file.flush();
            self.note(written);
        }
    }

    /// Goes on with the file that is at the path now, or a new one, where that is not the one that is open.
    fn look(&mut self, now: Instant) {
        if self.looked.is_some_and(|last| now - last < LOOK) {
            return;
        }
        self.looked = Some(now);
        if !self.file.is_elsewhere() {
            return;
        }
        self.metrics.scheduling.log_reopened.inc();
        match self.file.reopen() {
            Ok(()) => {
                let path = self.file.path.display();
                tracing::info!(
                    "the decision log {path} was removed or replaced, and goes on there"
                );
            }
            Err(error) => self.note(Err(Lost::Failed { lines: 0, error })),
        }
    }

    fn note(&mut self, written: Result<(), Lost>) {
        match written {
            Ok(()) => {}
            Err(Lost::TooLong) => {
                self.metrics.scheduling.log_dropped.inc();
            }
            Err(Lost::Failed { lines, error }) => {
                self.metrics.scheduling.log_errors.inc_by(lines);
                if !self.failing {
                    let path = self.file.path.display();
                    tracing::warn!(
                        %error,
                        "cannot write the decision log {path}: decisions are lost until it can be \
                         written again; make room, or name another --decision-log"
                    );
                }
                self.failing = true;
                return;
            }
        }
        if self.failing && self.file.waiting_lines == 0 {
            tracing::info!("the decision log can be written again");
            self.failing = false;
        }
    }
}

/// Lines that did not get to the disk.
#[derive(Debug)]
enum Lost {
    /// It is longer than a whole file may be.
    TooLong,
    /// The disk did not take them.
    Failed { lines: u64, error: io::Error },
}

impl Lost {
    fn with_one_more(self) -> Self {
        match self {
            Self::TooLong => self,
            Self::Failed { lines, error } => Self::Failed { lines: lines + 1, error },
        }
    }
}

/// The file, its buffer, and the file before it.
#[derive(Debug)]
struct LogFile {
    path: PathBuf,
    before: PathBuf,
    /// `None` while there is no room for one.
    file: Option<File>,
    max_bytes: u64,
    /// In the file.
    bytes: u64,
    buffer: Vec<u8>,
    waiting_lines: u64,
    /// A line in the file may be without its end.
    torn: bool,
}

impl LogFile {
    fn open(path: &Path, max_bytes: u64) -> io::Result<Self> {
        let mut before = path.as_os_str().to_owned();
        before.push(".1");
        let before = PathBuf::from(before);
        ends_inside_a_line(path)?; // what is no log is not put aside either
        let length = |path: &Path| fs::metadata(path).map_or(0, |data| data.len());
        // as with an earlier, larger bound
        if length(path) > max_bytes {
            fs::rename(path, &before)?;
        }
        if length(&before) > max_bytes {
            tracing::warn!(path = %before.display(), "removed: larger than half --decision-log-bytes");
            fs::remove_file(&before)?;
        }
        let mut log = Self {
            path: path.to_owned(),
            before,
            file: None,
            max_bytes,
            bytes: 0,
            buffer: Vec::new(),
            waiting_lines: 0,
            torn: false,
        };
        match log.reopen() {
            Err(error) if is_full(&error) => {
                tracing::warn!(%error, "no room for the decision log {} yet", path.display());
            }
            opened => opened?,
        }
        Ok(log)
    }

    /// Opens what is at the path, or makes it.
    fn reopen(&mut self) -> io::Result<()> {
        (self.file, self.bytes, self.torn) = (None, 0, false);
        let torn = ends_inside_a_line(&self.path)?;
        let file = open_to_append(&self.path)?;
        self.bytes = file.metadata()?.len();
        self.file = Some(file);
        self.torn = torn;
        Ok(())
    }

    /// True if the open file is not the one at the path: somebody removed it or put it aside. Open it would keep its room.
    fn is_elsewhere(&self) -> bool {
        let Some(Ok(ours)) = self.file.as_ref().map(File::metadata) else { return false };
        match fs::metadata(&self.path) {
            Ok(there) => (there.dev(), there.ino()) != (ours.dev(), ours.ino()),
            Err(error) => error.kind() == io::ErrorKind::NotFound,
        }
    }

    fn append(&mut self, line: &[u8]) -> Result<(), Lost> {
        if line.len() as u64 > self.max_bytes {
            return Err(Lost::TooLong);
        }
        let waiting = (self.buffer.len() + usize::from(self.torn)) as u64;
        if self.bytes + waiting + line.len() as u64 > self.max_bytes {
            self.flush().and_then(|()| self.rotate()).map_err(Lost::with_one_more)?;
        }
        self.buffer.extend_from_slice(line);
        self.waiting_lines += 1;
        if self.buffer.len() >= BUFFER_BYTES { self.flush() } else { Ok(()) }
    }

    fn flush(&mut self) -> Result<(), Lost> {
        if self.buffer.is_empty() {
            return Ok(());
        }
        let written = self.write_buffer();
        if written.is_err() {
            self.torn = self.bytes > 0; // at worst an empty line
        }
        let lines = std::mem::take(&mut self.waiting_lines);
        self.buffer.clear();
        written.map_err(|error| Lost::Failed { lines, error })
    }

    fn write_buffer(&mut self) -> io::Result<()> {
        if self.file.is_none() {
            self.reopen()?;
        }
        if std::mem::take(&mut self.torn) {
            self.buffer.insert(0, b'\n');
        }
        let file = self.file.as_mut().expect("it was opened above");
        let written = file.write_all(&self.buffer);
        self.bytes = match written {
            Ok(()) => self.bytes + self.buffer.len() as u64,
            Err(_) => file.metadata().map_or(self.max_bytes, |data| data.len()),
        };
        written
    }

    /// Begins a new file. The one that was full becomes the one before, which is gone then.
    fn rotate(&mut self) -> Result<(), Lost> {
        let failed = |error| Lost::Failed { lines: 0, error };
        match fs::rename(&self.path, &self.before) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(failed(error)),
            Ok(()) | Err(_) => {} // put aside now, or when there was no room for the next one
        }
        self.reopen().map_err(failed)
    }
}

fn open_to_append(path: &Path) -> io::Result<File> {
    OpenOptions::new().create(true).append(true).open(path)
}

/// There may be room later.
fn is_full(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded)
}

/// True if the file's last line has no end, as after a crash.
///
/// # Errors
/// It cannot be read, or it is no log: nothing is appended to a file that was named by mistake.
fn ends_inside_a_line(path: &Path) -> io::Result<bool> {
    let mut file = match File::open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(false),
        Err(error) => return Err(error),
    };
    if file.metadata()?.len() == 0 {
        return Ok(false);
    }
    let mut byte = [0];
    file.read_exact(&mut byte)?;
    if byte != *b"{" && byte != *b"\n" {
        return Err(io::Error::other("it holds something else; name a file of its own"));
    }
    file.seek(SeekFrom::End(-1))?;
    file.read_exact(&mut byte)?;
    Ok(byte != *b"\n")
}

#[cfg(test)]
mod tests;
