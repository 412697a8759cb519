//! The choices of one answer, told apart into their parts delta by delta, and their tokens of reasoning counted.

use crate::error::RouteError;
use crate::limits::memory::{MemoryShare, Refused};
use crate::output::{Format, Part, Reader};
use crate::request::{Delta, FinishReason};

/// What a reader holds back is charged in steps of this, so that most answers are charged once.
const HELD_STEP: usize = 1 << 10;

/// Prompt tokens whose text shows how a prompt ends. The longest marker has fewer.
const PROMPT_END: usize = 16;

/// Reads all choices of one answer. Whoever writes an answer asks it what each delta holds.
#[derive(Debug)]
pub(in crate::http) struct ChoiceReaders {
    format: Format,
    readers: Vec<Reader>,
    reasoning_tokens: u32,
    /// For what the readers hold back, and how much of it each does.
    memory: MemoryShare,
    charged: Vec<usize>,
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

/// Bytes of content. What follows content goes to the same part.
fn said(parts: &[Part]) -> usize {
    let content = parts.iter().map(|part| match part {
        Part::Content(text) => text.len(),
        Part::Reasoning(_) | Part::CallBegins { .. } | Part::CallArguments { .. } => 0,
    });
    content.sum()
}

impl ChoiceReaders {
    pub(in crate::http) fn new(format: Format, choices: usize, memory: MemoryShare) -> Self {
        let readers = (0..choices).map(|_| format.reader()).collect();
        Self { format, readers, reasoning_tokens: 0, memory, charged: vec![0; choices] }
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
    ///
    /// # Errors
    /// There is no memory for what is held back.
    pub(in crate::http) fn read(
        &mut self,
        delta: &Delta,
        parts: &mut Vec<Part>,
    ) -> Result<Option<&'static str>, RouteError> {
        self.read_noting(delta, parts, |_| {})
    }

    /// The same; `note` hears of each token of the delta what it is of, and at last of what the end brings.
    ///
    /// # Errors
    /// There is no memory for what is held back.
    pub(in crate::http) fn read_noting(
        &mut self,
        delta: &Delta,
        parts: &mut Vec<Part>,
        mut note: impl FnMut(TokenNote),
    ) -> Result<Option<&'static str>, RouteError> {
        let place = delta.choice as usize;
        let Some(reader) = self.readers.get_mut(place) else { return Ok(None) };
        let mut from = 0;
        for end in &delta.token_ends {
            let (before, in_call, seen) = (reader.in_reasoning(), reader.in_call(), said(parts));
            reader.push(&delta.text[from..*end], parts);
            from = *end;
            let reasons = before || reader.in_reasoning();
            self.reasoning_tokens += u32::from(reasons);
            let aside = reasons || in_call || reader.in_call();
            note(TokenNote { token: true, aside, said: said(parts) > seen });
        }
        let seen = said(parts);
        reader.push(&delta.text[from..], parts);
        // a marker of the form that a client stops at ends a call as it would without
        let cut = delta.stop_string.as_deref().is_some_and(|stop| {
            reader.in_call() && !self.format.markers().any(|marker| marker.contains(stop))
        });
        if delta.finish.is_some() {
            reader.finish(parts);
        }
        note(TokenNote { token: false, aside: false, said: said(parts) > seen });
        let held = reader.held_bytes().next_multiple_of(HELD_STEP);
        let charged = std::mem::replace(&mut self.charged[place], held);
        if held > charged {
            self.memory.charge(held - charged).map_err(Refused::answer)?;
        } else {
            self.memory.give_back(charged - held);
        }
        // its grammar ends it, with the same number of tokens however they are cut into deltas
        if delta.finish.is_none() && self.format.is_forced_call() {
            return Ok(None);
        }
        // an answer that was cut is cut, whatever was in it
        Ok(match delta.finish {
            _ if reader.is_over() => Some("tool_calls"),
            Some(FinishReason::Stop) if reader.called() && !cut => Some("tool_calls"),
            Some(finish) => Some(finish.as_str()),
            None => None,
        })
    }

    /// Of all choices so far.
    pub(in crate::http) fn reasoning_tokens(&self) -> u32 {
        self.reasoning_tokens
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limits::memory::MemoryPool;
    use crate::output::Tools;
    use crate::prompt::ToolParser;

    fn readers(bytes: usize, choices: usize) -> ChoiceReaders {
        let functions = [("f".to_owned(), std::collections::HashMap::new())].into();
        let parser = ToolParser::Hermes;
        let tools = Tools { parser, functions, parallel: true, forced: false };
        let format = Format::new(None, Some(tools)).unwrap();
        ChoiceReaders::new(format, choices, MemoryPool::private(bytes).share())
    }

    fn delta(choice: u32, text: &str) -> Delta {
        Delta { choice, text: text.into(), token_ends: vec![text.len()], ..Delta::default() }
    }

    /// How a whole call ends its answer while the worker goes on, and once that has ended, too.
    fn ends(forced: bool) -> [Option<&'static str>; 2] {
        let functions = [("f".to_owned(), std::collections::HashMap::new())].into();
        let parser = ToolParser::Hermes;
        let tools = Tools { parser, functions, parallel: false, forced };
        let format = Format::new(None, Some(tools)).unwrap();
        let mut readers = ChoiceReaders::new(format, 1, MemoryPool::private(1 << 20).share());
        let call = "<tool_call>{\"name\": \"f\", \"arguments\": {}}</tool_call>";
        let mut parts = Vec::new();
        let goes_on = readers.read(&delta(0, call), &mut parts).unwrap();
        let last = Delta { finish: Some(FinishReason::Stop), ..delta(0, "\n") };
        [goes_on, readers.read(&last, &mut parts).unwrap()]
    }

    #[test]
    fn the_grammar_of_a_forced_call_ends_it_and_else_the_first_call_does() {
        assert_eq!(ends(false), [Some("tool_calls"); 2]);
        assert_eq!(ends(true), [None, Some("tool_calls")]);
    }

    #[test]
    fn what_is_held_back_is_charged_and_given_back() {
        let mut readers = readers(1 << 20, 2);
        let mut parts = Vec::new();
        readers.read(&delta(0, "a"), &mut parts).unwrap();
        let idle = readers.memory.used();
        assert!(idle <= HELD_STEP);
        let early = format!("<tool_call>{{\"arguments\": {{\"a\": \"{}", "x".repeat(10_000));
        for choice in [0, 1] {
            let before = readers.memory.used();
            readers.read(&delta(choice, &early), &mut parts).unwrap();
            assert!(
                readers.memory.used() >= before + 19_000,
                "arguments, and the text of the call"
            );
        }
        let end = "\"}, \"name\": \"f\"}</tool_call>b";
        for choice in [0, 1] {
            readers.read(&delta(choice, end), &mut parts).unwrap();
        }
        assert!(readers.memory.used() <= 2 * HELD_STEP, "{}", readers.memory.used());
        let calls = parts.iter().filter(|part| matches!(part, Part::CallBegins { .. }));
        assert_eq!(calls.count(), 2);
    }

    #[test]
    fn without_memory_an_answer_fails() {
        let mut readers = readers(4_000, 1);
        let mut parts = Vec::new();
        let long = format!("<tool_call>{{\"a\": \"{}", "x".repeat(10_000));
        let error = readers.read(&delta(0, &long), &mut parts).unwrap_err();
        assert!(matches!(error, RouteError::AnswerTooLarge { .. }), "{error:?}");
    }
}
