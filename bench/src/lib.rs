//! Load against an endpoint, workers without a model, and what else measures a router. Each command prints one report.

use std::ffi::OsString;
use std::io::Write as _;
use std::path::Path;

use clap::{Parser as _, Subcommand};
use serde_json::Value;

mod bound;
mod client;
mod compare;
mod drive;
#[cfg(test)]
mod e2e;
mod link;
mod load;
mod mock;
mod parts;
mod peers;
mod progress;
mod random;
mod replay;
mod report;
mod sim;
mod trace;

/// Exit statuses; clap gives 2 as well.
const FAILED: u8 = 1;
const BAD_INPUT: u8 = 2;

/// Load tools and workers without a model.
#[derive(Debug, clap::Parser)]
#[command(name = "headrace-bench", version, max_term_width = 100, after_help = AFTER_HELP)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

const AFTER_HELP: &str = "`headrace bench plot FILE... --out DIR` draws what --json wrote.";

#[derive(Debug, Subcommand)]
enum Command {
    /// Load on an OpenAI-compatible endpoint, closed or open loop.
    Load(Box<load::LoadArgs>),
    /// The requests of a trace, at their times.
    Replay(Box<replay::ReplayArgs>),
    /// What a trace holds.
    Trace(trace::stats::TraceArgs),
    /// Two reports side by side, and what got worse.
    Compare(compare::CompareArgs),
    /// Workers without a model, by the hundred: the real protocol, measured step times, deterministic tokens.
    Mock(Box<mock::MockArgs>),
    /// The router's scheduler over a trace, in virtual time.
    Sim(Box<sim::SimArgs>),
    /// Time to first token over a bare worker link, in the router's place.
    Link(link::LinkArgs),
    /// Events by a bare loop of writes, in the router's place.
    Writes(peers::writes::WritesArgs),
    /// Scheduling decisions alone, on one core.
    Decide(parts::decide::DecideArgs),
    /// The block index alone, on one core.
    Index(parts::index::IndexArgs),
    /// Prompts to tokens alone, against the crate `tokenizers`.
    Tokens(parts::tokens::TokensArgs),
    /// A worker without a model that speaks OpenAI's API over HTTP, for routers that proxy it.
    HttpWorker(peers::http_worker::HttpWorkerArgs),
    /// Clients that ask for streams and read nothing, until standard input ends.
    Stalled(peers::stalled::StalledArgs),
}

/// Input that no retry helps: exit status 2, and nothing was sent.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub(crate) struct BadInput(pub(crate) String);

/// Runs one command. `args` begins with the name of the program; the result is the exit status: 0, 1 (failed) or
/// 2 (wrong arguments or input).
pub fn main<T: Into<OsString> + Clone>(args: impl IntoIterator<Item = T>) -> u8 {
    let args: Vec<OsString> = args.into_iter().map(Into::into).collect();
    let cli = match Cli::try_parse_from(&args) {
        Ok(cli) => cli,
        Err(help_or_error) => {
            let _ = help_or_error.print(); // if the terminal is gone, nobody reads it
            return if help_or_error.use_stderr() { BAD_INPUT } else { 0 };
        }
    };
    match run(cli.command) {
        Ok(()) => 0,
        Err(error) => {
            report_error(&typed(&args), &error);
            if error.is::<BadInput>() { BAD_INPUT } else { FAILED }
        }
    }
}

/// The command as it was typed: `headrace bench load`, `headrace sim`.
fn typed(args: &[OsString]) -> String {
    let words = args.iter().take(2).map(|word| {
        let word = Path::new(word); // the program may be named with its folder
        word.file_name().unwrap_or(word.as_os_str()).to_string_lossy()
    });
    words.collect::<Vec<_>>().join(" ")
}

fn run(command: Command) -> anyhow::Result<()> {
    match command {
        Command::Load(args) => one_thread()?.block_on(load::run(*args))?,
        Command::Replay(args) => one_thread()?.block_on(replay::run(*args))?,
        Command::Trace(args) => print_json(&serde_json::to_value(trace::stats::run(&args)?)?),
        Command::Compare(args) => match compare::run(&args)? {
            0 => {}
            worse => anyhow::bail!("{worse} measures got worse"),
        },
        Command::Mock(args) => print_json(&one_thread()?.block_on(mock::run(&args))?),
        Command::Decide(args) => print_json(&serde_json::to_value(parts::decide::run(&args)?)?),
        Command::Index(args) => print_json(&serde_json::to_value(parts::index::run(&args)?)?),
        Command::Tokens(args) => {
            print_json(&serde_json::to_value(parts::tokens::run(&args)?)?);
        }
        Command::HttpWorker(args) => {
            let served = one_thread()?.block_on(peers::http_worker::run(&args))?;
            print_json(&serde_json::to_value(served)?);
        }
        Command::Stalled(args) => {
            print_json(&serde_json::to_value(peers::stalled::run(&args)?)?);
        }
        Command::Sim(args) => sim::run(&args)?,
        Command::Writes(args) => peers::writes::run(&args)?,
        Command::Link(args) => {
            print_json(&serde_json::to_value(one_thread()?.block_on(link::run(&args))?)?);
        }
    }
    Ok(())
}

/// A client on one thread leaves the other cores to what it measures.
fn one_thread() -> std::io::Result<tokio::runtime::Runtime> {
    tokio::runtime::Builder::new_current_thread().enable_all().build()
}

pub(crate) fn print_json(report: &Value) {
    print(&format_args!("{report:#}\n"));
}

/// Writes to standard output. Who has read enough (`| head`) closes it, which is no fault.
pub(crate) fn print(report: &impl std::fmt::Display) {
    let written = write!(std::io::stdout().lock(), "{report}");
    if let Err(error) = written
        && error.kind() != std::io::ErrorKind::BrokenPipe
    {
        report_error("headrace", &error.into());
    }
}

#[expect(clippy::print_stderr, reason = "a command line tool says there what went wrong")]
fn report_error(command: &str, error: &anyhow::Error) {
    eprintln!("{command}: {error:#}");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_begins_with_what_was_typed() {
        let of = |args: &[&str]| typed(&args.iter().map(Into::into).collect::<Vec<_>>());
        assert_eq!(of(&["headrace bench", "load", "-n", "3"]), "headrace bench load");
        assert_eq!(of(&["headrace", "sim", "x"]), "headrace sim");
        assert_eq!(of(&["/usr/bin/headrace-bench", "load"]), "headrace-bench load");
    }
}
