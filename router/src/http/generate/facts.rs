//! What a request needs to know of its model: bounds and defaults of its parameters, and how its answers are told apart.

use crate::config::{ParserConfig, ReasoningParser};
use crate::core::frame::Reasoning;
use crate::http::parse::params::ModelFacts;
use crate::output::{Format, reasoning_texts};
use crate::prompt::{Conventions, PromptEngine};
use crate::request::{Job, Reading};

/// Has a job's text read by `format`, which learns what of it are special tokens of the model.
pub(in crate::http) fn read_by(format: Format, job: &mut Job, engine: &PromptEngine) -> Format {
    let format = format.hiding(|marker| engine.special_token(marker).is_some());
    let special = |marker: &'static str| engine.special_token(marker);
    // also where a marker begins with a special token and goes on as text
    let begins = |marker: &'static str| leading_special(engine, marker);
    let mut markers: Vec<u32> = format.markers().filter_map(begins).collect();
    markers.sort_unstable();
    markers.dedup();
    job.reading = Reading { token_ends: true, one_by_one: format.ends_early(), markers };
    if !job.sampling.ignore_eos {
        job.stop_ids.extend(format.stops().iter().copied().filter_map(special));
    }
    format
}

/// How the answers of a model are told apart: as the flags say, or else as its chat template shows.
pub(in crate::http) fn conventions(found: Conventions, parsers: &ParserConfig) -> Conventions {
    Conventions {
        tools: parsers.tools.or(found.tools),
        reasoning: parsers.reasoning.unwrap_or(found.reasoning),
        ..found
    }
}

/// What the checks of a request need to know of `engine`'s model, whose answers follow the `template` of the request where
/// it brings one.
pub(in crate::http) fn facts(
    engine: &PromptEngine,
    parsers: &ParserConfig,
    template: Option<&str>,
) -> ModelFacts {
    let doc = engine.doc();
    let shown = template.map_or_else(|| engine.conventions(), Conventions::of);
    let conventions = conventions(shown, parsers);
    ModelFacts {
        reasoning: conventions.reasoning.and_then(|parser| reasoning(engine, parser)),
        channels: conventions.reasoning.and_then(|parser| channels(engine, parser)),
        vocab_size: doc.vocab_size,
        temperature: doc.generation.temperature,
        top_p: doc.generation.top_p,
        top_k: doc.generation.top_k,
        repetition_penalty: doc.generation.repetition_penalty,
        conventions,
    }
}

/// The markers of reasoning as tokens, where the model has tokens that write them: special ones by their name, all others by
/// their characters, in whatever tokens the model writes them.
fn reasoning(engine: &PromptEngine, parser: ReasoningParser) -> Option<Reasoning> {
    let (begin, end) = reasoning_texts(parser)?;
    Some(Reasoning {
        begin: tokens_of(engine, begin)?,
        end: tokens_of(engine, end)?,
        ..Reasoning::default()
    })
}

/// The same of answers in channels. The prompt ends where a message begins, and only a message of the channel `final` is the
/// answer.
fn channels(engine: &PromptEngine, parser: ReasoningParser) -> Option<Reasoning> {
    if parser != ReasoningParser::Harmony {
        return None;
    }
    let list = |texts: &[&str]| -> Option<Vec<u32>> {
        let tokens: Option<Vec<_>> = texts.iter().map(|text| tokens_of(engine, text)).collect();
        Some(tokens?.concat())
    };
    let head = list(&["<|end|>", "<|start|>", "assistant"])?;
    Some(Reasoning {
        begin: list(&["<|channel|>", "analysis", "<|message|>"])?,
        begun: u32::try_from(head.len()).ok()?, // if the prompt ends in it
        end: [head, list(&["<|channel|>", "final", "<|message|>"])?].concat(),
        ends_too: list(&["<|channel|>", "commentary"])?,
        max_tokens: None,
    })
}

/// The special token that this text is, or the longest one that it begins with.
fn leading_special(engine: &PromptEngine, text: &str) -> Option<u32> {
    let ends = text.char_indices().map(|(end, _)| end).skip(1).chain([text.len()]);
    ends.filter_map(|end| engine.special_token(&text[..end])).last()
}

/// Tokens that write this text and nothing else: one, or a special one and characters, or characters.
fn tokens_of(engine: &PromptEngine, text: &str) -> Option<Vec<u32>> {
    if let Some(token) = engine.token_id(text) {
        return Some(vec![token]);
    }
    let (first, rest) = match leading_special(engine, text) {
        Some(token) => (Some(token), &text[engine.decode(&[token], false).len()..]),
        None => (None, text),
    };
    let characters = rest.char_indices().map(|(at, c)| {
        let text = &rest[at..at + c.len_utf8()];
        engine.token_id(text).filter(|token| engine.token_bytes(*token) == text.as_bytes())
    });
    let characters: Option<Vec<u32>> = characters.collect();
    Some(first.into_iter().chain(characters?).collect())
}
