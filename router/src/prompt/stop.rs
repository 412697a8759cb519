//! Finds stop strings in streamed text and holds back no more of it than they force.

use std::sync::Arc;

use crate::limits::memory::{ALLOCATION_BYTES, MemoryShare, Refused};

/// The stop strings of a request: an Aho-Corasick automaton over their bytes. Build it once, share it among choices.
///
/// Its state after some text is the longest suffix of that text that begins a stop string, which is exactly what
/// has to be held back. Each byte costs amortised constant time, however long the stop strings are.
#[derive(Debug)]
pub(crate) struct StopSet {
    nodes: Vec<Node>,
    /// Child of the root by byte, 0 for none: most text never leaves the root.
    root: Box<[u32; 256]>,
    /// What it was charged: it is 24 times as large as the strings, and stays as long as the answer.
    _memory: Option<MemoryShare>,
}

#[derive(Debug, Clone, Default)]
struct Node {
    byte: u8,
    depth: u32,
    first_child: u32,
    next_sibling: u32,
    fail: u32,
    /// Length of the longest stop string that ends here, 0 for none.
    matched: u32,
}

impl StopSet {
    /// `None` if there is nothing to look for. Empty strings are skipped.
    pub(crate) fn new(stops: &[String]) -> Option<Arc<Self>> {
        Self::build(stops, None)
    }

    /// As [`Self::new`], charged to `memory`, which is given back with the last handle.
    pub(crate) fn charged(
        stops: &[String],
        mut memory: MemoryShare,
    ) -> Result<Option<Arc<Self>>, Refused> {
        if !stops.is_empty() {
            let lists = nodes_of(stops) * size_of::<Node>() + size_of::<[u32; 256]>();
            memory.charge(lists + size_of::<Self>() + 3 * ALLOCATION_BYTES)?;
        }
        Ok(Self::build(stops, Some(memory)))
    }

    fn build(stops: &[String], memory: Option<MemoryShare>) -> Option<Arc<Self>> {
        if stops.iter().all(String::is_empty) {
            return None;
        }
        let mut nodes = Vec::with_capacity(nodes_of(stops));
        nodes.push(Node::default());
        let mut set = Self { nodes, root: Box::new([0; 256]), _memory: memory };
        for stop in stops.iter().filter(|s| !s.is_empty()) {
            set.insert(stop.as_bytes());
        }
        set.link();
        Some(Arc::new(set))
    }

    fn insert(&mut self, stop: &[u8]) {
        let mut at = 0;
        for &byte in stop {
            at = match self.child(at, byte) {
                0 => self.add_child(at, byte),
                child => child,
            };
        }
        self.nodes[at as usize].matched = self.nodes[at as usize].depth;
    }

    fn add_child(&mut self, parent: u32, byte: u8) -> u32 {
        let new = u32::try_from(self.nodes.len()).expect("stop strings are far below 4 GiB");
        let up = &mut self.nodes[parent as usize];
        let node =
            Node { byte, depth: up.depth + 1, next_sibling: up.first_child, ..Node::default() };
        up.first_child = new;
        self.nodes.push(node);
        if parent == 0 {
            self.root[usize::from(byte)] = new;
        }
        new
    }

    /// Sets the failure links, nearest the root first.
    fn link(&mut self) {
        let mut queue = std::collections::VecDeque::from([0_u32]);
        while let Some(at) = queue.pop_front() {
            let mut child = self.nodes[at as usize].first_child;
            while child != 0 {
                let byte = self.nodes[child as usize].byte;
                let fail = match at {
                    0 => 0,
                    _ => self.step(self.nodes[at as usize].fail, byte),
                };
                let inherited = self.nodes[fail as usize].matched;
                let node = &mut self.nodes[child as usize];
                node.fail = fail;
                node.matched = node.matched.max(inherited);
                queue.push_back(child);
                child = node.next_sibling;
            }
        }
    }

    fn child(&self, at: u32, byte: u8) -> u32 {
        if at == 0 {
            return self.root[usize::from(byte)];
        }
        let mut child = self.nodes[at as usize].first_child;
        while child != 0 && self.nodes[child as usize].byte != byte {
            child = self.nodes[child as usize].next_sibling;
        }
        child
    }

    fn step(&self, mut at: u32, byte: u8) -> u32 {
        loop {
            match self.child(at, byte) {
                0 if at == 0 => return 0,
                0 => at = self.nodes[at as usize].fail,
                child => return child,
            }
        }
    }
}

