//! Keys from files and from the environment, at the start and again when the files have changed.

use std::fmt;
use std::io::{self, Read as _};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use super::{Keys, MOST_KEYS, Role};
use crate::config::{ConfigError, RouterArgs, flag};

/// Longest line of a key file, in bytes: more than any `Authorization` header that proxies let through.
const LONGEST_LINE: usize = 4_096;
/// Longest file with secrets in it: as many lines as there may be keys, and as many comments.
const LONGEST_FILE: u64 = 2 * (MOST_KEYS * LONGEST_LINE) as u64;

pub(super) const REMEDY: &str = "write one key a line, KEY or TENANT KEY, and after it what it may, such as rpm=60 tpm=100000 streams=8 models=A,B \
     expires=2027-01-01 name=NAME; # begins a comment";

/// All keys, as they were when they were read.
#[derive(Clone, Default)]
pub struct KeySet {
    /// Of clients; none lets everybody in.
    pub clients: Keys,
    /// Of operators.
    pub operators: Keys,
    /// What the log should say of the files.
    pub warnings: Vec<String>,
    /// Of the text of the files.
    pub(crate) digest: Option<blake3::Hash>,
}

impl fmt::Debug for KeySet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { clients, operators, .. } = self;
        f.debug_struct("KeySet")
            .field("clients", clients)
            .field("operators", operators)
            .finish_non_exhaustive()
    }
}

/// Where keys come from.
#[derive(Debug, Clone, Default)]
pub struct KeySources {
    clients: KeySource,
    operators: KeySource,
}

#[derive(Debug, Clone, Default)]
struct KeySource {
    file: Option<PathBuf>,
    /// From the environment, which stays as it is.
    others: Keys,
}

impl KeySources {
    /// # Errors
    /// A key of the environment cannot be right.
    pub(in crate::config) fn of(args: &RouterArgs) -> Result<Self, ConfigError> {
        let source = |name, file: &Option<PathBuf>, lines: &[String], role| {
            let mut others = Keys::default();
            for line in lines {
                others.add(line.trim(), role).map_err(|problem| {
                    let problem = format!("{problem} in the variable that stands for this flag");
                    flag(name, problem, "it takes keys with commas between them")
                })?;
            }
            Ok(KeySource { file: file.clone(), others })
        };
        Ok(Self {
            clients: source("api-key-file", &args.api_key_file, &args.api_key, Role::Client)?,
            operators: source(
                "admin-key-file",
                &args.admin_key_file,
                &args.admin_key,
                Role::Operator,
            )?,
        })
    }

    /// True if there is a file that may change. What is no plain file can be read only once.
    #[must_use]
    pub fn may_change(&self) -> bool {
        let files = [&self.clients.file, &self.operators.file];
        let mut files = files.into_iter().flatten().peekable();
        files.peek().is_some() && files.all(|file| file.is_file())
    }

    /// Reads all of them.
    ///
    /// # Errors
    /// A file cannot be read or holds no key, a key cannot be right, or is both a client's and an operator's. No error shows a
    /// key.
    pub fn read(&self) -> Result<KeySet, ConfigError> {
        let mut warnings = Vec::new();
        let mut hasher = blake3::Hasher::new();
        let mut of = |name, source: &KeySource, role| {
            let Some(path) = &source.file else { return Ok(source.others.clone()) };
            let text = read(name, path, &mut warnings)?;
            hasher.update(&(text.len() as u64).to_le_bytes()).update(text.as_bytes());
            keys(name, path, &text, role, &source.others)
        };
        let clients = of("api-key-file", &self.clients, Role::Client)?;
        let operators = of("admin-key-file", &self.operators, Role::Operator)?;
        if operators.overlap(&clients) {
            return Err(flag(
                "admin-key-file",
                "holds a key that clients have, too".into(),
                "give operators a key of their own",
            ));
        }
        Ok(KeySet { clients, operators, warnings, digest: Some(hasher.finalize()) })
    }
}

/// The keys of a file, and those that came otherwise.
fn keys(
    name: &'static str,
    path: &Path,
    text: &str,
    role: Role,
    others: &Keys,
) -> Result<Keys, ConfigError> {
    let mut keys = Keys::default();
    for (number, line) in text.lines().enumerate() {
        let line = without_comment(line);
        if line.is_empty() {
            continue;
        }
        let added = if line.len() > LONGEST_LINE {
            Err("a key is longer than 4096 bytes".into())
        } else {
            keys.add(line, role)
        };
        added.map_err(|problem| {
            flag(name, format!("{} line {}: {problem}", path.display(), number + 1), REMEDY)
        })?;
    }
    if keys.is_empty() {
        let problem = format!("{} holds no key", path.display());
        return Err(flag(name, problem, &format!("{REMEDY}, or leave the flag out")));
    }
    keys.join(others).map_err(|problem| {
        flag(
            name,
            format!("{}: {problem} in the variable that stands for this flag", path.display()),
            REMEDY,
        )
    })?;
    Ok(keys)
}

/// A line up to a `#` at its beginning or after white space: keys may have one inside.
fn without_comment(line: &str) -> &str {
    let mut before = ' ';
    let comment = line.char_indices().find(|(_, c)| {
        let begins = *c == '#' && before.is_whitespace();
        before = *c;
        begins
    });
    line[..comment.map_or(line.len(), |(at, _)| at)].trim()
}

/// The first key of a file, for a client to send.
///
/// # Errors
/// The file cannot be read, holds none, or holds only what a key is checked with.
pub fn first_key(path: &Path) -> Result<String, ConfigError> {
    let text = read("api-key-file", path, &mut Vec::new())?;
    let line = text.lines().map(without_comment).find(|line| !line.is_empty());
    let problem = match line.and_then(super::line::key_of) {
        Some(key) if key.starts_with("blake3:") || key.starts_with("sha256:") => {
            "begins with the digest of a key, from which nobody learns the key"
        }
        Some(key) => return Ok(key.to_owned()),
        None => "holds no key",
    };
    let problem = format!("{} {problem}", path.display());
    Err(flag("api-key-file", problem, "name a file that begins with the key itself"))
}

/// The text of a file with secrets in it; a warning where others may read it, too.
pub(in crate::config) fn read(
    name: &'static str,
    path: &Path,
    warnings: &mut Vec<String>,
) -> Result<String, ConfigError> {
    let failed =
        |source| ConfigError::File { flag: name, path: path.display().to_string(), source };
    let file = std::fs::File::open(path).map_err(failed)?;
    let mode = file.metadata().map_err(failed)?.permissions().mode();
    let mut text = String::new();
    file.take(LONGEST_FILE + 1).read_to_string(&mut text).map_err(failed)?;
    if text.len() as u64 > LONGEST_FILE {
        let problem = format!("it is longer than {LONGEST_FILE} bytes");
        return Err(failed(io::Error::new(io::ErrorKind::InvalidData, problem)));
    }
    if mode & 0o004 != 0 {
        warnings.push(format!(
            "--{name}: every user of this machine can read {}; chmod o-r keeps it to its owner and group",
            path.display()
        ));
    }
    Ok(text)
}
