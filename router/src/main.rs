//! The standalone binary: the same router as `headrace router`.

use std::process::ExitCode;

fn main() -> ExitCode {
    ExitCode::from(headrace_router::cli::main(std::env::args_os()))
}
