//! One line of a file of keys: `KEY` or `TENANT KEY`, and after them what else the key may and may not, such as `rpm=60`. A
//! key is written as it is, or as `blake3:HEX` or `sha256:HEX`, which lets nobody in who reads the file.

use std::num::NonZeroU32;
use std::sync::Arc;

use jiff::Timestamp;
use jiff::civil::Date;
use jiff::tz::TimeZone;

use super::{Digests, KnownKey, Tenant};
use crate::config::ConfigError;

/// Longest name of a key: it is a label in `/metrics`.
const LONGEST_NAME: usize = 64;
/// Most models that one key names, and the longest name of one.
const MOST_MODELS: usize = 64;
const LONGEST_MODEL: usize = 256;
/// A billion a minute is more than any fleet has, and its sums are far from any overflow.
const MOST_PER_MINUTE: u32 = 1_000_000_000;
/// As many as one `--max-streams` may ever be.
const MOST_STREAMS: u32 = 1_000_000;

/// Whose keys they are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::config) enum Role {
    Client,
    Operator,
}

/// What a line says of its key besides.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct KeyTerms {
    /// In `/metrics`.
    pub name: Option<Arc<str>>,
    /// Models that it may use; `None` are all.
    pub models: Option<Arc<[String]>>,
    /// Requests that it may send in a minute.
    pub requests_per_minute: Option<NonZeroU32>,
    /// Tokens of prompts and answers that it may use in a minute.
    pub tokens_per_minute: Option<NonZeroU32>,
    /// Answers that it may have at a time.
    pub streams: Option<NonZeroU32>,
    /// Seconds since 1970 from which on it is no key any more.
    pub expires: Option<i64>,
    /// Of an operator: it reads `/metrics` and does nothing else.
    pub only_metrics: bool,
}

impl KeyTerms {
    /// True from its last second on.
    #[must_use]
    pub fn have_expired(&self, unix_seconds: i64) -> bool {
        self.expires.is_some_and(|expires| expires <= unix_seconds)
    }

    /// True if one of these names of a model is allowed.
    pub fn allow<'a>(&self, mut names: impl Iterator<Item = &'a str>) -> bool {
        let Some(allowed) = &self.models else { return true };
        names.any(|name| allowed.iter().any(|model| model == name))
    }

    fn set(&mut self, setting: Setting, value: &str, role: Role) -> Result<(), String> {
        let again = match setting {
            Setting::Name => self.name.replace(name(value)?).is_some(),
            Setting::Models => self.models.replace(models(value)?).is_some(),
            Setting::Rpm => {
                self.requests_per_minute.replace(number(value, "rpm", MOST_PER_MINUTE)?).is_some()
            }
            Setting::Tpm => {
                self.tokens_per_minute.replace(number(value, "tpm", MOST_PER_MINUTE)?).is_some()
            }
            Setting::Streams => {
                self.streams.replace(number(value, "streams", MOST_STREAMS)?).is_some()
            }
            Setting::Expires => self.expires.replace(moment(value)?).is_some(),
            Setting::Only if value == "metrics" => std::mem::replace(&mut self.only_metrics, true),
            Setting::Only => return Err("only= takes metrics, and nothing else".into()),
        };
        let word = setting.word();
        if again {
            return Err(format!("{word}= is there twice"));
        }
        if !setting.is_for(role) {
            let whose = if role == Role::Client { "clients" } else { "operators" };
            return Err(format!("{word}= says nothing of a key of {whose}"));
        }
        Ok(())
    }
}

/// What can stand after a key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Setting {
    Name,
    Models,
    Rpm,
    Tpm,
    Streams,
    Expires,
    Only,
}

impl Setting {
    const ALL: [Self; 7] =
        [Self::Name, Self::Models, Self::Rpm, Self::Tpm, Self::Streams, Self::Expires, Self::Only];

