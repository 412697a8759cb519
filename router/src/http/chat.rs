//! The request of `/v1/chat/completions`: from the body's fields to a `Job`.

mod held;
mod hermes;
mod lacking;
mod reasoning;
mod tools;

use std::sync::Arc;

use serde_json::{Map, Value};

use crate::error::RouteError;
use crate::http::parse::fields::{Fields, bad};
use crate::http::parse::grammar::Asked;
use crate::http::parse::missing;
use crate::http::parse::params::{self, Delivery, MAX_TOP_LOGPROBS, ModelFacts};
use crate::http::parse::{ids, messages, template_fields};
use crate::limits::memory::MemoryShare;
use crate::limits::shares::Account;
use crate::limits::shares::Holder;
use crate::output::Format;
use crate::prompt::StopStrings;
use crate::prompt::{ChatPrompt, Conventions, Prompt};
use crate::request::{Job, Reading};
use held::HeldCalls;
use reasoning::AfterReasoning;
use tools::ToolChoice;

/// A checked request.
#[derive(Debug)]
pub(super) struct ChatRequest {
    pub(super) job: Job,
    /// For the job, which has none yet.
    pub(super) stop: Vec<String>,
    /// What ends the answer is part of it.
    pub(super) stop_included: bool,
    /// Words that are not to be written, still to be tokenised.
    pub(super) bad_words: Vec<String>,
    pub(super) delivery: Delivery,
    /// What the answers are read by; `None` for plain text.
    pub(super) format: Option<Format>,
    pub(super) shows_reasoning: bool,
    /// Calls that are held to a grammar, which then goes before `grammar`.
    pub(super) held: Option<HeldCalls>,
    /// That of the job, still to be checked.
    pub(super) grammar: Option<Asked>,
    /// The answer carries log-probabilities.
    pub(super) logprobs: bool,
}

/// Checks a body whose `model` was taken.
///
/// # Errors
/// `BadRequest` about the first wrong field.
pub(super) fn check(
    mut fields: Fields,
    model: &ModelFacts,
    memory: &mut MemoryShare,
) -> Result<ChatRequest, RouteError> {
    let mut prompt = prompt(&mut fields, memory)?;
    let shows_reasoning =
        reasoning::take(&mut fields, &model.conventions, &mut prompt.template_kwargs)?;
    let wish = tools::take_wish(&mut fields, prompt.tools.as_deref())?;
    let calls = match &prompt.tools {
        Some(offered) => tools::reading(&wish, offered, model, memory)?,
        None => None,
    };
    let common = params::take(&mut fields, model)?;
    let most_reasoning = reasoning::take_budget(&mut fields, model)?; // which `nvext` may have named
    let offered = prompt.tools.as_deref().unwrap_or_default();
    let answer = common.grammar.as_ref();
    let held = held::held(&wish, calls.as_ref(), offered, answer, model, memory)?;
    if calls.is_none() && !model.conventions.knows_tools {
        prompt.tools = None; // they are told only where they may be called
    }
    tell_tools(&mut prompt, &model.conventions, memory)?;
    let logprobs = logprobs(&mut fields)?;
    let max_tokens = max_tokens(&mut fields)?;
    params::min_fits_max(common.sampling.min_tokens, max_tokens)?;
    missing::take_harmless(&mut fields)?;
    missing::refuse(&mut fields, missing::EVERYWHERE)?;
    missing::refuse(&mut fields, lacking::LACKING)?;
    fields.finish()?;

    let must = held.is_some() && wish.choice == ToolChoice::Must;
    let mut sampling = common.sampling;
    sampling.logprobs = logprobs;
    sampling.prompt_logprobs = common.prompt_logprobs;
    let behind = match (&held, &common.grammar) {
        (Some(_), _) => AfterReasoning::Calls,
        (None, Some(_)) => AfterReasoning::Grammar,
        (None, None) => AfterReasoning::Free,
    };
    sampling.reasoning = reasoning::before(model, most_reasoning, behind)?;
    let job = Job {
        name: ids::name("chatcmpl-"),
        prompt: Prompt::Chat(Box::new(prompt)),
        sampling,
        stop: StopStrings::default(), // the caller prepares them
        stop_ids: common.stop_ids,
        max_tokens,
        n: common.n,
        skip_special_tokens: common.skip_special_tokens,
        reading: Reading::default(), // the caller knows the tokens
        session: common.session,
        priority: common.priority,
        account: Account::default(), // `Call::apply` knows this and the next three
        holder: Holder::default(),
        key: None,
        request_trace: Arc::default(),
        first_choice: 0,
        salt: common.salt,
        memory: None, // the caller's
        truncation: common.truncation,
        returns_ids: common.returns_ids,
        scores_prompt: common.prompt_logprobs.is_some(),
        pooling: None,
    };
    Ok(ChatRequest {
        job,
        stop: common.stop,
        stop_included: common.stop_included,
        bad_words: common.bad_words,
        delivery: common.delivery,
        format: Format::new(
            // A grammar begins behind the reasoning, if tokens end that; else that of calls may know of it.
            model.conventions.reasoning.filter(|_| {
                let ends = model.reasoning.is_some() || model.channels.is_some();
                let behind = common.grammar.is_none() || ends;
                held.as_ref().map_or(behind, HeldCalls::knows_reasoning)
            }),
            calls,
        )
        .map(|format| format.ended_by_grammar(must)),
        shows_reasoning,
        held,
        grammar: common.grammar,
        logprobs: logprobs.is_some(),
    })
}

