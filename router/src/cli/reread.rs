//! The file of configuration, read again while the router serves: the whole command line once more, with what the file says now.
//! Where it says anything new of a flag that cannot change, nothing of it counts.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsString;

use clap::{ArgMatches, Command, CommandFactory as _};

use super::config_file::SettingValue;
use super::file_flags::sentence;
use super::flags::shown;
use super::{Checked, Cli, Files, parse};
use crate::app::CHANGEABLE;
use crate::config::Config;

/// What each flag is, as it would be typed.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Values {
    flags: BTreeMap<String, Vec<OsString>>,
    /// See [`super::FileFlags::others`].
    others: BTreeMap<String, SettingValue>,
}

impl Values {
    pub(super) fn of(
        command: &Command,
        matches: &ArgMatches,
        others: BTreeMap<String, SettingValue>,
    ) -> Self {
        let flags = command.get_arguments().filter(|arg| shown(arg));
        let values = flags.map(|arg| {
            let raw = matches.get_raw(arg.get_id().as_str()).into_iter().flatten();
            let flag = arg.get_long().unwrap_or_default().to_owned();
            (flag, raw.map(ToOwned::to_owned).collect())
        });
        Self { flags: values.collect(), others }
    }

    /// Flags that are not the same in both.
    fn differ<'a>(&'a self, other: &'a Self) -> BTreeSet<&'a str> {
        let flags =
            self.flags.iter().filter(|(flag, values)| other.flags.get(*flag) != Some(values));
        let others = self.others.keys().chain(other.others.keys());
        let others = others.filter(|key| self.others.get(*key) != other.others.get(*key));
        flags.map(|(flag, _)| flag).chain(others).map(String::as_str).collect()
    }
}

/// Reads the file again.
#[derive(Debug)]
pub(super) struct Reread {
    args: Vec<OsString>,
    /// From the start on, of all flags that cannot change.
    at_start: Values,
}

impl Reread {
    pub(super) fn new(args: Vec<OsString>, at_start: Values) -> Self {
        Self { args, at_start }
    }

    /// What flags, variables and the file ask for now.
    ///
    /// # Errors
    /// The text for the log: what is wrong in the file, or which flags cannot change.
    pub(super) fn read(&self) -> Result<Config, String> {
        let checked = parse(Cli::command(), self.args.iter().cloned(), Files::Read);
        let Checked { config, values, .. } = checked.map_err(|error| sentence(&error))?;
        let changed = values.differ(&self.at_start);
        let fixed = changed.iter().filter(|flag| !CHANGEABLE.contains(flag));
        let fixed: Vec<String> = fixed.map(|flag| format!("--{flag}")).collect();
        if !fixed.is_empty() {
            let can = CHANGEABLE.map(|flag| format!("--{flag}")).join(", ");
            return Err(format!(
                "{} cannot change while the router serves: restart it, or take that back; what can change is {can}",
                fixed.join(", ")
            ));
        }
        Ok(config)
    }
}