    fn word(self) -> &'static str {
        match self {
            Self::Name => "name",
            Self::Models => "models",
            Self::Rpm => "rpm",
            Self::Tpm => "tpm",
            Self::Streams => "streams",
            Self::Expires => "expires",
            Self::Only => "only",
        }
    }

    fn is_for(self, role: Role) -> bool {
        match self {
            Self::Name | Self::Expires => true,
            Self::Models | Self::Rpm | Self::Tpm | Self::Streams => role == Role::Client,
            Self::Only => role == Role::Operator,
        }
    }

    /// The setting of a word such as `rpm=60`, and its value.
    fn of(word: &str) -> Option<(Self, &str)> {
        let (name, value) = word.split_once('=')?;
        Some((Self::ALL.into_iter().find(|setting| setting.word() == name)?, value))
    }
}

/// Reads a line without its comment.
///
/// # Errors
/// What is wrong with it. No error shows any of it: what stands at the wrong place may be a key.
pub(super) fn parse(line: &str, role: Role) -> Result<KnownKey, String> {
    let mut words = line.split_ascii_whitespace().peekable();
    let Some(first) = words.next() else { return Err("a key is empty".into()) };
    if Setting::of(first).is_some() {
        return Err(
            "a setting stands where a key should; a line begins with KEY or TENANT KEY".into()
        );
    }
    let second = words.next_if(|word| Setting::of(word).is_none());
    let (tenant, key) = second.map_or((None, first), |key| (Some(first), key));
    if key.starts_with('#') {
        return Err("a key begins with #, which begins a comment".into());
    }
    if !line.is_ascii() || line.bytes().any(|byte| byte.is_ascii_control() && byte != b'\t') {
        return Err("a key has characters that a header cannot carry".into());
    }
    if second.is_some_and(is_like_a_setting) {
        // such as a misspelt one: the key before it would be taken for a tenant
        return Err(format!("a word after a key looks like a setting and is none of {}", all()));
    }
    let mut terms = KeyTerms::default();
    for word in words {
        let Some((setting, value)) = Setting::of(word) else {
            return Err(format!("a line has more than two words that are none of {}", all()));
        };
        terms.set(setting, value, role)?;
    }
    let digests = digests(key)?;
    let tenant_name = tenant.map(Arc::from);
    let tenant = tenant.map_or_else(
        || blake3::derive_key("headrace 2026-11 tenant of a key", &digests.id()),
        |name| blake3::derive_key("headrace 2026-11 tenant by name", name.as_bytes()),
    );
    Ok(KnownKey { digests, tenant: Tenant(tenant.into()), tenant_name, terms })
}

/// The word of a line that is its key, or its digest.
pub(super) fn key_of(line: &str) -> Option<&str> {
    line.split_ascii_whitespace().take(2).take_while(|word| Setting::of(word).is_none()).last()
}

/// Whether a line could stand in a file of keys of clients, for who writes one.
///
/// # Errors
/// What is wrong with it.
pub fn check_key_line(line: &str) -> Result<(), ConfigError> {
    let checked = parse(line, Role::Client);
    checked
        .map(|_| ())
        .map_err(|problem| super::flag("api-key-file", problem, super::files::REMEDY))
}

fn all() -> String {
    Setting::ALL.map(|setting| format!("{}=", setting.word())).join(", ")
}

/// Keys that end with the `=` of base64 are none.
fn is_like_a_setting(word: &str) -> bool {
    word.split_once('=').is_some_and(|(name, value)| {
        let named = !name.is_empty() && name.bytes().all(|byte| byte.is_ascii_lowercase());
        named && !value.bytes().all(|byte| byte == b'=')
    })
}

fn digests(key: &str) -> Result<Digests, String> {
    let hex = |text: &str| {
        blake3::Hash::from_hex(text)
            .map_err(|_| "a digest is not made of 64 hexadecimal digits".to_owned())
    };
    if let Some(text) = key.strip_prefix("blake3:") {
        return Ok(Digests { blake3: Some(hex(text)?), sha256: None });
    }
    if let Some(text) = key.strip_prefix("sha256:") {
        return Ok(Digests { blake3: None, sha256: Some(hex(text)?) });
    }
    Ok(Digests::of(key))
}

