//! Keys of clients and of operators: from a file or the environment, kept as digests.

use std::fmt;
use std::path::Path;
use std::sync::Arc;

use super::{ConfigError, flag};

/// Most keys of one kind. All of them are compared with what a client sent, in constant time: 4,096 take some 20 us.
const MOST_KEYS: usize = 4_096;
/// Longest line of a key file, in bytes: more than any `Authorization` header that proxies let through.
const LONGEST_LINE: usize = 4_096;

/// Keys of which one lets somebody in.
#[derive(Clone, Default)]
pub struct Keys(Vec<Key>);

/// A key, as far as it is kept.
#[derive(Clone)]
struct Key {
    digest: blake3::Hash,
    tenant: Tenant,
    /// Of the tenant, where it has one.
    name: Option<Arc<str>>,
}

/// Who has a key: all keys of one name, or one key without a name.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Tenant(blake3::Hash);

impl Tenant {
    /// For books that are kept by tenant.
    #[must_use]
    pub fn id(self) -> u64 {
        u64::from_le_bytes(self.0.as_bytes()[..8].try_into().expect("8 of 32 bytes"))
    }

    /// The salt of this tenant's cached blocks, within which clients may have salts of their own.
    #[must_use]
    pub fn salt(self, of_client: &[u8]) -> Vec<u8> {
        let mut hasher = blake3::Hasher::new_derive_key("headrace 2026-11 cache of a tenant");
        hasher.update(self.0.as_bytes()).update(of_client);
        hasher.finalize().as_bytes()[..16].to_vec()
    }
}

impl Keys {
    /// True if there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Who sent this key. Every key is compared, each in constant time.
    #[must_use]
    pub fn find(&self, sent: &[u8]) -> Option<Tenant> {
        let sent = blake3::hash(sent);
        let compare = |found, key: &Key| if key.digest == sent { Some(key.tenant) } else { found };
        self.0.iter().fold(None, compare)
    }

    /// What its line calls a tenant.
    #[must_use]
    pub fn name(&self, tenant: Tenant) -> Option<Arc<str>> {
        self.0.iter().find(|key| key.tenant == tenant).and_then(|key| key.name.clone())
    }

    /// True if a key is in both.
    pub(super) fn overlap(&self, other: &Self) -> bool {
        self.0.iter().any(|key| other.0.iter().any(|theirs| theirs.digest == key.digest))
    }

    /// Adds a line, `KEY` or `TENANT KEY`.
    pub(super) fn add(&mut self, line: &str) -> Result<(), &'static str> {
        let mut words = line.split_ascii_whitespace();
        let (tenant, key) = match (words.next(), words.next(), words.next()) {
            (Some(key), None, None) => (None, key),
            (Some(tenant), Some(key), None) => (Some(tenant), key),
            (None, ..) => return Err("a key is empty"),
            _ => return Err("a line has more than two words"),
        };
        if key.starts_with('#') {
            return Err("a key begins with #, which begins a comment");
        }
        if !line.is_ascii() || line.bytes().any(|byte| byte.is_ascii_control() && byte != b'\t') {
            return Err("a key has characters that a header cannot carry");
        }
        let digest = blake3::hash(key.as_bytes());
        let name = tenant.map(Arc::from);
        let tenant = tenant.map_or_else(
            || blake3::derive_key("headrace 2026-11 tenant of a key", digest.as_bytes()),
            |name| blake3::derive_key("headrace 2026-11 tenant by name", name.as_bytes()),
        );
        let key = Key { digest, tenant: Tenant(tenant.into()), name };
        if self.0.iter().any(|known| known.digest == key.digest && known.tenant != key.tenant) {
            return Err("a key belongs to two tenants");
        }
        if self.0.len() == MOST_KEYS {
            return Err("there are more than 4096 keys");
        }
        self.0.push(key);
        Ok(())
    }
}

impl fmt::Debug for Keys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Keys({})", self.0.len())
    }
}

impl fmt::Debug for Tenant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Tenant({:016x})", self.id())
    }
}

/// The keys of a file and those that came otherwise.
///
/// # Errors
/// The file cannot be read or holds none, or a key cannot be right. No error shows a key.
pub(super) fn keys(
    name: &'static str,
    file: Option<&Path>,
    others: &[String],
    warnings: &mut Vec<String>,
) -> Result<Keys, ConfigError> {
    let remedy = "write one key a line, KEY or TENANT KEY; # begins a comment";
    let mut keys = Keys::default();
    if let Some(path) = file {
        let text = read(name, path, warnings)?;
        for (number, line) in text.lines().enumerate() {
            let line = without_comment(line);
            if line.is_empty() {
                continue;
            }
            let added = if line.len() > LONGEST_LINE {
                Err("a key is longer than 4096 bytes")
            } else {
                keys.add(line)
            };
            added.map_err(|problem| {
                flag(name, format!("{} line {}: {problem}", path.display(), number + 1), remedy)
            })?;
        }
        if keys.is_empty() {
            let problem = format!("{} holds no key", path.display());
            return Err(flag(name, problem, &format!("{remedy}, or leave the flag out")));
        }
    }
    for line in others {
        keys.add(line.trim()).map_err(|problem| {
            let problem = format!("{problem} in the variable that stands for this flag");
            flag(name, problem, "it takes keys with commas between them")
        })?;
    }
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
/// The file cannot be read or holds none.
pub fn first_key(path: &Path) -> Result<String, ConfigError> {
    let text = read("api-key-file", path, &mut Vec::new())?;
    let mut keys = text.lines().map(without_comment).filter(|line| !line.is_empty());
    let key = keys.next().and_then(|line| line.split_ascii_whitespace().last()).map(str::to_owned);
    key.ok_or_else(|| {
        let problem = format!("{} holds no key", path.display());
        flag("api-key-file", problem, "write one key a line, KEY or TENANT KEY")
    })
}

/// The text of a file with secrets in it; a warning where others may read it, too.
pub(super) fn read(
    name: &'static str,
    path: &Path,
    warnings: &mut Vec<String>,
) -> Result<String, ConfigError> {
    use std::os::unix::fs::PermissionsExt as _;
    let failed =
        |source| ConfigError::File { flag: name, path: path.display().to_string(), source };
    let text = std::fs::read_to_string(path).map_err(failed)?;
    let mode = std::fs::metadata(path).map_err(failed)?.permissions().mode();
    if mode & 0o004 != 0 {
        warnings.push(format!(
            "--{name}: every user of this machine can read {}; chmod o-r keeps it to its owner and group",
            path.display()
        ));
    }
    Ok(text)
}
