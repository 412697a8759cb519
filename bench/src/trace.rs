//! Traces: requests with their times, from files of three formats. What is wrong is told with file, line and field.
//!
//! - Mooncake JSON lines: `timestamp` (ms), `input_length`, `output_length`, `hash_ids`, and where known `session`. Equal
//!   ids are equal blocks after equal prefixes.
//! - Azure CSV: `timestamp_ms,input_length,output_length`, or the original `TIMESTAMP,ContextTokens,GeneratedTokens`.
//! - Chat JSON lines: a conversation a line (`messages`), or a message a line (`conversation_id`, `role`, ...).
//!
//! Each may be packed with gzip.

use std::io::{BufRead as _, BufReader, Read};
use std::path::Path;

use crate::BadInput;

mod blocks;
mod chat;
mod csv;
mod scale;
pub(crate) mod stats;

pub(crate) use chat::{Conversation, Turn};
pub(crate) use scale::{FIRST_TOKEN, Scale};

/// The requests of one file.
#[derive(Debug)]
pub(crate) enum Trace {
    Requests(Requests),
    Chat(Vec<Conversation>),
}

/// Requests with their arrival times, in order.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Requests {
    /// The file's name without folder and endings.
    pub(crate) name: String,
    /// Tokens in each block but the last of a request.
    pub(crate) block_tokens: u32,
    pub(crate) rows: Vec<Row>,
}

/// A request as the trace describes it.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Row {
    /// From the first request on, as recorded.
    pub(crate) at_ms: f64,
    pub(crate) input_tokens: u32,
    pub(crate) output_tokens: u32,
    /// One id per block of the prompt, the last of which may be partly filled. Equal ids are equal prefixes.
    pub(crate) blocks: Vec<u64>,
    pub(crate) session: Option<String>,
}

/// Blocks of a prompt that name its session where the trace does not: what a static affinity by prefix would use.
const SESSION_BLOCKS: usize = 4;

impl Row {
    /// The trace's own session, or one made of the first blocks.
    pub(crate) fn session_key(&self) -> String {
        match &self.session {
            Some(session) => session.clone(),
            None => {
                let first = self.blocks.iter().take(SESSION_BLOCKS);
                let hash = first.fold(0, |hash, id| crate::random::mix(hash ^ id.wrapping_add(1)));
                format!("prefix-{hash:016x}")
            }
        }
    }
}

/// Which part of a trace is used.
#[derive(Debug, Clone, Default, PartialEq, clap::Args)]
pub(crate) struct Slice {
    /// Leave out what comes before this time of the trace, in seconds; times count from it.
    #[arg(long, value_name = "S", default_value_t = 0.0)]
    pub(crate) first: f64,
    /// Leave out what comes from this time of the trace on, in seconds.
    #[arg(long, value_name = "S", conflicts_with = "limit")]
    pub(crate) until: Option<f64>,
    /// Requests at most.
    #[arg(long, value_name = "N")]
    pub(crate) limit: Option<usize>,
}

impl Requests {
    /// Part of the trace, its times from the beginning of the part.
    ///
    /// # Errors
    /// Nothing is left.
    pub(crate) fn slice(mut self, slice: &Slice) -> Result<Self, BadInput> {
        let (first_ms, until_ms) =
            (slice.first * 1e3, slice.until.map_or(f64::INFINITY, |s| s * 1e3));
        self.rows.retain(|row| (first_ms..until_ms).contains(&row.at_ms));
        self.rows.truncate(slice.limit.unwrap_or(usize::MAX));
        for row in &mut self.rows {
            row.at_ms -= first_ms;
        }
        if self.rows.is_empty() {
            return Err(BadInput(format!("{}: this part of the trace has no requests", self.name)));
        }
        Ok(self)
    }
}

/// Reads a trace whole. `block_tokens` is found out where left out.
///
/// # Errors
/// The file cannot be read, is empty, or has a bad row, which is named.
pub(crate) fn read(path: &Path, block_tokens: Option<u32>) -> Result<Trace, BadInput> {
    let lines = Lines::read(path)?;
    let first = lines.rows.first().map_or("", |(_, text)| text.as_str());
    if first.is_empty() {
        return Err(BadInput(format!("{}: the trace is empty", lines.file)));
    }
    let trace = if !first.starts_with('{') {
        Trace::Requests(csv::parse(&lines)?)
    } else if chat::looks_like(first) {
        Trace::Chat(chat::parse(&lines)?)
    } else {
        Trace::Requests(blocks::parse(&lines, block_tokens)?)
    };
    Ok(trace)
}

/// Reads a trace of requests: times and lengths, no text.
///
/// # Errors
/// As for [`read`], or the trace is one of text.
pub(crate) fn read_requests(path: &Path, block_tokens: Option<u32>) -> Result<Requests, BadInput> {
    match read(path, block_tokens)? {
        Trace::Requests(requests) => Ok(requests),
        Trace::Chat(_) => Err(BadInput(format!(
            "{}: a trace of messages; only a running server can take it",
            path.display()
        ))),
    }
}

/// The lines of a file that are not blank, with their numbers.
#[derive(Debug)]
struct Lines {
    file: String,
    rows: Vec<(usize, String)>,
}

impl Lines {
    fn read(path: &Path) -> Result<Self, BadInput> {
        let file = path.display().to_string();
        let bytes = std::fs::read(path).map_err(|error| BadInput(format!("{file}: {error}")))?;
        Self::of(file, &bytes)
    }

    /// Unpacks gzip, whatever the file's name says.
    fn of(file: String, bytes: &[u8]) -> Result<Self, BadInput> {
        let packed = bytes.starts_with(&[0x1f, 0x8b]);
        let text: Box<dyn Read> = if packed {
            Box::new(flate2::read::MultiGzDecoder::new(bytes))
        } else {
            Box::new(bytes)
        };
        let mut rows = Vec::new();
        for (i, line) in BufReader::new(text).lines().enumerate() {
            let line = line.map_err(|error| BadInput(format!("{file}:{}: {error}", i + 1)))?;
            let line = line.trim_start_matches('\u{feff}').trim();
            if !line.is_empty() {
                rows.push((i + 1, line.to_owned()));
            }
        }
        Ok(Self { file, rows })
    }

    fn bad(&self, line: usize, why: impl std::fmt::Display) -> BadInput {
        BadInput(format!("{}:{line}: {why}", self.file))
    }

    fn name(&self) -> String {
        name_of(Path::new(&self.file))
    }
}

/// The file's name without folder and endings such as `.jsonl.gz`.
pub(crate) fn name_of(path: &Path) -> String {
    let name = path.file_name().map(|name| name.to_string_lossy()).unwrap_or_default();
    let mut name = name.as_ref();
    for ending in [".gz", ".jsonl", ".json", ".csv"] {
        name = name.strip_suffix(ending).unwrap_or(name);
    }
    name.to_owned()
}

/// Times must not go back, and count from the first.
fn in_order(lines: &Lines, numbers: &[usize], rows: &mut [Row]) -> Result<(), BadInput> {
    for i in 1..rows.len() {
        let (before, now) = (rows[i - 1].at_ms, rows[i].at_ms);
        if now < before {
            let why =
                format!("the time {now} ms is before that of line {}, {before} ms", numbers[i - 1]);
            return Err(lines.bad(numbers[i], why));
        }
    }
    let begin = rows.first().map_or(0.0, |row| row.at_ms);
    for row in rows {
        row.at_ms -= begin;
    }
    Ok(())
}

#[cfg(test)]
mod tests;
