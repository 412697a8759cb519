//! The program, whether it is called `headrace-router` or `headrace router`: from arguments to exit status.

mod config_file;
mod file_flags;
mod flags;
mod reread;

use std::error::Error;
use std::ffi::OsString;
use std::mem::take;
use std::path::PathBuf;
use std::sync::Arc;

use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{Command, CommandFactory as _, FromArgMatches as _};

use crate::config::argv::{NoKey, NoSecret};
use crate::config::{Config, ConfigError, RouterArgs, environment};
use crate::log::{LAST_LINES, flush, init_log, print, say};
use crate::process::exit::{PUT_AWAY, put_away};
use crate::process::runtime::Runtime;
use crate::process::signals::{OVERDUE, Reload, STOP, Signals, StopDeadlines};
use crate::server::{ReadConfig, Server};

use file_flags::FileFlags;
use flags::{CONFIG, CONFIG_TABLE, CONFIG_VARIABLE};
use reread::{Reread, Values};

pub use config_file::{ConfigFile, Setting, SettingValue};
pub use flags::{RouterFlag, check_router, router_flags};

/// Exit statuses; clap gives 2 as well.
const FAILED: u8 = 1;
const MISCONFIGURED: u8 = 2;

/// Bytes of one argument: paths are shorter, lists can be given in parts, and errors repeat what they refuse.
const LONGEST_ARGUMENT: usize = 16 << 10;

/// The table of a file of configuration that is this program's.
const TABLE: &str = "router";

/// Serves OpenAI clients from model workers that dial in.
#[derive(clap::Parser)]
#[command(name = "headrace-router", version, after_help = AFTER_HELP, max_term_width = 100)]
struct Cli {
    /// File with flags, in TOML: `policy = "kv"` in the table [router] is --policy kv. Flags of the command line and variables
    /// count before the file. The variable HEADRACE_CONFIG names a file as well.
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Whose flags count of the file. `headrace serve` gives its router its own file, which has keys for workers besides.
    #[arg(long, value_name = "TABLE", hide = true, default_value = TABLE)]
    config_table: String,
    #[command(flatten)]
    router: RouterArgs,
    #[command(flatten)]
    _no_key: NoKey,
    #[command(flatten)]
    _no_secret: NoSecret,
}

const AFTER_HELP: &str = "\
Ctrl-C (or SIGTERM, or SIGHUP) lets running answers finish, up to --drain-timeout-ms; a second one stops within 2 s, a third at once.
Where there are files of keys, certificates or configuration, SIGHUP has them read again in the place of this.
Exit status: 0 after a drain, 1 if it could not start or the drain did not end in time, 2 for wrong flags, and 128 and \
the signal's number after a second one.";

/// Serves until a signal ends it. `args` begins with the name of the program; the result is the exit status.
pub fn main<T: Into<OsString> + Clone>(args: impl IntoIterator<Item = T>) -> u8 {
    let args: Vec<OsString> = args.into_iter().map(Into::into).collect();
    let checked = match parse(Cli::command(), args.clone(), Files::Read) {
        Ok(checked) => checked,
        Err(help_or_error) => {
            let _ = help_or_error.print(); // if the terminal is gone, nobody reads it
            return if help_or_error.use_stderr() { MISCONFIGURED } else { 0 };
        }
    };
    let Checked { config, values, has_file } = checked;
    let reread = has_file.then(|| Reread::new(args, values));
    let status = serve(config, reread).unwrap_or_else(|error| fail(&*error));
    flush(LAST_LINES);
    status
}

/// What becomes of a file of configuration that the command line or a variable names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Files {
    Read,
    /// The file was for another command, which has read it.
    Ignored,
}

/// What flags, variables and a file ask for, checked.
struct Checked {
    config: Config,
    values: Values,
    /// There is a file of configuration.
    has_file: bool,
}

/// What `args` ask for, checked; otherwise the help, or what is wrong with them and the usage of `command`.
fn parse<T: Into<OsString> + Clone>(
    mut command: Command,
    args: impl IntoIterator<Item = T>,
    files: Files,
) -> Result<Checked, clap::Error> {
    let args: Vec<OsString> = args.into_iter().map(Into::into).collect();
    check(&mut command, args, files).map_err(|mut refused| {
        // clap leaves the usage out where a value is wrong
        if refused.use_stderr() && refused.get(ContextKind::Usage).is_none() {
            refused.insert(ContextKind::Usage, ContextValue::StyledStr(command.render_usage()));
        }
        refused
    })
}

