//! The request of `/v1/completions`: from the body's fields to one `Job` per prompt.

mod echo;

use std::sync::Arc;

use crate::error::RouteError;
use crate::http::generate::PROMPT;
use crate::http::parse::fields::{Fields, bad};
use crate::http::parse::grammar::Asked;
use crate::http::parse::ids;
use crate::http::parse::missing::{self, Missing};
use crate::http::parse::params::{self, Delivery, MAX_CHOICES, MAX_TOP_LOGPROBS, ModelFacts};
use crate::http::parse::prompts::{bare, prompts};
use crate::http::parse::token_ids::Ids;
use crate::limits::shares::Account;
use crate::limits::shares::Holder;
use crate::prompt::StopStrings;
use crate::request::{Job, Reading};

pub(in crate::http) use echo::echo_text;

/// OpenAI's own default of `max_tokens` here.
const DEFAULT_MAX_TOKENS: u32 = 16;

/// A checked request.
#[derive(Debug)]
pub(super) struct CompletionRequest {
    /// One per prompt, in order.
    pub(super) jobs: Vec<Job>,
    /// For all jobs, which have none yet.
    pub(super) stop: Vec<String>,
    /// What ends an answer is part of it.
    pub(super) stop_included: bool,
    /// Words that are not to be written, still to be tokenised.
    pub(super) bad_words: Vec<String>,
    pub(super) delivery: Delivery,
    /// That of all jobs, still to be checked.
    pub(super) grammar: Option<Asked>,
    /// The answer carries this many alternatives per token, beside the token itself.
    pub(super) logprobs: Option<u32>,
    /// The answer begins with the prompt.
    pub(super) echo: bool,
}

/// Missing from plain completions.
const MISSING: &[Missing] = &[Missing {
    name: "suffix",
    does_nothing: |value| value == "",
    why: "no model that is served here fills in the middle",
}];

/// Checks a body whose `model` was taken; `prompt` was read apart from the other fields.
///
/// # Errors
/// `BadRequest` about the first wrong field.
pub(super) fn check(
    mut fields: Fields,
    prompt: Option<Ids>,
    model: &ModelFacts,
) -> Result<CompletionRequest, RouteError> {
    let mut prompts = prompts(PROMPT, fields.require(PROMPT.name, prompt)?, model.vocab_size)?;
    if fields.boolean("add_special_tokens")? == Some(false) {
        prompts.iter_mut().for_each(bare);
    }
    let mut common = params::take(&mut fields, model)?;
    let choices = prompts.len().saturating_mul(common.n as usize);
    if choices > MAX_CHOICES {
        let message =
            format!("the prompts and `n` make {choices} choices, the limit is {MAX_CHOICES}");
        return Err(bad("n", message));
    }
    if prompts.len() > 1 && common.delivery.stream && common.delivery.annotations.any() {
        let message = "`nvext.annotations` tells of one prompt; send a request for each";
        return Err(bad("nvext.annotations", message));
    }
    best_of(&mut fields, common.n)?;
    let echo = fields.boolean("echo")?.unwrap_or(false);
    if echo && common.truncation.is_some() {
        let message =
            "`echo` gives the whole prompt back, so `truncate_prompt_tokens` cannot cut it";
        return Err(bad("truncate_prompt_tokens", message));
    }
    let logprobs = logprobs(&mut fields)?;
    if echo && logprobs.is_some() && common.prompt_logprobs.is_some() {
        let message = "`logprobs` with `echo` has those of the prompt already; send one of them";
        return Err(bad("prompt_logprobs", message));
    }
    let max_tokens = fields.count("max_tokens", 0)?.unwrap_or(DEFAULT_MAX_TOKENS);
    if max_tokens == 0 && !echo {
        return Err(bad("max_tokens", "`max_tokens` may be 0 only with `echo: true`"));
    }
    if common.sampling.min_tokens > 0 {
        params::min_fits_max(common.sampling.min_tokens, Some(max_tokens))?;
    }
    missing::take_harmless(&mut fields)?;
    missing::refuse(&mut fields, missing::EVERYWHERE)?;
    missing::refuse(&mut fields, MISSING)?;
    fields.finish()?;

    common.sampling.logprobs = logprobs;
    common.sampling.prompt_logprobs = common.prompt_logprobs.or(logprobs.filter(|_| echo));
    let name = ids::name("cmpl-");
    let jobs = prompts.into_iter().enumerate().map(|(i, prompt)| {
        let mut sampling = common.sampling.clone();
        // Each choice of the whole request has a seed of its own: equal prompts need not have equal answers.
        sampling.seed = sampling.seed.wrapping_add(i as u64 * u64::from(common.n));
        Job {
            name: name.clone(),
            prompt,
            sampling,
            stop: StopStrings::default(), // the caller prepares them, once
            stop_ids: common.stop_ids.clone(),
            max_tokens: Some(max_tokens),
            n: common.n,
            skip_special_tokens: common.skip_special_tokens,
            reading: Reading::default(),
            session: common.session.clone(),
            priority: common.priority,
            account: Account::default(), // `Call::apply` knows this and the next three
            holder: Holder::default(),
            key: None,
            request_trace: Arc::default(),
            first_choice: 0,
            salt: common.salt.clone(),
            memory: None, // the caller's
            truncation: common.truncation,
            returns_ids: common.returns_ids,
            scores_prompt: common.prompt_logprobs.is_some(),
            pooling: None,
        }
    });
    let jobs = jobs.collect();
    Ok(CompletionRequest {
        jobs,
        stop: common.stop,
        stop_included: common.stop_included,
        bad_words: common.bad_words,
        delivery: common.delivery,
        grammar: common.grammar,
        logprobs,
        echo,
    })
}

