//! The one choice of an answer as parts, and as blocks where it is whole.

use crate::error::RouteError;
use crate::fleet::ServedModel;
use crate::http::chat::ChatRequest;
use crate::http::reply::answers::Answers;
use crate::http::reply::blocks::{BlockOrder, KeptBlocks};
use crate::http::reply::nothing;
use crate::http::reply::readers::{ChoiceReaders, TokenNote};
use crate::limits::memory::{MemoryShare, Refused};
use crate::output::Part;
use crate::request::{Delta, FinishReason, ScoredToken, Usage};

/// Reads the text of one choice; without readers all of it is content.
#[derive(Debug)]
pub(in crate::http) struct PartReader {
    readers: Option<ChoiceReaders>,
    shows_reasoning: bool,
    ends_early: bool,
    scored: ScoredContent,
}

/// Tokens of content with their log-probabilities.
#[derive(Debug, Default)]
struct ScoredContent {
    /// Their text may still become the marker of something else.
    held: Vec<ScoredToken>,
    certain: Vec<ScoredToken>,
}

impl ScoredContent {
    fn note(&mut self, token: Option<&ScoredToken>, TokenNote { aside, said, .. }: TokenNote) {
        self.held.extend(token.filter(|_| !aside).cloned());
        if said {
            self.certain.append(&mut self.held);
        } else if aside {
            self.held.clear(); // they were the marker
        }
    }
}

/// How an answer ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::http) struct AnswerEnd {
    pub(in crate::http) finish: FinishReason,
    /// With calls of tools.
    pub(in crate::http) called: bool,
}

impl PartReader {
    /// As a request wants its answer to be read; `memory` is for what is held back.
    pub(in crate::http) fn of(request: &mut ChatRequest, memory: MemoryShare) -> Self {
        let readers = request.format.take().map(|format| ChoiceReaders::new(format, 1, memory));
        let (shows_reasoning, scored) = (request.shows_reasoning, ScoredContent::default());
        Self { readers, shows_reasoning, ends_early: false, scored }
    }

    /// All text is content.
    #[cfg(test)]
    pub(in crate::http) fn plain() -> Self {
        let scored = ScoredContent::default();
        Self { readers: None, shows_reasoning: true, ends_early: false, scored }
    }

    /// Before the first delta: the prompt may have opened the reasoning.
    pub(in crate::http) fn after_prompt(&mut self, answers: &Answers, model: &ServedModel) {
        if let Some(readers) = &mut self.readers {
            let decode = |ids: &[u32]| model.engine.decode(ids, false);
            readers.after_prompt(answers.prompt_ids(), decode);
        }
    }

    /// The parts that are certain with this delta, all of them with the last one, and how the answer ended if it did.
    ///
    /// # Errors
    /// There is no memory for what is held back.
    pub(in crate::http) fn read(
        &mut self,
        delta: &Delta,
    ) -> Result<(Vec<Part>, Option<AnswerEnd>), RouteError> {
        let mut parts = Vec::new();
        let reason = match &mut self.readers {
            None => {
                if !delta.text.is_empty() {
                    parts.push(Part::Content(delta.text.clone()));
                }
                self.scored.certain.extend_from_slice(&delta.tokens);
                delta.finish.map(FinishReason::as_str)
            }
            Some(readers) if delta.tokens.is_empty() && self.scored.held.is_empty() => {
                readers.read(delta, &mut parts)?
            }
            Some(readers) => {
                let (scored, mut tokens) = (&mut self.scored, delta.tokens.iter());
                readers.read_noting(delta, &mut parts, |note| {
                    scored.note(note.token.then(|| tokens.next()).flatten(), note);
                })?
            }
        };
        if !self.shows_reasoning {
            parts.retain(|part| !matches!(part, Part::Reasoning(_)));
        }
        self.ends_early = reason.is_some() && delta.finish.is_none();
        let end = reason.map(|reason| AnswerEnd {
            finish: if reason == "length" { FinishReason::Length } else { FinishReason::Stop },
            called: reason == "tool_calls",
        });
        Ok((parts, end))
    }

    /// Tokens of the content that became certain since the last call, where log-probabilities were asked for.
    pub(in crate::http) fn take_scored(&mut self) -> Vec<ScoredToken> {
        std::mem::take(&mut self.scored.certain)
    }

    /// The last delta said all of the answer, whose worker goes on.
    pub(in crate::http) fn ends_early(&self) -> bool {
        self.ends_early
    }

