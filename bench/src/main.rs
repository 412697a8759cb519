//! The standalone binary: the same commands as `headrace bench`, `headrace mock` and `headrace sim`.

use std::process::ExitCode;

fn main() -> ExitCode {
    ExitCode::from(headrace_bench::main(std::env::args_os()))
}