/// The root, and at most one node for each byte.
fn nodes_of(stops: &[String]) -> usize {
    1 + stops.iter().map(String::len).sum::<usize>()
}

/// Looks for the stop strings in the text of one choice.
///
/// The stop string that is complete first ends the text, whatever chunks the text came in; of several complete at
/// the same place, the longest. Matching is on characters as they are: no case folding and no normalisation, so a
/// stop string `e` also matches the first half of `e` + U+0301 (written as two characters), as with OpenAI.
#[derive(Debug)]
pub(crate) struct StopMatcher {
    set: Option<Arc<StopSet>>,
    state: u32,
    held: String,
    /// The stop string that was found.
    found: Option<Box<str>>,
    /// The stop string that ends the text is part of it.
    included: bool,
}

impl StopMatcher {
    pub(crate) fn new(set: Option<Arc<StopSet>>) -> Self {
        Self { set, state: 0, held: String::new(), found: None, included: false }
    }

    /// The stop string that ends the text is part of it, if `included`.
    pub(crate) fn including(mut self, included: bool) -> Self {
        self.included = included;
        self
    }

    /// True once a stop string was found. Further text is thrown away.
    pub(crate) fn stopped(&self) -> bool {
        self.found.is_some()
    }

    /// The stop string that was found.
    pub(crate) fn found(&self) -> Option<&str> {
        self.found.as_deref()
    }

    /// Takes the next text and appends to `out` what is certain to be before any stop string.
    pub(crate) fn push(&mut self, text: &str, out: &mut String) {
        let Some(set) = &self.set else {
            out.push_str(text);
            return;
        };
        if self.found.is_some() {
            return;
        }
        for (i, &byte) in text.as_bytes().iter().enumerate() {
            self.state = set.step(self.state, byte);
            let matched = set.nodes[self.state as usize].matched as usize;
            if matched > 0 {
                self.held.push_str(&text[..=i]);
                let before = self.held.len() - matched;
                self.found = Some(self.held[before..].into());
                self.held.truncate(if self.included { self.held.len() } else { before });
                out.push_str(&std::mem::take(&mut self.held));
                return;
            }
        }
        let hold = set.nodes[self.state as usize].depth as usize;
        emit(&mut self.held, text, hold, out);
    }

    /// The text ended: nothing can complete a stop string any more.
    pub(crate) fn finish(&mut self, out: &mut String) {
        out.push_str(&self.held);
        self.held.clear();
        self.state = 0;
    }
}

