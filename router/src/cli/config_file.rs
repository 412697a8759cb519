//! The file of `--config`: TOML, with a table for each command and a key for each flag. What is wrong with the file is told
//! with the line; what a key means is known to the parser of its command alone.

use std::fs::File;
use std::io::{self, Read as _};
use std::path::Path;

use toml::Spanned;
use toml::de::{DeTable, DeValue};

/// Commands that have a table, each with its flags.
pub(crate) const COMMANDS: [&str; 11] = [
    "serve", "router", "worker", "chat", "explain", "top", "drain", "key", "fetch", "convert",
    "plan",
];
/// Longest file, in bytes: all flags of all commands, each with a page of comments, are far less.
const LONGEST_FILE: u64 = 1 << 20;
/// Likeness (Jaro) from which a word is taken for a misspelt one, as clap has it.
const ALIKE: f64 = 0.7;

/// What a file says, in the order of its lines.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConfigFile {
    path: String,
    /// One for each key.
    pub settings: Vec<Setting>,
}

/// A key and its value.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct Setting {
    /// The table that it stands in.
    pub command: String,
    /// A flag without its dashes.
    pub key: String,
    /// Where it stands, counted from 1.
    pub line: usize,
    /// What the flag is given.
    pub value: SettingValue,
}

/// A value, as a flag can be given it.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
#[serde(untagged)]
pub enum SettingValue {
    /// A flag that takes no value is there, or not.
    Switch(bool),
    /// What would be typed: a text, or a number.
    Text(String),
    /// The same of a flag that takes several.
    Texts(Vec<String>),
}

impl ConfigFile {
    /// # Errors
    /// The file cannot be read, is no TOML, or has a table that is no command's. The text names the place.
    pub fn read(path: impl AsRef<Path>) -> Result<Self, String> {
        let path = path.as_ref();
        let shown = path.display().to_string();
        let text = read(path).map_err(|problem| format!("{shown}: {problem}"))?;
        Self::parse(&shown, &text)
    }

    fn parse(path: &str, text: &str) -> Result<Self, String> {
        let lines = Lines::of(text);
        let at = |line: usize, problem: String| format!("{path}:{line}: {problem}");
        let document = DeTable::parse(text).map_err(|error| {
            let line = error.span().map_or(1, |span| lines.of_byte(span.start));
            at(line, format!("this is no TOML: {}", error.message().replace('\n', "; ")))
        })?;
        let mut settings = Vec::new();
        for (command, table) in document.get_ref() {
            let (name, line) = (command.get_ref().as_ref(), lines.of_byte(command.span().start));
            let DeValue::Table(table) = table.get_ref() else {
                let remedy = "a key stands under the table of its command, such as [router]";
                return Err(at(line, format!("{} is in no table; {remedy}", quoted(name))));
            };
            if !COMMANDS.contains(&name) {
                let near = nearest(name, COMMANDS.into_iter()).map_or_else(
                    || {
                        format!(
                            "the tables are {}",
                            COMMANDS.map(|one| format!("[{one}]")).join(", ")
                        )
                    },
                    |near| format!("did you mean [{near}]?"),
                );
                return Err(at(line, format!("there is no command {}; {near}", quoted(name))));
            }
            for (key, value) in table {
                let line = lines.of_byte(key.span().start);
                let value = setting_value(value)
                    .map_err(|problem| at(line, format!("{} {problem}", quoted(key.get_ref()))))?;
                let key = key.get_ref().as_ref().to_owned();
                settings.push(Setting { command: name.to_owned(), key, line, value });
            }
        }
        settings.sort_by_key(|setting| setting.line);
        Ok(Self { path: path.to_owned(), settings })
    }

    /// A line of it, as errors name it.
    #[must_use]
    pub fn place(&self, line: usize) -> String {
        format!("{}:{line}", self.path)
    }
}

fn read(path: &Path) -> Result<String, String> {
    let cannot = |error: io::Error| format!("the configuration cannot be read: {error}");
    let file = File::open(path).map_err(cannot)?;
    if file.metadata().map_err(cannot)?.is_dir() {
        return Err("this is a folder; name a file of configuration".into());
    }
    let mut bytes = Vec::new();
    file.take(LONGEST_FILE + 1).read_to_end(&mut bytes).map_err(cannot)?;
    if bytes.len() as u64 > LONGEST_FILE {
        return Err(format!("a file of configuration has {LONGEST_FILE} bytes at most"));
    }
    String::from_utf8(bytes).map_err(|error| {
        let good = error.utf8_error().valid_up_to();
        let line = 1 + error.as_bytes()[..good].iter().filter(|byte| **byte == b'\n').count();
        format!("line {line} is no text of UTF-8")
    })
}

/// Where lines begin, so that a file of many keys is not counted through for each.
struct Lines(Vec<usize>);

impl Lines {
    fn of(text: &str) -> Self {
        Self(text.match_indices('\n').map(|(at, _)| at).collect())
    }

    fn of_byte(&self, at: usize) -> usize {
        1 + self.0.partition_point(|end| *end < at)
    }
}

fn setting_value(value: &Spanned<DeValue<'_>>) -> Result<SettingValue, String> {
    match value.get_ref() {
        DeValue::Boolean(on) => Ok(SettingValue::Switch(*on)),
        DeValue::Array(items) => {
            let texts = items.iter().map(|item| text(item.get_ref()));
            Ok(SettingValue::Texts(texts.collect::<Result<_, _>>()?))
        }
        one @ (DeValue::String(_)
        | DeValue::Integer(_)
        | DeValue::Float(_)
        | DeValue::Datetime(_)
        | DeValue::Table(_)) => text(one).map(SettingValue::Text),
    }
}

/// What would be typed for it.
fn text(value: &DeValue<'_>) -> Result<String, String> {
    match value {
        DeValue::String(text) => Ok(text.as_ref().to_owned()),
        DeValue::Integer(number) => match i128::from_str_radix(number.as_str(), number.radix()) {
            Ok(number) => Ok(number.to_string()),
            Err(_) => Err("is a number that no flag takes".into()),
        },
        DeValue::Float(number) => Ok(number.as_str().to_owned()),
        DeValue::Boolean(_) | DeValue::Datetime(_) | DeValue::Array(_) | DeValue::Table(_) => {
            let kind = value.type_str();
            Err(format!(
                "is of the type {kind}, where a text or a number stands; write it in quotes"
            ))
        }
    }
}

/// The known word that is most like this one, where there is such a one.
pub(super) fn nearest<'a>(word: &str, known: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    let alike = known.map(|one| (strsim::jaro(word, one), one));
    let best = alike.max_by(|one, other| one.0.total_cmp(&other.0));
    best.filter(|(likeness, _)| *likeness > ALIKE).map(|(_, one)| one)
}

/// Cut where it is long, on one line.
pub(super) fn quoted(word: &str) -> String {
    let cut: String = word.chars().take(60).collect();
    format!("{:?}{}", cut, if cut.len() < word.len() { "..." } else { "" })
}

#[cfg(test)]
mod tests;
