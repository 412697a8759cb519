//! What a request carried and nobody used: said in a header of its answer, and counted.

use std::sync::{Arc, Mutex, PoisonError};

use axum::http::HeaderValue;

/// Names that are kept of one request; a count stands for the others. A guess.
const MOST: usize = 32;

/// The names of fields that changed nothing, shared by all who look at the body of one request.
#[derive(Debug, Clone, Default)]
pub(in crate::http) struct IgnoredFields {
    /// Fields that nobody knows are noted rather than refused.
    unknown_pass: bool,
    names: Arc<Mutex<IgnoredNames>>,
}

#[derive(Debug, Default)]
struct IgnoredNames {
    first: Vec<String>,
    more: u64,
}

impl IgnoredFields {
    /// `unknown_pass`: fields that nobody knows are noted rather than refused.
    pub(in crate::http) fn new(unknown_pass: bool) -> Self {
        Self { unknown_pass, names: Arc::default() }
    }

    /// Fields that nobody knows are noted rather than refused.
    pub(in crate::http) fn unknown_pass(&self) -> bool {
        self.unknown_pass
    }

    /// Takes note of a field by its path.
    pub(in crate::http) fn note(&self, path: String) {
        let mut names = self.names.lock().unwrap_or_else(PoisonError::into_inner);
        if names.first.len() < MOST {
            names.first.push(path);
        } else {
            names.more += 1;
        }
    }

    /// How many there are.
    pub(in crate::http) fn len(&self) -> u64 {
        let names = self.names.lock().unwrap_or_else(PoisonError::into_inner);
        names.first.len() as u64 + names.more
    }

    /// The names with commas between them; `None` if there are none. What no header can hold, and commas, are `?`.
    pub(in crate::http) fn header(&self) -> Option<HeaderValue> {
        let names = self.names.lock().unwrap_or_else(PoisonError::into_inner);
        if names.first.is_empty() {
            return None;
        }
        let printable = |c: char| if c.is_ascii_graphic() && c != ',' { c } else { '?' };
        let shown = names.first.iter().map(|name| name.chars().map(printable).collect());
        let mut shown: Vec<String> = shown.collect();
        shown.sort_unstable();
        shown.extend((names.more > 0).then(|| format!("and {} more", names.more)));
        HeaderValue::try_from(shown.join(", ")).ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_fit_a_header_whatever_they_are_and_however_many() {
        let ignored = IgnoredFields::new(true);
        assert_eq!(ignored.header(), None);
        ignored.note("top_a".into());
        ignored.clone().note("\u{e9}\r\nX: y,z".into());
        assert_eq!(ignored.header().unwrap(), "???X:?y?z, top_a");
        (0..100).for_each(|_| ignored.note("x".repeat(67)));
        let header = ignored.header().unwrap();
        assert!(header.len() < 4_000 && header.to_str().unwrap().ends_with(", and 70 more"));
        assert_eq!(ignored.len(), 102);
    }
}