/// Choosing the best of more answers than are sent is not done here; asking for as many as are sent is no choice.
fn best_of(fields: &mut Fields, n: u32) -> Result<(), RouteError> {
    match fields.count("best_of", 0)? {
        Some(best_of) if best_of < n => Err(bad(
            "best_of",
            format!("`best_of` is {best_of}, it must not be less than `n`, {n}"),
        )),
        Some(best_of) if best_of > n => Err(crate::http::parse::fields::unsupported(
            "best_of",
            "all answers that are made are sent; use `n`",
        )),
        Some(_) | None => Ok(()),
    }
}

/// A count here, unlike in chat. 20 rather than OpenAI's 5, as the engine has them anyway.
fn logprobs(fields: &mut Fields) -> Result<Option<u32>, RouteError> {
    let top = fields.integer("logprobs", 0..=MAX_TOP_LOGPROBS)?;
    Ok(top.map(|top| u32::try_from(top).expect("range was checked")))
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::http::generate::PROMPT;
    use crate::http::parse::json;
    use crate::limits::memory::MemoryPool;

    fn checked(body: &Value) -> Result<CompletionRequest, RouteError> {
        let model = ModelFacts { vocab_size: 100, ..ModelFacts::default() };
        let mut memory = MemoryPool::private(1 << 20).share();
        let document = json::parse(body.to_string().as_bytes(), Some(PROMPT), &mut memory)?;
        check(Fields::of_body(document.value)?, document.ids, &model)
    }

    fn param(body: &Value) -> String {
        match checked(body) {
            Err(RouteError::BadRequest { param: Some(param), .. }) => param,
            other => panic!("{body}: {other:?}"),
        }
    }

    #[test]
    fn every_form_of_prompt_is_read() {
        for (prompt, count) in [
            (json!("a"), 1),
            (json!(""), 1),
            (json!(["a", "b"]), 2),
            (json!([1, 2, 99]), 1),
            (json!([[1], [2, 3]]), 2),
        ] {
            assert_eq!(checked(&json!({ "prompt": prompt })).unwrap().jobs.len(), count);
        }
    }

    #[test]
    fn each_wrong_field_is_named() {
        for (body, want) in [
            (json!({}), "prompt"),
            (json!({"prompt": null}), "prompt"),
            (json!({"prompt": 7}), "prompt"),
            (json!({"prompt": []}), "prompt"),
            (json!({"prompt": [null]}), "prompt[0]"),
            (json!({"prompt": ["a", 1]}), "prompt[1]"),
            (json!({"prompt": [1, "a"]}), "prompt[1]"),
            (json!({"prompt": [1, 100]}), "prompt[1]"),
            (json!({"prompt": [1, -1]}), "prompt[1]"),
            (json!({"prompt": [[1], [2, 1.5]]}), "prompt[1][1]"),
            (json!({"prompt": [[1], []]}), "prompt[1]"),
            (json!({"prompt": vec!["a"; 2000]}), "prompt"),
            (json!({"prompt": vec!["a"; 100], "n": 100}), "n"),
            (json!({"prompt": "a", "max_tokens": 0}), "max_tokens"),
            (json!({"prompt": "a", "logprobs": 21}), "logprobs"),
            (json!({"prompt": "a", "logprobs": true}), "logprobs"),
            (json!({"prompt": "a", "suffix": "b"}), "suffix"),
            (json!({"prompt": "a", "best_of": 2}), "best_of"),
            (json!({"prompt": "a", "best_of": 1, "n": 2}), "best_of"),
            (json!({"prompt": "a", "messages": []}), "messages"),
            (
                json!({"prompt": ["a", "b"], "stream": true, "nvext": {"annotations": ["token_ids"]}}),
                "nvext.annotations",
            ),
        ] {
            assert_eq!(param(&body), want);
        }
    }

    #[test]
    fn echo_asks_for_the_log_probabilities_of_the_prompt() {
        let body = json!({"prompt": "a", "echo": true, "logprobs": 2, "max_tokens": 0});
        let request = checked(&body).unwrap();
        assert_eq!(request.jobs[0].sampling.prompt_logprobs, Some(2));
        assert_eq!(request.jobs[0].max_tokens, Some(0));
    }

    #[test]
    fn no_two_choices_share_a_seed() {
        let request = checked(&json!({"prompt": ["a", "a"], "n": 3, "seed": -1})).unwrap();
        let seeds: Vec<u64> = request.jobs.iter().map(|job| job.sampling.seed).collect();
        assert_eq!(seeds, [u64::MAX, 2]);
    }
}
