//! Answers that were written beforehand: which one a request gets, and in which portions its tokens come.
//!
//! With them whatever reads answers (tool calls, thoughts, stop strings) is tested over HTTP against texts that no small
//! model would write, cut wherever steps can cut them. `file` reads them.

mod file;
#[cfg(test)]
mod tests;

use std::collections::HashSet;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use headrace_router::core::frame::Finish;
use headrace_router::prompt::{ModelDoc, PromptEngine, TokenizePool};
use serde_json::Value;

use self::file::Texts;
use super::Model;

/// Where the ends of an answer's steps are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Portions {
    /// Each step gives so many tokens.
    Of(u32),
    /// One step gives all.
    All,
    /// Two steps; the request's seed says how many tokens the first one gives.
    EveryCut,
}

/// What one request is answered with.
#[derive(Debug, Clone)]
pub(crate) struct ScriptedAnswer {
    /// Its tokens; where it stops, the model's end token is the last one.
    pub(crate) ids: Arc<[u32]>,
    /// Why it ends after all of them.
    pub(crate) finish: Finish,
    portions: Portions,
    /// Steps before the first token.
    delay_steps: u32,
}

impl ScriptedAnswer {
    /// Tokens of a step. `given` tokens came before, and `waited` steps of this worker gave none.
    pub(crate) fn portion(&self, seed: u64, given: u32, waited: u32) -> u32 {
        let all = self.len();
        let left = all.saturating_sub(given);
        if given == 0 && waited < self.delay_steps {
            return 0;
        }
        match self.portions {
            Portions::Of(tokens) => tokens.min(left),
            Portions::All => left,
            Portions::EveryCut => {
                let cuts = u64::from(all.saturating_sub(1)).max(1);
                let cut = u32::try_from(1 + seed % cuts).expect("below the length");
                if given < cut { (cut - given).min(left) } else { left }
            }
        }
    }

    /// The tokens from `first` on, `count` of them.
    pub(crate) fn tokens(&self, first: u32, count: u32) -> Vec<u32> {
        self.ids.iter().skip(first as usize).take(count as usize).copied().collect()
    }

    pub(crate) fn len(&self) -> u32 {
        u32::try_from(self.ids.len()).expect("`file` bounds it")
    }

    /// Ends it after the first token that is one of `stop_ids`.
    fn until(mut self, stop_ids: &[u32]) -> Self {
        if let Some(at) = self.ids.iter().position(|id| stop_ids.contains(id)) {
            self.ids = self.ids[..=at].into();
            self.finish = Finish::Stop;
        }
        self
    }
}

/// An answer of the file.
#[derive(Debug, Clone)]
struct Entry {
    /// It is for prompts that contain this text; the others take turns.
    when: Option<String>,
    answer: ScriptedAnswer,
}

/// All answers, and what reads prompts. Workers of a fleet share it, and so its turns.
#[derive(Debug)]
pub(crate) struct Script {
    entries: Vec<Entry>,
    engine: PromptEngine,
    /// Answers without a condition that were given so far.
    turns: AtomicUsize,
}

impl Script {
    /// Reads a file and makes tokens of its texts by the tokenizer of `model`.
    ///
    /// # Errors
    /// It cannot be read, or says which line and field is wrong.
    pub(crate) async fn read(path: &Path, model: &Model) -> anyhow::Result<Self> {
        let doc = ModelDoc::parse(&model.document)?;
        let added = added_tokens(&doc.tokenizer);
        let engine = PromptEngine::new(doc, Arc::new(TokenizePool::new(1, 4)?))?;
        let entries = file::read(path, &Texts { engine: &engine, added }).await?;
        Ok(Self { entries, engine, turns: AtomicUsize::new(0) })
    }

    pub(crate) fn answers(&self) -> usize {
        self.entries.len()
    }

    /// The answer to a prompt, of which other workers gave `generated` already. Where several fit, a prompt gets the first one
    /// with a condition that it meets, and otherwise the next one in turn.
    ///
    /// # Errors
    /// In words, what the script lacks.
    pub(crate) fn answer(
        &self,
        prompt: &[u32],
        generated: &[u32],
        stop_ids: &[u32],
    ) -> Result<ScriptedAnswer, String> {
        let conditional = self.entries.iter().any(|entry| entry.when.is_some());
        let text = if conditional { self.engine.decode(prompt, false) } else { String::new() };
        let meets = |when: &String| text.contains(when.as_str());
        let goes_on = |entry: &&Entry| entry.answer.ids.starts_with(generated);
        let met = self.entries.iter().filter(|entry| entry.when.as_ref().is_some_and(meets));
        if let Some(entry) = met.clone().find(goes_on) {
            return Ok(entry.answer.clone().until(stop_ids));
        }
        let others: Vec<&Entry> =
            self.entries.iter().filter(|entry| entry.when.is_none()).collect();
        let turn = if !generated.is_empty() {
            // it took its turn at another worker
            others.iter().position(goes_on)
        } else if others.is_empty() {
            None
        } else {
            Some(self.turns.fetch_add(1, Ordering::Relaxed) % others.len())
        };
        match turn {
            Some(at) => Ok(others[at].answer.clone().until(stop_ids)),
            None if generated.is_empty() => {
                Err("no answer of the script is for this prompt; add one without `when`".to_owned())
            }
            None => Err(format!(
                "no answer of the script begins with the {} tokens that came so far",
                generated.len()
            )),
        }
    }
}

/// Ids of the tokens that a `tokenizer.json` has beside its vocabulary.
fn added_tokens(tokenizer: &str) -> HashSet<u32> {
    let tokenizer: Value = serde_json::from_str(tokenizer).unwrap_or_default();
    let added = tokenizer["added_tokens"].as_array().into_iter().flatten();
    added.filter_map(|token| u32::try_from(token["id"].as_u64()?).ok()).collect()
}
