//! The standalone binary: the same router as `headrace router`.

use std::process::ExitCode;

use clap::Parser as _;
use headrace_router::config::{Config, RouterArgs};
use headrace_router::shutdown::{Server, init_log, stop_on_signals};

/// Serves OpenAI clients from model workers that dial in.
#[derive(clap::Parser)]
#[command(name = "headrace-router", version)]
struct Cli {
    #[command(flatten)]
    router: RouterArgs,
}

#[tokio::main]
async fn main() -> ExitCode {
    let config = match Config::try_from(Cli::parse().router) {
        Ok(config) => config,
        Err(error) => return fail(&error, 2),
    };
    init_log(&config.log);
    let server = match Server::start(config).await {
        Ok(server) => server,
        Err(error) => return fail(&error, 1),
    };
    announce(&server);
    let signals = tokio::spawn(stop_on_signals(server.stopper()));
    server.serve().await;
    signals.abort();
    ExitCode::SUCCESS
}

#[expect(clippy::print_stdout, reason = "the one line that people and scripts wait for")]
fn announce(server: &Server) {
    println!(
        "headrace-router: http://{} for clients, {} for workers",
        server.http_address(),
        server.worker_address()
    );
}

#[expect(clippy::print_stderr, reason = "there may be no log yet")]
fn fail(error: &dyn std::error::Error, code: u8) -> ExitCode {
    eprintln!("headrace-router: {error}");
    ExitCode::from(code)
}
