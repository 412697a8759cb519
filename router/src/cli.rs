//! The program, whether it is called `headrace-router` or `headrace router`: from arguments to exit status.

use std::error::Error;
use std::ffi::OsString;

use clap::Parser as _;

use crate::config::{Config, RouterArgs};
use crate::log::init_log;
use crate::shutdown::Server;
use crate::signals::stop_on_signals;

/// Exit statuses; clap gives 2 as well.
const FAILED: u8 = 1;
const MISCONFIGURED: u8 = 2;

/// Serves OpenAI clients from model workers that dial in.
#[derive(clap::Parser)]
#[command(name = "headrace-router", version, after_help = AFTER_HELP, max_term_width = 100)]
struct Cli {
    #[command(flatten)]
    router: RouterArgs,
}

const AFTER_HELP: &str = "\
Ctrl-C (or SIGTERM) lets running answers finish, up to --drain-timeout-ms; a second one stops at once.
Exit status: 0 after that, 1 if it could not start, 2 for wrong flags.";

/// Serves until a signal ends it. `args` begins with the name of the program; the result is the exit status.
pub fn main<T: Into<OsString> + Clone>(args: impl IntoIterator<Item = T>) -> u8 {
    let cli = match Cli::try_parse_from(args) {
        Ok(cli) => cli,
        Err(help_or_error) => {
            let _ = help_or_error.print(); // if the terminal is gone, nobody reads it
            return if help_or_error.use_stderr() { MISCONFIGURED } else { 0 };
        }
    };
    let config = match Config::try_from(cli.router) {
        Ok(config) => config,
        Err(error) => return fail(&error, MISCONFIGURED),
    };
    init_log(&config.log);
    match tokio::runtime::Runtime::new() {
        Ok(runtime) => runtime.block_on(serve(config)),
        Err(error) => fail(&error, FAILED),
    }
}

async fn serve(config: Config) -> u8 {
    let server = match Server::start(config).await {
        Ok(server) => server,
        Err(error) => return fail(&error, FAILED),
    };
    let signals = match stop_on_signals(server.stopper()) {
        Ok(signals) => tokio::spawn(signals),
        Err(error) => return fail(&error, FAILED),
    };
    announce(&server); // only now: whoever reads it may stop us at once
    server.serve().await;
    signals.abort();
    0
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
fn fail(error: &dyn Error, status: u8) -> u8 {
    eprintln!("headrace-router: {error}");
    status
}
