//! A cache of beginnings of prompts, so that it shows whether a router sends a prompt to where its beginning is.

use std::collections::HashMap;
use std::collections::hash_map::RandomState;
use std::hash::BuildHasher as _;

use super::request::Asked;

/// Beginnings by the time of their last use.
pub(super) struct Prefixes {
    most: usize,
    words: u32,
    clock: u64,
    used: HashMap<u64, u64>,
    hash: RandomState,
}

impl Prefixes {
    /// Holds `most` beginnings of so many words each.
    pub(super) fn new(most: usize, words: u32) -> Self {
        Self { most, words, clock: 0, used: HashMap::new(), hash: RandomState::new() }
    }

    /// Tokens of the prompt that the cache had; from now on the cache has its beginning.
    pub(super) fn take(&mut self, asked: &Asked<'_>) -> u32 {
        let Some(beginning) = beginning(&asked.text, self.words) else { return 0 };
        self.clock += 1;
        let key = self.hash.hash_one(beginning);
        let held = self.used.insert(key, self.clock).is_some();
        if self.used.len() > self.most
            && let Some((&oldest, _)) = self.used.iter().min_by_key(|(_, used)| **used)
        {
            self.used.remove(&oldest);
        }
        if held { self.words } else { 0 }
    }
}

/// The text to the end of its word number `words`, counted from 1; `None` where there are fewer.
fn beginning(text: &str, words: u32) -> Option<&str> {
    let last = text.split_ascii_whitespace().nth(usize::try_from(words).ok()?.checked_sub(1)?)?;
    let end = last.as_ptr().addr() + last.len() - text.as_ptr().addr(); // a part of the text
    text.get(..end)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn take(prefixes: &mut Prefixes, text: &str) -> u32 {
        let text = text.into();
        prefixes.take(&Asked { stream: false, usage: false, max_tokens: 1, chat: true, text })
    }

    #[test]
    fn a_beginning_is_held_until_others_were_used_since() {
        let mut prefixes = Prefixes::new(2, 2);
        assert_eq!(take(&mut prefixes, "a b 1"), 0);
        assert_eq!(take(&mut prefixes, "a b 2"), 2);
        assert_eq!(take(&mut prefixes, "c d 1"), 0);
        assert_eq!(take(&mut prefixes, "a b 3"), 2);
        assert_eq!(take(&mut prefixes, "e f 1"), 0, "pushes c d out");
        assert_eq!(take(&mut prefixes, "c d 2"), 0);
        assert_eq!(take(&mut prefixes, "e f 2"), 2);
        assert_eq!(take(&mut prefixes, "a b 4"), 0);
    }

    #[test]
    fn a_short_prompt_is_not_cached() {
        let mut prefixes = Prefixes::new(2, 3);
        assert_eq!((take(&mut prefixes, "a b"), take(&mut prefixes, "a b")), (0, 0));
        assert_eq!(
            (beginning("a b", 2), beginning("a b", 3), beginning("a", 0)),
            (Some("a b"), None, None)
        );
    }
}
