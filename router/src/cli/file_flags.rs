//! What a file of configuration adds to a command line: words of the same parser, for flags that neither the command line nor
//! a variable of the environment has set.

use std::collections::BTreeMap;
use std::ffi::OsString;

use clap::parser::ValueSource;
use clap::{Arg, ArgAction, ArgMatches, Command};

use super::config_file::{ConfigFile, Setting, SettingValue, nearest, quoted};
use super::flags::{CONFIG, shown, variable_of};
use super::{LONGEST_ARGUMENT, TABLE};
use crate::config::environment;

/// The words, and where each of their flags stands.
#[derive(Debug, Default)]
pub(super) struct FileFlags {
    pub(super) words: Vec<OsString>,
    places: BTreeMap<String, String>,
    /// Keys that count for nothing here: of another program, or of flags that the command line sets. Empty for the table of this
    /// program, whose flags say by themselves whether anything has changed.
    pub(super) others: BTreeMap<String, SettingValue>,
}

impl FileFlags {
    /// Those of the table of `command`. `typed`: what the command line and the environment say.
    ///
    /// # Errors
    /// The text for a person, with the place: a key that is no flag, or a value that its flag does not take.
    pub(super) fn of(
        file: &ConfigFile,
        table: &str,
        command: &Command,
        typed: &ArgMatches,
    ) -> Result<Self, String> {
        let mut flags = Self::default();
        let mut seen: BTreeMap<&str, String> = BTreeMap::new();
        for setting in file.settings.iter().filter(|setting| setting.command == table) {
            let place = file.place(setting.line);
            let problem = |problem: String| format!("{place}: {problem}");
            let Some(arg) = find(command, &setting.key) else {
                if table == TABLE {
                    return Err(problem(unknown(command, &setting.key)));
                }
                flags.others.insert(setting.key.clone(), setting.value.clone());
                continue;
            };
            let words = words(arg, setting).map_err(problem)?;
            check(command, &words).map_err(problem)?;
            let flag = arg.get_long().unwrap_or_default();
            if let Some(first) = seen.insert(flag, place.clone()) {
                return Err(problem(format!("--{flag} is set at {first} already; set it once")));
            }
            if !is_set(arg, typed) {
                flags.words.extend(words);
                flags.places.insert(flag.to_owned(), place);
            } else if table != TABLE {
                flags.others.insert(flag.to_owned(), setting.value.clone());
            }
        }
        Ok(flags)
    }

    /// Where the file sets this flag, whose name has no dashes, if its value is in force.
    pub(super) fn place(&self, flag: &str) -> Option<&str> {
        self.places.get(flag).map(String::as_str)
    }
}

/// Flags that a file can set, by all their names.
fn keys(command: &Command) -> impl Iterator<Item = (&str, &Arg)> {
    let flags = command.get_arguments().filter(|arg| shown(arg) && arg.get_id() != CONFIG);
    flags.flat_map(|arg| {
        let also = arg.get_visible_aliases().unwrap_or_default();
        arg.get_long().into_iter().chain(also).map(move |name| (name, arg))
    })
}

fn find<'a>(command: &'a Command, key: &str) -> Option<&'a Arg> {
    keys(command).find(|(name, _)| *name == key).map(|(_, arg)| arg)
}

/// The command line or a variable says what this flag is.
fn is_set(arg: &Arg, typed: &ArgMatches) -> bool {
    let of_file = variable_of(arg).and_then(|variable| environment::one(&variable)).is_some();
    let source = typed.value_source(arg.get_id().as_str());
    of_file || source == Some(ValueSource::CommandLine)
}

fn unknown(command: &Command, key: &str) -> String {
    let near = nearest(key, keys(command).map(|(name, _)| name));
    let told = near.map_or_else(
        || "its keys are the flags that --help shows, without their dashes".to_owned(),
        |near| format!("did you mean {near}?"),
    );
    format!("[{TABLE}] has no key {}; {told}", quoted(key))
}

/// What would be typed for it.
fn words(arg: &Arg, setting: &Setting) -> Result<Vec<OsString>, String> {
    let flag = arg.get_long().unwrap_or_default();
    let takes_value = arg.get_action().takes_values();
    let name = arg.get_value_names().and_then(<[_]>::first).map_or("VALUE", |name| name);
    let word = |text: &String| OsString::from(format!("--{flag}={text}"));
    match &setting.value {
        SettingValue::Switch(on) if !takes_value => {
            Ok(if *on { vec![format!("--{flag}").into()] } else { Vec::new() })
        }
        _ if !takes_value => Err(format!("{flag} is a switch: write true or false")),
        SettingValue::Switch(on) => Err(format!("{flag} takes {name}, not {on}")),
        SettingValue::Text(text) => Ok(vec![word(text)]),
        SettingValue::Texts(texts) if matches!(arg.get_action(), ArgAction::Append) => {
            Ok(texts.iter().map(word).collect())
        }
        SettingValue::Texts(texts) => match arg.get_value_delimiter() {
            Some(delimiter) => Ok(vec![word(&texts.join(&delimiter.to_string()))]),
            None => Err(format!("{flag} takes one {name}, not a list")),
        },
    }
}

/// Values are checked key by key, so that what is wrong has a place.
fn check(command: &Command, words: &[OsString]) -> Result<(), String> {
    if words.iter().any(|word| word.len() > LONGEST_ARGUMENT) {
        return Err(format!("the value is longer than {LONGEST_ARGUMENT} bytes"));
    }
    let checked = command.clone().no_binary_name(true).try_get_matches_from(words);
    checked.map(|_| ()).map_err(|error| sentence(&error))
}

/// clap's text without the usage.
pub(super) fn sentence(error: &clap::Error) -> String {
    let text = error.to_string();
    let lines = text.lines().map(str::trim);
    let lines =
        lines.take_while(|line| !line.starts_with("Usage:") && !line.starts_with("For more"));
    let lines: Vec<&str> = lines.filter(|line| !line.is_empty()).collect();
    lines.join(" ").trim_start_matches("error: ").to_owned()
}
