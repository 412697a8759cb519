//! `bench trace`: what a trace holds. It reads the whole file, so it checks it too.

use std::collections::HashSet;
use std::path::PathBuf;

use serde::Serialize;

use crate::bound::bound_hit_rate;
use crate::report::stats::Quantiles;
use crate::trace::{Requests, Row, Slice, read_requests};

/// A trace of requests.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct TraceArgs {
    /// Block-id JSON lines (Mooncake) or CSV with lengths (Azure); plain or gzip.
    trace: PathBuf,
    #[command(flatten)]
    slice: Slice,
    /// Tokens of the trace's blocks [default: what fits the rows].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    block_tokens: Option<u32>,
}

/// What is in it.
#[derive(Debug, Serialize)]
pub(crate) struct TraceStats {
    trace: String,
    requests: usize,
    span_s: f64,
    block_tokens: u32,
    input_tokens: Option<Quantiles>,
    output_tokens: Option<Quantiles>,
    unique_blocks: usize,
    /// Share of the prompt tokens seen before, with a cache of any size that begins empty.
    ideal_hit_rate: f64,
    sessions: usize,
}

/// # Errors
/// The trace is bad, or one of messages.
pub(crate) fn run(args: &TraceArgs) -> anyhow::Result<TraceStats> {
    let requests = read_requests(&args.trace, args.block_tokens)?.slice(&args.slice)?;
    Ok(TraceStats::of(&requests))
}

impl TraceStats {
    fn of(requests: &Requests) -> Self {
        let rows = &requests.rows;
        let blocks: HashSet<u64> = rows.iter().flat_map(|row| row.blocks.iter().copied()).collect();
        let sessions: HashSet<String> = rows.iter().map(Row::session_key).collect();
        Self {
            trace: requests.name.clone(),
            requests: rows.len(),
            span_s: rows.last().map_or(0.0, |row| row.at_ms / 1e3),
            block_tokens: requests.block_tokens,
            input_tokens: Quantiles::of_ms(rows.iter().map(|row| row.input_tokens.into())),
            output_tokens: Quantiles::of_ms(rows.iter().map(|row| row.output_tokens.into())),
            unique_blocks: blocks.len(),
            ideal_hit_rate: bound_hit_rate(requests, usize::MAX),
            sessions: sessions.len(),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    /// As the notes of the traces have it.
    #[test]
    fn the_traces_of_the_benchmark_are_what_their_table_says() {
        for (file, requests, span_s, block_tokens, unique_blocks, ideal) in [
            ("mooncake_conversation_0-40min", 7851, 2397.0, 512, 126_103, 0.358),
            ("mooncake_synthetic_first65pct", 2595, 679.0, 512, 39_179, 0.438),
            ("agentic_coding_13conv.blocks16", 673, 452.0, 16, 19_000, 0.966),
            ("tau_airline_tasks0-32.blocks16", 1863, 307.0, 16, 23_552, 0.938),
        ] {
            let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("traces");
            let read = read_requests(&folder.join(format!("{file}.jsonl.gz")), None).unwrap();
            let stats = TraceStats::of(&read);
            assert_eq!(stats.trace, file);
            assert_eq!((stats.requests, stats.block_tokens), (requests, block_tokens));
            assert_eq!(stats.unique_blocks, unique_blocks, "{file}");
            assert!((stats.span_s - span_s).abs() < 0.5);
            assert!((stats.ideal_hit_rate - ideal).abs() < 0.0006, "{}", stats.ideal_hit_rate);
        }
    }

    /// The same figure from `one-big-cache` of an independent simulation in Python.
    #[test]
    fn the_bound_is_that_of_an_independent_simulation() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("traces");
        let file = folder.join("mooncake_conversation_0-40min.jsonl.gz");
        let requests = read_requests(&file, None).unwrap();
        let bound = bound_hit_rate(&requests, 8 * 2000);
        assert!((bound - 0.261).abs() < 0.0006, "{bound}");
    }
}