fn check(
    command: &mut Command,
    mut args: Vec<OsString>,
    files: Files,
) -> Result<Checked, clap::Error> {
    if let Some(long) = args.iter().find(|arg| arg.len() > LONGEST_ARGUMENT) {
        let start: String = long.to_string_lossy().chars().take(40).collect();
        let bytes = long.len();
        let problem = format!(
            "an argument has {bytes} bytes; the router reads at most {LONGEST_ARGUMENT}: {start}..."
        );
        return Err(command.error(ErrorKind::ValueValidation, problem));
    }
    let mut matches = command.try_get_matches_from_mut(&args)?;
    let path = matches.get_one::<PathBuf>(CONFIG).cloned();
    let path = path.or_else(|| environment::one(CONFIG_VARIABLE).map(PathBuf::from));
    let path = path.filter(|_| files == Files::Read);
    let mut from_file = FileFlags::default();
    if let Some(path) = &path {
        let found = ConfigFile::read(path);
        let table = matches.get_one::<String>(CONFIG_TABLE).expect("it has a default");
        let found = found.and_then(|file| FileFlags::of(&file, table, command, &matches));
        from_file = found.map_err(|error| command.error(ErrorKind::ValueValidation, error))?;
        let program = args.len().min(1);
        args.splice(program..program, from_file.words.drain(..));
        matches = command.try_get_matches_from_mut(&args)?;
    }
    let values = Values::of(command, &matches, take(&mut from_file.others));
    let cli = Cli::from_arg_matches_mut(&mut matches).map_err(|error| error.format(command))?;
    let config = Config::try_from(cli.router).map_err(|error| {
        let place = flag_of(&error).and_then(|flag| from_file.place(flag));
        let place = place.map_or_else(String::new, |place| format!("{place}: "));
        command.error(ErrorKind::ValueValidation, format!("{place}{error}"))
    })?;
    Ok(Checked { config, values, has_file: path.is_some() })
}

fn flag_of(error: &ConfigError) -> Option<&'static str> {
    match error {
        ConfigError::Flag { flag, .. } | ConfigError::File { flag, .. } => Some(flag),
        ConfigError::Variable { .. } => None,
    }
}

fn serve(config: Config, reread: Option<Reread>) -> Result<u8, Box<dyn Error>> {
    init_log(&config.log)?;
    let bounds = StopDeadlines { drain: Some(config.drain_timeout + OVERDUE), stop: STOP };
    let runtime = Runtime::start(config.per_core)?;
    let mut server = runtime.block_on(Server::start(config))?;
    if let Some(reread) = reread {
        server.reads_again(ReadConfig(Arc::new(move || reread.read())));
    }
    run(runtime, server, bounds)
}

/// Serves to the end.
fn run(runtime: Runtime, server: Server, bounds: StopDeadlines) -> Result<u8, Box<dyn Error>> {
    let request = server.reload();
    let reload = server.has_files().then(|| Box::new(move || request.ask()) as Reload);
    let obeyed = Signals::catch()?.obey(server.stopper(), bounds, reload)?;
    print(announcement(&server)); // only now: whoever reads it may stop us at once
    let app = Arc::clone(server.app()); // so that the server's end does not wait for all that the app holds
    runtime.block_on(server.serve());
    runtime.shutdown_background(); // a plain drop waits for everything that runs there
    if !put_away(app, PUT_AWAY) {
        tracing::warn!("still busy, and left behind: threads that tokenise, or the decision log");
    }
    Ok(obeyed.status())
}

/// The one line that people and scripts wait for.
fn announcement(server: &Server) -> String {
    format!(
        "headrace-router: {}://{} for clients, {} for workers",
        if server.speaks_tls() { "https" } else { "http" },
        server.http_address(),
        server.worker_address()
    )
}

fn fail(error: &dyn Error) -> u8 {
    say(&format!("headrace-router: {error}"));
    FAILED
}

#[cfg(test)]
mod tests;