/// Moves all but the last `hold` bytes of `held + text` to `out`; the rest stays in `held`.
///
/// A stop string is UTF-8 and so is the text, so a prefix of one in the other begins at a character boundary.
fn emit(held: &mut String, text: &str, hold: usize, out: &mut String) {
    if hold <= text.len() {
        out.push_str(held);
        held.clear();
        let (certain, rest) = text.split_at(text.len() - hold);
        out.push_str(certain);
        held.push_str(rest);
    } else {
        let certain = held.len() + text.len() - hold;
        out.push_str(&held[..certain]);
        held.drain(..certain);
        held.push_str(text);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::limits::memory::MemoryPool;

    fn run(stops: &[&str], chunks: &[&str]) -> (String, bool, Vec<String>) {
        let stops: Vec<String> = stops.iter().map(|s| (*s).to_owned()).collect();
        let mut matcher = StopMatcher::new(StopSet::new(&stops));
        let mut parts = Vec::new();
        for chunk in chunks {
            let mut out = String::new();
            matcher.push(chunk, &mut out);
            parts.push(out);
        }
        let mut out = String::new();
        matcher.finish(&mut out);
        parts.push(out);
        (parts.concat(), matcher.stopped(), parts)
    }

    #[test]
    fn stop_across_chunks_is_cut_and_only_its_beginning_is_held() {
        let (text, stopped, parts) = run(&["<end>"], &["a<e", "n", "x<en", "d>tail", "more"]);
        assert_eq!((text.as_str(), stopped), ("a<enx", true));
        assert_eq!(parts, ["a", "", "<enx", "", "", ""]);
    }

    #[test]
    fn the_stop_string_is_part_of_the_text_where_that_was_asked_for() {
        for chunks in [&["a<e", "n", "d>tail", "more"][..], &["a<end>tail"]] {
            let set = StopSet::new(&["<end>".to_owned()]);
            let mut matcher = StopMatcher::new(set).including(true);
            let mut out = String::new();
            chunks.iter().for_each(|chunk| matcher.push(chunk, &mut out));
            matcher.finish(&mut out);
            assert_eq!((out.as_str(), matcher.stopped()), ("a<end>", true));
        }
    }

    #[test]
    fn what_was_found_is_known() {
        let stops = ["bcd".to_owned(), "cd".to_owned(), "x".to_owned()];
        let mut matcher = StopMatcher::new(StopSet::new(&stops));
        let mut out = String::new();
        for chunk in ["ab", "c", "de"] {
            assert_eq!(matcher.found(), None);
            matcher.push(chunk, &mut out);
        }
        assert_eq!((matcher.found(), out.as_str()), (Some("bcd"), "a"));
    }

    #[test]
    fn held_text_comes_out_at_the_end() {
        assert_eq!(
            run(&["<end>"], &["a<en"]),
            ("a<en".to_owned(), false, vec!["a".into(), "<en".into()])
        );
    }

    #[test]
    fn the_first_complete_stop_wins_and_of_those_the_longest() {
        assert_eq!(run(&["abcd", "bc"], &["xabcd"]).0, "xa");
        assert_eq!(run(&["d", "bcd"], &["abcd"]).0, "a");
        assert_eq!(run(&["aab"], &["aaab"]).0, "a");
        assert_eq!(run(&["", "é"], &["xé"]).0, "x");
        assert_eq!(run(&[""], &["xy"]).0, "xy");
        assert_eq!(run(&["c"], &["abcd"]).0, "ab");
    }

    #[test]
    fn stop_strings_are_charged_for_as_long_as_they_are_looked_for() {
        let stops = ["x".repeat(1_000), String::new()];
        let least = 1_001 * size_of::<Node>() + size_of::<[u32; 256]>();
        let memory = MemoryPool::private(2 * least);
        let set = StopSet::charged(&stops, memory.share()).unwrap().unwrap();
        let used = set._memory.as_ref().unwrap().used();
        assert!((least..least + 1_000).contains(&used), "{used} for {least}");
        let refused = StopSet::charged(&stops, MemoryPool::private(least).share());
        assert!(matches!(refused, Err(Refused::TooMuch { .. })));
        assert!(StopSet::charged(&[], MemoryPool::private(0).share()).unwrap().is_none());
    }

    #[test]
    fn a_long_stop_of_one_letter_is_linear() {
        let len = if cfg!(miri) { 200 } else { 200_000 };
        let stop = "a".repeat(len) + "b";
        let text = "a".repeat(2 * len);
        let (out, stopped, _) = run(&[&stop], &[&text, &text]);
        assert_eq!((out.len(), stopped), (4 * len, false));
    }

    /// What a reader of the whole text would do.
    fn oracle(stops: &[String], text: &str) -> (String, bool) {
        for end in 1..=text.len() {
            let longest = stops
                .iter()
                .filter(|s| !s.is_empty() && text.as_bytes()[..end].ends_with(s.as_bytes()))
                .map(String::len)
                .max();
            if let Some(len) = longest {
                return (text[..end - len].to_owned(), true);
            }
        }
        (text.to_owned(), false)
    }

    proptest! {
        #[test]
        fn any_chunks_give_what_the_whole_text_gives(
            stops in prop::collection::vec("[abé]{0,4}", 0..4),
            chunks in prop::collection::vec("[abcé]{0,5}", 0..12),
        ) {
            let text = chunks.concat();
            let borrowed: Vec<&str> = stops.iter().map(String::as_str).collect();
            let pieces: Vec<&str> = chunks.iter().map(String::as_str).collect();
            let (out, stopped, parts) = run(&borrowed, &pieces);
            prop_assert_eq!((out, stopped), oracle(&stops, &text));
            // Held text is minimal: what is missing begins a stop string, and nothing longer does.
            let mut seen = String::new();
            let mut emitted = String::new();
            for (chunk, part) in chunks.iter().zip(&parts) {
                seen.push_str(chunk);
                emitted.push_str(part);
                if oracle(&stops, &seen).1 { break; }
                let longest = (0..=seen.len())
                    .filter(|i| seen.is_char_boundary(*i))
                    .find(|i| *i == seen.len() || stops.iter().any(|s| s.starts_with(&seen[*i..])))
                    .unwrap();
                prop_assert_eq!(&emitted, &seen[..longest]);
            }
        }
    }
}
