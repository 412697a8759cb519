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
        let reader = self.readers.get_mut(delta.choice as usize)?;
        let mut from = 0;
        for end in &delta.token_ends {
            let before = reader.in_reasoning();
            reader.push(&delta.text[from..*end], parts);
            from = *end;
            self.reasoning_tokens += u32::from(before || reader.in_reasoning());
        }
        reader.push(&delta.text[from..], parts);
        // a marker of the form that a client stops at ends a call as it would without
        let cut = delta.stop_string.as_deref().is_some_and(|stop| {
            reader.in_call() && !self.format.markers().any(|marker| marker.contains(stop))
        });
        if delta.finish.is_some() {
            reader.finish(parts);
        }
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
