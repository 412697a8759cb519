//! The router's flags for a program that takes them beside flags of its own: a table of them, and the check of what was
//! typed. `headrace serve` is that program.

use clap::{Arg, ArgAction, CommandFactory as _};

use super::{Cli, Files, parse};
use crate::app::CHANGEABLE;

/// One flag of the router, as its help shows it.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct RouterFlag {
    /// With its dashes, such as `--policy`.
    pub name: String,
    /// Other names of it, with their dashes.
    pub also: Vec<String>,
    /// The group of the help in which the flag stands; `None` is the first group.
    pub group: Option<String>,
    /// What stands for the value in the help, such as `MS`; `None` for a flag that takes no value.
    pub value: Option<String>,
    /// The words that the value may be; empty where it may be others.
    pub choices: Vec<String>,
    /// The value of a flag that was not given; `None` where there is no such value.
    pub default: Option<String>,
    /// The flag may be given several times.
    pub repeated: bool,
    /// The variable of the environment that is read where the flag is not given.
    pub variable: Option<String>,
    /// The flag takes effect at SIGHUP where a file of configuration sets it.
    pub reloads: bool,
    /// Sentences for people.
    pub help: String,
}

/// Every flag that the help of the router shows, in the order of the help.
#[must_use]
pub fn router_flags() -> Vec<RouterFlag> {
    let mut command = Cli::command();
    command.build();
    command.get_arguments().filter(|arg| shown(arg)).map(RouterFlag::of).collect()
}

/// The flag that names a file of configuration.
pub(super) const CONFIG: &str = "config";
pub(super) const CONFIG_TABLE: &str = "config_table";
pub(super) const CONFIG_VARIABLE: &str = "HEADRACE_CONFIG";

/// Variables of which clap knows nothing, as an empty one counts for none. Those of keys hold what the file would.
const VARIABLES: [(&str, &str); 4] = [
    (CONFIG, CONFIG_VARIABLE),
    ("secret-file", "HEADRACE_SECRET"),
    ("api-key-file", "HEADRACE_API_KEY"),
    ("admin-key-file", "HEADRACE_ADMIN_KEY"),
];

/// The variable of the environment that counts where the flag was not given.
pub(super) fn variable_of(arg: &Arg) -> Option<String> {
    let known = arg.get_env().map(|name| name.to_string_lossy().into_owned());
    known.or_else(|| {
        let mut others = VARIABLES.iter();
        let found = others.find(|(flag, _)| arg.get_long() == Some(*flag));
        found.map(|(_, variable)| (*variable).to_owned())
    })
}

/// Help and version belong to whatever program is asked for them.
pub(super) fn shown(arg: &Arg) -> bool {
    let help = [ArgAction::Help, ArgAction::HelpLong, ArgAction::HelpShort, ArgAction::Version];
    !arg.is_hide_set() && !help.iter().any(|action| same(action, arg.get_action()))
}

fn same(one: &ArgAction, other: &ArgAction) -> bool {
    std::mem::discriminant(one) == std::mem::discriminant(other)
}

impl RouterFlag {
    fn of(arg: &Arg) -> Self {
        let takes_value = arg.get_action().takes_values();
        let texts = |values: &[clap::builder::OsStr]| {
            let texts: Vec<_> = values.iter().map(|value| value.to_string_lossy()).collect();
            (takes_value && !texts.is_empty()).then(|| texts.join(","))
        };
        let choices = if takes_value { arg.get_possible_values() } else { Vec::new() };
        Self {
            name: format!(
                "--{}",
                arg.get_long().expect("every flag of the router has a long name")
            ),
            also: arg
                .get_visible_aliases()
                .into_iter()
                .flatten()
                .map(|alias| format!("--{alias}"))
                .collect(),
            group: arg.get_help_heading().map(str::to_owned),
            value: takes_value.then(|| {
                arg.get_value_names().and_then(<[_]>::first).map_or("VALUE", |name| name).to_owned()
            }),
            choices: choices.iter().map(|choice| choice.get_name().to_owned()).collect(),
            default: texts(arg.get_default_values()),
            repeated: same(&ArgAction::Append, arg.get_action()),
            variable: variable_of(arg),
            reloads: arg.get_long().is_some_and(|flag| CHANGEABLE.contains(&flag)),
            help: arg.get_long_help().or(arg.get_help()).map_or_else(String::new, |help| {
                format!("{}.", help.to_string().trim_end_matches('.')) // clap takes the last point off
            }),
        }
    }
}

/// What the router would refuse of `flags`, found without starting anything. Files that they name are read.
///
/// # Errors
/// The text for the person who typed the flags: what is wrong, the nearest name, and `usage`, which is that of the
/// person's command.
pub fn check_router(flags: &[String], usage: &str) -> Result<(), String> {
    let words = std::iter::once("headrace").chain(flags.iter().map(String::as_str));
    let command = Cli::command().override_usage(usage.to_owned());
    parse(command, words, Files::Ignored).map(|_| ()).map_err(|refused| refused.to_string())
}

#[cfg(test)]
mod tests;
