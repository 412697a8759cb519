//! Prompts for load: made up with a chosen part in common, or from a file.

use std::path::Path;

use serde_json::Value;

use crate::BadInput;
use crate::client::body::Prompt;
use crate::random::{Random, mix};
use crate::trace::FIRST_TOKEN;

const WORDS: [&str; 16] = [
    "river", "stone", "under", "light", "seven", "paper", "morning", "engine", "garden", "winter",
    "silver", "window", "market", "circle", "orange", "valley",
];

const BEGINNING: u64 = 0x4245_4749_4e00;
const SHARED: u64 = 0x5348_4152_4544;
const OWN: u64 = 0x4f57_4e00;

/// Where prompts come from.
#[derive(Debug, Clone)]
pub(super) enum Prompts {
    /// In a circle.
    File(Vec<Prompt>),
    MadeUp(MadeUp),
}

/// Prompts of words or token ids: another number or another seed is another prompt. The number is in the text, so no two of a
/// run are equal, however short.
#[derive(Debug, Clone)]
pub(super) struct MadeUp {
    pub(super) words: usize,
    /// Token ids instead of words, so many.
    pub(super) tokens: Option<usize>,
    /// Words (or tokens) at the beginning that prompts have in common.
    pub(super) shared: usize,
    /// How many beginnings there are.
    pub(super) beginnings: usize,
    pub(super) chat: bool,
    pub(super) seed: u64,
    /// Token ids stay below.
    pub(super) vocab: u32,
}

impl Prompts {
    pub(super) fn prompt(&self, number: u64) -> Prompt {
        match self {
            Self::File(all) => all[(number % all.len() as u64) as usize].clone(),
            Self::MadeUp(made_up) => made_up.prompt(number),
        }
    }
}

impl MadeUp {
    fn prompt(&self, number: u64) -> Prompt {
        // Which beginning is drawn from the number, so that a request is the same whoever sends it.
        let beginning = self.random(BEGINNING, number).below(self.beginnings) as u64;
        let mut shared = self.random(SHARED, beginning);
        let mut own = self.random(OWN, number);
        if let Some(tokens) = self.tokens {
            let span = (self.vocab - FIRST_TOKEN) as usize;
            let token = |random: &mut Random| FIRST_TOKEN + random.below(span) as u32;
            let shared_tokens = self.shared.min(tokens);
            let mut prompt: Vec<u32> = (0..shared_tokens).map(|_| token(&mut shared)).collect();
            prompt.extend((shared_tokens..tokens).map(|_| token(&mut own)));
            return Prompt::Tokens(prompt);
        }
        let mut words: Vec<String> =
            (0..self.shared).map(|_| WORDS[shared.below(WORDS.len())].to_owned()).collect();
        words.push(format!("Request {number}:"));
        words.extend((0..self.words).map(|_| WORDS[own.below(WORDS.len())].to_owned()));
        let text = words.join(" ");
        if self.chat {
            Prompt::Messages(vec![serde_json::json!({"role": "user", "content": text})])
        } else {
            Prompt::Text(text)
        }
    }

    /// Chance for one purpose. Seeds are mixed first: those of two runs may be as close as their numbers of requests.
    fn random(&self, purpose: u64, number: u64) -> Random {
        Random::new(mix(mix(self.seed ^ purpose) ^ number))
    }
}

/// Reads JSON lines with `prompt` (text) or `messages`.
///
/// # Errors
/// The file cannot be read or has a bad line, which is named.
pub(super) fn read(path: &Path, chat: bool) -> Result<Prompts, BadInput> {
    let file = path.display();
    let text = std::fs::read_to_string(path).map_err(|e| BadInput(format!("{file}: {e}")))?;
    let mut prompts = Vec::new();
    for (i, line) in text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()) {
        let prompt = one(line, chat).map_err(|e| BadInput(format!("{file}:{}: {e}", i + 1)))?;
        prompts.push(prompt);
    }
    if prompts.is_empty() {
        return Err(BadInput(format!("{file}: there is no prompt in it")));
    }
    Ok(Prompts::File(prompts))
}

