//! The choices of one answer, told apart into their parts delta by delta, and their tokens of reasoning counted.

use crate::output::{Format, Part, Reader};
use crate::request::{Delta, FinishReason};

/// Prompt tokens whose text shows how a prompt ends. The longest marker has fewer.
const PROMPT_END: usize = 16;

/// Reads all choices of one answer. Whoever writes an answer asks it what each delta holds.
#[derive(Debug)]
pub(in crate::http) struct ChoiceReaders {
    format: Format,
    readers: Vec<Reader>,
    reasoning_tokens: u32,
}

/// What a reader says of a token.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::http) struct TokenNote {
    /// False of what comes without a token, such as what the end of the text makes certain.
    pub(in crate::http) token: bool,
    /// It is of reasoning or of a call, or marks one.
    pub(in crate::http) aside: bool,
    /// With it content became certain.
    pub(in crate::http) said: bool,
}

fn says(parts: &[Part]) -> bool {
    parts.iter().any(|part| matches!(part, Part::Content(_)))
}

impl ChoiceReaders {
    pub(in crate::http) fn new(format: Format, choices: usize) -> Self {
        let readers = (0..choices).map(|_| format.reader()).collect();
        Self { format, readers, reasoning_tokens: 0 }
    }

    /// Before the first delta: the prompt of all choices, which may have opened their reasoning.
    pub(in crate::http) fn after_prompt(
        &mut self,
        ids: &[u32],
        decode: impl FnOnce(&[u32]) -> String,
    ) {
        let end = &ids[ids.len().saturating_sub(PROMPT_END)..];
        self.format.after_prompt(&decode(end));
        self.readers.iter_mut().for_each(|reader| *reader = self.format.reader());
    }

    /// Appends the parts of a delta. Gives why its choice ends here, if it does; a choice may end before its worker does, and
    /// that one is then to be stopped.
    pub(in crate::http) fn read(
        &mut self,
        delta: &Delta,
        parts: &mut Vec<Part>,
    ) -> Option<&'static str> {
        self.read_noting(delta, parts, |_| {})
    }

    /// The same; `note` hears of each token of the delta what it is of, and at last of what the end brings.
    pub(in crate::http) fn read_noting(
        &mut self,
        delta: &Delta,
        parts: &mut Vec<Part>,
        mut note: impl FnMut(TokenNote),
    ) -> Option<&'static str> {
        let reader = self.readers.get_mut(delta.choice as usize)?;
        let mut from = 0;
        for end in &delta.token_ends {
            let (before, in_call, seen) = (reader.in_reasoning(), reader.in_call(), parts.len());
            reader.push(&delta.text[from..*end], parts);
            from = *end;
            let reasons = before || reader.in_reasoning();
            self.reasoning_tokens += u32::from(reasons);
            let aside = reasons || in_call || reader.in_call();
            note(TokenNote { token: true, aside, said: says(&parts[seen..]) });
        }
        let seen = parts.len();
        reader.push(&delta.text[from..], parts);
        // a marker of the form that a client stops at ends a call as it would without
        let cut = delta.stop_string.as_deref().is_some_and(|stop| {
            reader.in_call() && !self.format.markers().any(|marker| marker.contains(stop))
        });
        if delta.finish.is_some() {
            reader.finish(parts);
        }
        note(TokenNote { token: false, aside: false, said: says(&parts[seen..]) });
        // an answer that was cut is cut, whatever was in it
        match delta.finish {
            _ if reader.is_over() => Some("tool_calls"),
            Some(FinishReason::Stop) if reader.called() && !cut => Some("tool_calls"),
            Some(finish) => Some(finish.as_str()),
            None => None,
        }
    }

    /// Of all choices so far.
    pub(in crate::http) fn reasoning_tokens(&self) -> u32 {
        self.reasoning_tokens
    }
}
