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
    let mut markers: Vec<u32> = format.markers().filter_map(special).collect();
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
        vocab_size: doc.vocab_size,
        temperature: doc.generation.temperature,
        top_p: doc.generation.top_p,
        top_k: doc.generation.top_k,
        repetition_penalty: doc.generation.repetition_penalty,
        conventions,
    }
}

/// The tokens around reasoning, where one token is each: of several it would not be certain that a model writes these.
fn reasoning(engine: &PromptEngine, parser: ReasoningParser) -> Option<Reasoning> {
    let (begin, end) = reasoning_texts(parser)?;
    let [begin, end] = [engine.token_id(begin)?, engine.token_id(end)?];
    Some(Reasoning { begin: vec![begin], end: vec![end], max_tokens: None })
}