    /// The usage with the tokens of reasoning, where they are known.
    pub(in crate::http) fn with_reasoning(&self, usage: Usage) -> Usage {
        let reasoning_tokens = self.readers.as_ref().map_or(0, ChoiceReaders::reasoning_tokens);
        Usage { reasoning_tokens, ..usage }
    }
}

/// A whole answer.
#[derive(Debug)]
pub(in crate::http) struct GatheredBlocks {
    pub(in crate::http) kept: KeptBlocks,
    /// The delta that ended it, without its text.
    pub(in crate::http) last: Delta,
    pub(in crate::http) end: AnswerEnd,
}

/// Waits for a whole answer of one choice, which `memory` is charged for.
///
/// # Errors
/// Why there is no answer.
pub(in crate::http) async fn gather_blocks(
    answers: &mut Answers,
    reader: &mut PartReader,
    memory: MemoryShare,
) -> Result<GatheredBlocks, RouteError> {
    let (mut order, mut kept, mut end) = (BlockOrder::default(), KeptBlocks::new(memory), None);
    while let Some(delta) = answers.next().await {
        let mut delta = delta?;
        let (parts, ended) = reader.read(&delta)?;
        kept.score(reader.take_scored());
        let mut keep = |step| kept.keep(&step).map_err(Refused::answer);
        for part in parts {
            order.take(part, &mut keep)?;
        }
        if reader.ends_early() {
            answers.end(delta.choice);
        }
        if let Some(ended) = ended {
            delta.text = String::new();
            end = Some((delta, ended));
        }
    }
    let (last, end) = end.ok_or_else(nothing)?;
    Ok(GatheredBlocks { kept, last, end })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limits::memory::MemoryPool;
    use crate::output::Format;
    use crate::prompt::ReasoningParser;

    /// One token a piece, numbered, and the ids of those that are told with content after each.
    fn told(pieces: &[&str]) -> Vec<Vec<u32>> {
        let format = Format::new(Some(ReasoningParser::Think), None).unwrap();
        let memory = MemoryPool::private(1 << 20).share();
        let readers = Some(ChoiceReaders::new(format, 1, memory));
        let mut reader = PartReader { readers, ..PartReader::plain() };
        let last = pieces.len() - 1;
        let told = pieces.iter().enumerate().map(|(id, text)| {
            let token = ScoredToken { id: id as u32, logprob: Some(-1.0), top: Vec::new() };
            let finish = (id == last).then_some(FinishReason::Stop);
            let (text, token_ends) = ((*text).to_owned(), vec![text.len()]);
            let tokens = vec![token];
            reader.read(&Delta { text, token_ends, tokens, finish, ..Delta::default() }).unwrap();
            reader.take_scored().into_iter().map(|token| token.id).collect()
        });
        told.collect()
    }

    #[test]
    fn tokens_of_reasoning_are_not_those_of_content() {
        let got = told(&["<think>", "a", "b", "</think>", "c", "d"]);
        assert_eq!(got, [vec![], vec![], vec![], vec![], vec![4], vec![5]]);
    }

    #[test]
    fn tokens_of_what_may_become_a_marker_wait_for_it() {
        let got = told(&["<th", "ing", ">"]);
        assert_eq!(got.concat(), [0, 1, 2]);
        assert!(got[0].is_empty());
        assert_eq!(told(&["<th", "ink>", "a", "</think>", "b"]).concat(), [4]);
    }

    #[test]
    fn tokens_that_come_at_once_are_told_apart() {
        let format = Format::new(Some(ReasoningParser::Think), None).unwrap();
        let readers = Some(ChoiceReaders::new(format, 1, MemoryPool::private(1 << 20).share()));
        let mut reader = PartReader { readers, ..PartReader::plain() };
        let (mut text, mut token_ends, mut tokens) = (String::new(), Vec::new(), Vec::new());
        for (id, piece) in ["<think>", "a", "</think>", "b", "c", "d"].into_iter().enumerate() {
            text.push_str(piece);
            token_ends.push(text.len());
            tokens.push(ScoredToken { id: id as u32, logprob: Some(-1.0), top: Vec::new() });
        }
        reader.read(&Delta { text, token_ends, tokens, ..Delta::default() }).unwrap();
        let told: Vec<u32> = reader.take_scored().into_iter().map(|token| token.id).collect();
        assert_eq!(told, [3, 4, 5]);
    }
}