fn one(line: &str, chat: bool) -> Result<Prompt, String> {
    let fields: Value = serde_json::from_str(line).map_err(|error| format!("not JSON: {error}"))?;
    match (fields.get("prompt"), fields.get("messages")) {
        (Some(Value::String(text)), None) if chat => {
            Ok(Prompt::Messages(vec![serde_json::json!({"role": "user", "content": text})]))
        }
        (Some(Value::String(text)), None) => Ok(Prompt::Text(text.clone())),
        (Some(_), None) => Err("`prompt` must be text".into()),
        (None, Some(Value::Array(messages))) if !messages.is_empty() => {
            Ok(Prompt::Messages(messages.clone()))
        }
        (None, Some(_)) => Err("`messages` must be an array that is not empty".into()),
        (Some(_), Some(_)) => Err("`prompt` and `messages` exclude each other".into()),
        (None, None) => Err("neither `prompt` nor `messages` is there".into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn made_up(tokens: Option<usize>) -> MadeUp {
        let (words, shared, beginnings) = (3, 20, 2);
        MadeUp { words, tokens, shared, beginnings, chat: false, seed: 1, vocab: 1000 }
    }

    #[test]
    fn prompts_share_their_beginnings_and_nothing_else() {
        let text = |number| match made_up(None).prompt(number) {
            Prompt::Text(text) => text,
            other @ (Prompt::Tokens(_) | Prompt::Messages(_)) => panic!("{other:?}"),
        };
        let mut beginnings: Vec<String> =
            (0..50).map(|n| text(n).split("Request").next().unwrap().to_owned()).collect();
        beginnings.sort();
        beginnings.dedup();
        assert_eq!(beginnings.len(), 2);
        assert_eq!(text(4), text(4));
        assert_ne!(text(4), text(5));
    }

    #[test]
    fn another_seed_shares_no_prompt_and_no_part_of_one() {
        let parts = |tokens, seed| -> std::collections::HashSet<String> {
            let made_up = MadeUp { seed, words: 16, shared: 0, ..made_up(tokens) };
            let parts = (0..200).map(|number| match made_up.prompt(number) {
                Prompt::Text(text) => text.split_once(':').unwrap().1.to_owned(),
                Prompt::Tokens(ids) => format!("{:?}", &ids[..16]),
                other @ Prompt::Messages(_) => panic!("{other:?}"),
            });
            parts.collect()
        };
        for tokens in [None, Some(32)] {
            let first = parts(tokens, 1);
            assert_eq!(first.len(), 200);
            // seeds from the clock are as close as this
            for seed in [2, 1 ^ 7, 1 + 100] {
                assert!(first.is_disjoint(&parts(tokens, seed)), "{tokens:?} {seed}");
            }
            assert_eq!(first, parts(tokens, 1));
        }
    }

    #[test]
    fn token_prompts_have_their_length_and_stay_in_the_vocabulary() {
        let tokens = |number| match made_up(Some(30)).prompt(number) {
            Prompt::Tokens(tokens) => tokens,
            other @ (Prompt::Text(_) | Prompt::Messages(_)) => panic!("{other:?}"),
        };
        for number in 0..20 {
            assert_eq!(tokens(number).len(), 30);
            assert!(tokens(number).iter().all(|id| (FIRST_TOKEN..1000).contains(id)));
        }
        let same = (1..20).find(|n| tokens(*n)[..20] == tokens(0)[..20]).unwrap();
        assert_ne!(tokens(same)[20..], tokens(0)[20..]);
    }

    #[test]
    fn lines_are_prompts_or_messages() {
        assert_eq!(one(r#"{"prompt": "x"}"#, false), Ok(Prompt::Text("x".into())));
        assert!(matches!(one(r#"{"prompt": "x"}"#, true), Ok(Prompt::Messages(_))));
        assert!(matches!(one(r#"{"messages": [{}]}"#, false), Ok(Prompt::Messages(_))));
        for bad in ["x", "{}", r#"{"prompt": 3}"#, r#"{"messages": []}"#] {
            assert!(one(bad, false).is_err(), "{bad}");
        }
    }
}
