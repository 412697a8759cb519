//! `headrace-bench`: load against an endpoint, workers without a model, and the bare link between router and worker.
//! Each command prints one JSON object.

use clap::{Parser, Subcommand};

mod link;
mod load;
mod stats;
mod worker;

#[derive(Debug, Parser)]
#[command(version, about)]
struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Closed-loop load against an OpenAI-compatible endpoint.
    Load(load::LoadArgs),
    /// A worker without a model; runs until its router closes the link.
    Worker(worker::WorkerArgs),
    /// Time to first token over a bare worker link, in the router's place.
    Link(link::LinkArgs),
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> anyhow::Result<()> {
    let report = match Args::parse().command {
        Command::Load(args) => serde_json::to_value(load::run(args).await?)?,
        Command::Worker(args) => {
            worker::run(&args).await?;
            serde_json::json!({"worker": "the router closed the link"})
        }
        Command::Link(args) => serde_json::to_value(link::run(&args).await?)?,
    };
    print(&report);
    Ok(())
}

#[allow(clippy::print_stdout, reason = "the report is this program's output")]
fn print(report: &serde_json::Value) {
    println!("{report:#}");
}