/// What a chat becomes on its way to tokens, in multiples of its values: those of the template, which are no larger, and
/// the text. They are charged at once, so that no chat gets half of the way.
pub(super) const COPIES: usize = 2;

/// Takes what the chat template gets to see. `memory` holds the charge for the body's values.
///
/// # Errors
/// `BadRequest` about the first wrong field; `BodyTooComplex` or `Overloaded` if there is no memory for what the template
/// makes of it.
pub(super) fn prompt(
    fields: &mut Fields,
    memory: &mut MemoryShare,
) -> Result<ChatPrompt, RouteError> {
    let messages = fields.array("messages")?;
    let messages = fields.require("messages", messages)?;
    let copies = memory.used().saturating_mul(COPIES);
    memory.charge(copies).map_err(|refused| refused.body(Some("messages".to_owned())))?;
    let messages = messages::check(messages, memory)?;
    let go_on = fields.boolean("continue_final_message")?.unwrap_or(false);
    let generate = fields.boolean("add_generation_prompt")?;
    if go_on && generate == Some(true) {
        let message = "`continue_final_message` and `add_generation_prompt` exclude each other";
        return Err(bad("continue_final_message", message));
    }
    if go_on && messages.last().is_some_and(|last| last["role"] != "assistant") {
        let message = "`continue_final_message` needs a last message with the role assistant";
        return Err(bad("continue_final_message", message));
    }
    let mut chat = ChatPrompt {
        messages,
        tools: tools::take(fields)?,
        add_generation_prompt: generate.unwrap_or(!go_on),
        continue_final_message: go_on,
        template_kwargs: template_kwargs(fields)?,
        ..ChatPrompt::default()
    };
    template_fields::take(fields, &mut chat)?;
    Ok(chat)
}

/// Tools, calls and results as text, where the template would not show them.
///
/// # Errors
/// `BodyTooComplex` or `Overloaded` if there is no memory for it.
pub(super) fn tell_tools(
    prompt: &mut ChatPrompt,
    model: &Conventions,
    memory: &mut MemoryShare,
) -> Result<(), RouteError> {
    if model.knows_tools {
        return Ok(());
    }
    hermes::retell(&mut prompt.messages, memory)?;
    match prompt.tools.take() {
        Some(offered) => hermes::show(&mut prompt.messages, &offered, memory),
        None => Ok(()),
    }
}

fn template_kwargs(fields: &mut Fields) -> Result<Map<String, Value>, RouteError> {
    let Some(kwargs) = fields.object("chat_template_kwargs")? else { return Ok(Map::new()) };
    let kwargs = kwargs.into_rest();
    let ours = ["messages", "tools", "add_generation_prompt", "continue_final_message"];
    match ours.into_iter().find(|name| kwargs.contains_key(*name)) {
        None => Ok(kwargs),
        Some(name) => {
            let param = format!("chat_template_kwargs.{name}");
            let message =
                format!("`{param}` cannot be set here; `{name}` is a parameter of its own");
            Err(bad(param, message))
        }
    }
}

fn logprobs(fields: &mut Fields) -> Result<Option<u32>, RouteError> {
    let wanted = fields.boolean("logprobs")?.unwrap_or(false);
    let top = fields.integer("top_logprobs", 0..=MAX_TOP_LOGPROBS)?;
    match (wanted, top) {
        (true, top) => Ok(Some(u32::try_from(top.unwrap_or(0)).expect("range was checked"))),
        (false, None | Some(0)) => Ok(None),
        (false, Some(_)) => Err(bad("top_logprobs", "`top_logprobs` needs `logprobs: true`")),
    }
}

/// `max_completion_tokens`, or its older name `max_tokens`.
fn max_tokens(fields: &mut Fields) -> Result<Option<u32>, RouteError> {
    let new = fields.count("max_completion_tokens", 1)?;
    let old = fields.count("max_tokens", 1)?;
    match (new, old) {
        (Some(new), Some(old)) if new != old => {
            let message = format!(
                "`max_tokens` is {old} and `max_completion_tokens` is {new}; they mean the same, send one"
            );
            Err(bad("max_tokens", message))
        }
        (new, old) => Ok(new.or(old)),
    }
}

#[cfg(test)]
mod tests;