fn name(value: &str) -> Result<Arc<str>, String> {
    let good = |byte: u8| byte.is_ascii_alphanumeric() || b"-._".contains(&byte);
    if (1..=LONGEST_NAME).contains(&value.len()) && value.bytes().all(good) {
        return Ok(value.into());
    }
    Err(format!("name= takes 1 to {LONGEST_NAME} letters, digits and -._"))
}

fn models(value: &str) -> Result<Arc<[String]>, String> {
    let models: Vec<String> = value.split(',').map(str::to_owned).collect();
    let good = |model: &String| (1..=LONGEST_MODEL).contains(&model.len());
    if models.len() <= MOST_MODELS && models.iter().all(good) {
        return Ok(models.into());
    }
    Err(format!("models= takes 1 to {MOST_MODELS} names with commas between them"))
}

fn number(value: &str, word: &str, most: u32) -> Result<NonZeroU32, String> {
    let number = value.parse().ok().filter(|number: &NonZeroU32| number.get() <= most);
    number.ok_or_else(|| format!("{word}= takes a whole number from 1 to {most}"))
}

fn moment(value: &str) -> Result<i64, String> {
    let day = || value.parse::<Date>().ok().filter(|_| value.len() == "2027-01-01".len());
    let midnight = |day: Date| day.to_zoned(TimeZone::UTC).ok().map(|begin| begin.timestamp());
    let moment = day().and_then(midnight).or_else(|| value.parse::<Timestamp>().ok());
    moment.map(Timestamp::as_second).ok_or_else(|| {
        "expires= takes a day such as 2027-01-01, from whose beginning in UTC on it is no key any more, or a time such as \
         2027-01-01T12:00:00Z"
            .to_owned()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn client(line: &str) -> Result<KnownKey, String> {
        parse(line, Role::Client)
    }

    #[test]
    fn settings_stand_after_the_key_with_or_without_a_tenant() {
        let line = "k models=a,b/c rpm=60 tpm=100000 streams=8 expires=2027-01-01 name=ci";
        for (line, tenant) in [(line.to_owned(), None), (format!("alice {line}"), Some("alice"))] {
            let key = client(&line).unwrap();
            assert_eq!(key.tenant_name.as_deref(), tenant);
            let terms = &key.terms;
            assert_eq!(terms.name.as_deref(), Some("ci"));
            let number = |number: Option<NonZeroU32>| number.map(NonZeroU32::get);
            assert_eq!(number(terms.requests_per_minute), Some(60));
            assert_eq!(number(terms.tokens_per_minute), Some(100_000));
            assert_eq!(number(terms.streams), Some(8));
            assert_eq!(terms.expires, Some(1_798_761_600));
            assert!(!terms.have_expired(1_798_761_599) && terms.have_expired(1_798_761_600));
            let allows = |names: &[&str]| terms.allow(names.iter().copied());
            assert!(allows(&["b/c"]) && allows(&["x", "a"]) && !allows(&["b"]) && !allows(&[]));
        }
        let bare = client("k").unwrap().terms;
        assert!(bare == KeyTerms::default() && bare.allow(["x"].into_iter()));
        assert!(!bare.have_expired(i64::MAX));
        let at_noon = client("k expires=2027-01-01T12:00:00+02:00").unwrap().terms.expires;
        assert_eq!(at_noon, Some(1_798_761_600 + 10 * 3_600));
    }

    #[test]
    fn a_digest_stands_for_its_key() {
        let digest = blake3::hash(b"sesame").to_hex();
        let sha = "sha256:d0c04f4b1951e4aeaaec8223ed2039e542f3aae805a6fa7f6d794e5afff5d272";
        let plain = client("sesame").unwrap();
        assert!(plain.digests.meet(&client(&format!("blake3:{digest}")).unwrap().digests));
        assert!(plain.digests.meet(&client(sha).unwrap().digests));
        assert_eq!(plain.tenant, client(&format!("blake3:{digest}")).unwrap().tenant);
        assert!(!plain.digests.meet(&client("sesame2").unwrap().digests));
        let mut keys = super::super::Keys::default();
        keys.add(sha, Role::Client).unwrap();
        assert_eq!((keys.find(b"sesame"), keys.find(b"sesame2")), (Some(0), None));
        assert_eq!(keys.find(sha.as_bytes()), None, "the file's own text is no key");
        for (again, part) in
            // each kind of digest makes a tenant of its own
            [("sesame rpm=1", "two tenants"), ("alice sesame", "two tenants")]
        {
            let error = keys.add(again, Role::Client).unwrap_err();
            assert!(error.contains(part) && !error.contains("sesame"), "{error}");
        }
    }

    #[test]
    fn what_cannot_be_meant_is_refused_and_not_shown() {
        for (line, part) in [
            ("", "empty"),
            ("rpm=60", "where a key should"),
            ("rpm=60 sesame", "where a key should"),
            ("sesame rmp=60", "looks like a setting"),
            ("a sesame rmp=60", "more than two words"),
            ("a sesame rpm=60 sesame", "more than two words"),
            ("sesame rpm=0", "rpm= takes"),
            ("sesame rpm=", "rpm= takes"),
            ("sesame rpm=1.5", "rpm= takes"),
            ("sesame tpm=1000000001", "tpm= takes"),
            ("sesame streams=-1", "streams= takes"),
            ("sesame streams=1000001", "streams= takes"),
            ("sesame rpm=1 rpm=1", "rpm= is there twice"),
            ("sesame name=", "name= takes"),
            ("sesame name=a/b", "name= takes"),
            ("sesame models=", "models= takes"),
            ("sesame models=a,,b", "models= takes"),
            ("sesame expires=tomorrow", "expires= takes"),
            ("sesame expires=2027-02-30", "expires= takes"),
            ("sesame expires=20270101", "expires= takes"),
            ("sesame only=metrics", "nothing of a key of clients"),
            ("blake3:sesame", "64 hexadecimal"),
            ("sha256:", "64 hexadecimal"),
        ] {
            let error = client(line).unwrap_err();
            assert!(error.contains(part) && !error.contains("sesame"), "{line}: {error}");
        }
        assert!(client("alice c2VzYW1l==").is_ok() && client("alice c2VzYW1l=").is_ok());
        assert!(client("alice Key=value").is_ok(), "as it was before there were settings");
        assert!(client(&format!("k name={}", "x".repeat(64))).is_ok());
        assert!(client(&format!("k name={}", "x".repeat(65))).is_err());
        assert!(client(&format!("k models={}", ["m"; 64].join(","))).is_ok());
        assert!(client(&format!("k models={}", ["m"; 65].join(","))).is_err());
        assert!(client("k tpm=1000000000 streams=1000000").is_ok());
    }

    #[test]
    fn operators_have_settings_of_their_own() {
        let scraper = parse("k name=prometheus only=metrics expires=2027-01-01", Role::Operator);
        assert!(scraper.unwrap().terms.only_metrics);
        for (line, part) in [
            ("k rpm=1", "nothing of a key of operators"),
            ("k only=workers", "only= takes metrics"),
            ("k only=metrics only=metrics", "twice"),
        ] {
            assert!(parse(line, Role::Operator).unwrap_err().contains(part), "{line}");
        }
        assert!(check_key_line("k rpm=1").is_ok());
        let error = check_key_line("k only=metrics").unwrap_err().to_string();
        assert!(error.starts_with("--api-key-file: "), "{error}");
    }

    proptest::proptest! {
        #[test]
        fn any_line_is_read_or_refused(
            words in proptest::collection::vec("[a-z]{0,6}=?[0-9a-z:,-]{0,8}|(rpm|tpm|streams|models|name|expires|only)=.{0,12}", 0..5),
        ) {
            let line = words.join(" ");
            if let Ok(key) = client(&line) {
                let numbers = [key.terms.requests_per_minute, key.terms.tokens_per_minute];
                proptest::prop_assert!(numbers.iter().flatten().all(|n| n.get() <= MOST_PER_MINUTE));
                proptest::prop_assert!(!key.terms.only_metrics);
            }
        }
    }
}
