//! Parameters that chat and plain completions share: how tokens are chosen, where the answer ends, how it is sent.
//!
//! Beside OpenAI's own these are the extras that vLLM's users rely on, under vLLM's names and with vLLM's meaning.

use serde_json::Value;

use crate::core::frame::{Ranked, Reasoning, Sampling, TokenLimits};
use crate::error::RouteError;
use crate::http::parse::fields::{Fields, bad, integer, number, wrong_type};
use crate::http::parse::grammar::{self, Asked};
use crate::http::parse::ids;
use crate::http::parse::nvext::{self, Annotations};
use crate::prompt::Conventions;
use crate::request::Truncation;

/// Choices of one request, over all its prompts.
pub(in crate::http) const MAX_CHOICES: usize = 1024;
/// OpenAI's own bound of `n`.
const MAX_N: i64 = 128;
/// Most stop strings, and the longest one in bytes. Every token of an answer is compared with all of them.
const MAX_STOPS: usize = 16;
const MAX_STOP_BYTES: usize = 1024;
/// It comes back in errors.
const MAX_MODEL_BYTES: usize = 256;
const MAX_STOP_IDS: usize = 128;
const MAX_BIASES: usize = 1024;
/// A guess. Each is written into a row of logits at each token.
const MAX_ALLOWED: usize = 1024;
const MAX_BAD_WORDS: usize = 128;
const MAX_BAD_WORD_BYTES: usize = 256;
/// Most alternatives per token.
pub(in crate::http) const MAX_TOP_LOGPROBS: i64 = 20;
const MAX_TOP_K: i64 = i32::MAX as i64;

/// What the checks need to know of the model that was asked for.
#[derive(Debug, Clone, Default)]
pub(in crate::http) struct ModelFacts {
    /// The tokens around its reasoning, where a text ends it.
    pub(in crate::http) reasoning: Option<Reasoning>,
    /// The same where its answers have channels, which a grammar of calls has to know of.
    pub(in crate::http) channels: Option<Reasoning>,
    /// Token ids are below it.
    pub(in crate::http) vocab_size: u32,
    /// The checkpoint's own.
    pub(in crate::http) temperature: Option<f64>,
    pub(in crate::http) top_p: Option<f64>,
    pub(in crate::http) top_k: Option<u32>,
    pub(in crate::http) repetition_penalty: Option<f64>,
    /// How it marks the parts of its answers.
    pub(in crate::http) conventions: Conventions,
}

/// The shared parameters, checked.
#[derive(Debug)]
pub(in crate::http) struct SharedParams {
    pub(in crate::http) sampling: Sampling,
    /// That of `sampling`, still to be checked.
    pub(in crate::http) grammar: Option<Asked>,
    pub(in crate::http) stop: Vec<String>,
    pub(in crate::http) stop_ids: Vec<u32>,
    pub(in crate::http) n: u32,
    pub(in crate::http) skip_special_tokens: bool,
    pub(in crate::http) priority: i8,
    pub(in crate::http) salt: Vec<u8>,
    /// `prompt_cache_key`, or else `user`; the headers come before both.
    pub(in crate::http) session: Option<String>,
    pub(in crate::http) delivery: Delivery,
    /// What ends the answer is part of it.
    pub(in crate::http) stop_included: bool,
    pub(in crate::http) truncation: Option<Truncation>,
    pub(in crate::http) returns_ids: bool,
    /// Words that the answer must not have, still to be tokenised.
    pub(in crate::http) bad_words: Vec<String>,
    /// Log-probabilities of the prompt, apart from those of the answer, with so many alternatives.
    pub(in crate::http) prompt_logprobs: Option<u32>,
}

/// How the answer is sent.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(in crate::http) struct Delivery {
    /// As server-sent events.
    pub(in crate::http) stream: bool,
    /// With a last event that holds the usage.
    pub(in crate::http) include_usage: bool,
    /// With the usage so far in every event (vLLM's `continuous_usage_stats`).
    pub(in crate::http) running_usage: bool,
    /// What its events tell beside the answer.
    pub(in crate::http) annotations: Annotations,
}

/// Takes the shared parameters out of `fields`.
///
/// # Errors
/// `BadRequest` about the first wrong one.
pub(in crate::http) fn take(
    fields: &mut Fields,
    model: &ModelFacts,
) -> Result<SharedParams, RouteError> {
    let annotations = nvext::take(fields)?;
    let n = fields.integer("n", 1..=MAX_N)?.unwrap_or(1);
    let cache_key = fields.string("prompt_cache_key")?;
    let user = fields.string("user")?;
    let grammar = grammar::take(fields)?;
    let prompt_logprobs = fields.integer("prompt_logprobs", 0..=MAX_TOP_LOGPROBS)?;
    let mut sampling = sampling(fields, model, grammar.as_ref())?;
    let allowed = allowed(fields, model)?;
    sampling.limits =
        (!allowed.is_empty()).then(|| TokenLimits { allowed, ..TokenLimits::default() });
    let delivery = Delivery { annotations, ..delivery(fields)? };
    if delivery.stream && prompt_logprobs.is_some() {
        let message = "`prompt_logprobs` is not sent in streams; set `stream` to false";
        return Err(bad("prompt_logprobs", message));
    }
    Ok(SharedParams {
        bad_words: bad_words(fields)?,
        prompt_logprobs: prompt_logprobs.map(|k| u32::try_from(k).expect("range was checked")),
        sampling,
        grammar,
        stop: stop(fields)?,
        stop_ids: stop_ids(fields, model)?,
        n: u32::try_from(n).expect("range was checked"),
        skip_special_tokens: fields.boolean("skip_special_tokens")?.unwrap_or(true),
        priority: priority(fields)?,
        salt: salt(fields)?,
        session: cache_key.or(user),
        delivery,
        stop_included: fields.boolean("include_stop_str_in_output")?.unwrap_or(false),
        truncation: truncation(fields)?,
        returns_ids: fields.boolean("return_token_ids")?.unwrap_or(false),
    })
}

/// The only tokens that may be chosen; none where all may.
fn allowed(fields: &mut Fields, model: &ModelFacts) -> Result<Vec<u32>, RouteError> {
    let Some(ids) = fields.array("allowed_token_ids")? else { return Ok(Vec::new()) };
    if ids.is_empty() {
        let message =
            "`allowed_token_ids` is empty, so nothing could be said; leave it out to allow all";
        return Err(bad("allowed_token_ids", message.to_owned()));
    }
    if ids.len() > MAX_ALLOWED {
        let message =
            format!("`allowed_token_ids` holds {} ids, the limit is {MAX_ALLOWED}", ids.len());
        return Err(bad("allowed_token_ids", message));
    }
    let mut ids = token_ids(&ids, "allowed_token_ids", model.vocab_size)?;
    ids.sort_unstable();
    ids.dedup();
    Ok(ids)
}

fn bad_words(fields: &mut Fields) -> Result<Vec<String>, RouteError> {
    let words = fields.array("bad_words")?.unwrap_or_default();
    if words.len() > MAX_BAD_WORDS {
        let message =
            format!("`bad_words` holds {} words, the limit is {MAX_BAD_WORDS}", words.len());
        return Err(bad("bad_words", message));
    }
    let words = words.into_iter().enumerate().map(|(i, word)| {
        let at = format!("bad_words[{i}]");
        let Value::String(word) = word else { return Err(wrong_type(at, "a string", &word)) };
        if word.trim_start().is_empty() {
            let message = format!("`{at}` holds no text");
            return Err(bad(at, message));
        }
        if word.len() > MAX_BAD_WORD_BYTES {
            let len = word.len();
            let message = format!("`{at}` has {len} bytes, the limit is {MAX_BAD_WORD_BYTES}");
            return Err(bad(at, message));
        }
        Ok(word)
    });
    words.collect()
}

/// vLLM's: the last so many tokens of the prompt, or with -1 what the context leaves beside the answer.
///
/// # Errors
/// `BadRequest` about it.
pub(in crate::http) fn truncation(fields: &mut Fields) -> Result<Option<Truncation>, RouteError> {
    match fields.integer("truncate_prompt_tokens", -1..=i64::from(u32::MAX))? {
        None => Ok(None),
        Some(-1) => Ok(Some(Truncation::ToContext)),
        Some(0) => Err(bad(
            "truncate_prompt_tokens",
            "`truncate_prompt_tokens` must be at least 1, or -1 for what fits the context",
        )),
        Some(tokens) => Ok(Some(Truncation::To(u32::try_from(tokens).expect("range was checked")))),
    }
}

/// An explicit value wins over the checkpoint's, which wins over OpenAI's default.
fn sampling(
    fields: &mut Fields,
    model: &ModelFacts,
    grammar: Option<&Asked>,
) -> Result<Sampling, RouteError> {
    let temperature = fields.number("temperature", 0.0..=2.0)?.or(model.temperature);
    let top_p = fields.number("top_p", 0.0..=1.0)?;
    if top_p == Some(0.0) {
        return Err(bad(
            "top_p",
            "`top_p` must be more than 0; for the best token alone set `temperature` to 0",
        ));
    }
    let repetition_penalty = fields.number("repetition_penalty", 0.0..=10.0)?;
    if repetition_penalty == Some(0.0) {
        return Err(bad(
            "repetition_penalty",
            "`repetition_penalty` must be more than 0; 1 switches it off",
        ));
    }
    // -1 switches it off for vLLM, 0 for everybody else.
    let top_k = fields.integer("top_k", -1..=MAX_TOP_K)?;
    let top_k = top_k.map(|k| u32::try_from(k).unwrap_or(0));
    let seed = fields.integer("seed", i64::MIN..=i64::MAX)?;
    Ok(Sampling {
        temperature: temperature.unwrap_or(1.0),
        top_k: top_k.or(model.top_k).unwrap_or(0),
        top_p: top_p.or(model.top_p).unwrap_or(1.0),
        min_p: fields.number("min_p", 0.0..=1.0)?.unwrap_or(0.0),
        repetition_penalty: repetition_penalty.or(model.repetition_penalty).unwrap_or(1.0),
        presence_penalty: fields.number("presence_penalty", -2.0..=2.0)?.unwrap_or(0.0),
        frequency_penalty: fields.number("frequency_penalty", -2.0..=2.0)?.unwrap_or(0.0),
        seed: seed.map_or_else(ids::random, i64::cast_unsigned),
        logprobs: None,
        prompt_logprobs: None,
        logit_bias: logit_bias(fields, model)?,
        ignore_eos: fields.boolean("ignore_eos")?.unwrap_or(false),
        min_tokens: fields.count("min_tokens", 0)?.unwrap_or(0),
        grammar: grammar.map(|asked| asked.grammar.clone()),
        reasoning: None,
        limits: None,
    })
}

fn logit_bias(fields: &mut Fields, model: &ModelFacts) -> Result<Vec<Ranked>, RouteError> {
    let Some(entries) = fields.object("logit_bias")? else { return Ok(Vec::new()) };
    let entries = entries.into_rest();
    if entries.len() > MAX_BIASES {
        let message =
            format!("`logit_bias` has {} entries, the limit is {MAX_BIASES}", entries.len());
        return Err(bad("logit_bias", message));
    }
    let mut biases = Vec::with_capacity(entries.len());
    for (key, value) in &entries {
        let id = key.parse().ok().filter(|id| *id < model.vocab_size);
        let Some(id) = id else {
            let message = format!(
                "keys of `logit_bias` are token ids from 0 to {}, not \"{}\"",
                model.vocab_size.saturating_sub(1),
                crate::http::parse::fields::clip(key)
            );
            return Err(bad("logit_bias", message));
        };
        biases.push(Ranked(id, number(value, format!("logit_bias.{id}"), &(-100.0..=100.0))?));
    }
    biases.sort_unstable_by_key(|bias| bias.0);
    // "7" and "07" are two keys of JSON and one token.
    if let Some(pair) = biases.windows(2).find(|pair| pair[0].0 == pair[1].0) {
        return Err(bad("logit_bias", format!("`logit_bias` names token {} twice", pair[0].0)));
    }
    Ok(biases)
}

fn stop(fields: &mut Fields) -> Result<Vec<String>, RouteError> {
    let stops = match fields.take("stop") {
        None => return Ok(Vec::new()),
        Some(Value::String(stop)) => vec![stop],
        Some(Value::Array(stops)) => {
            let stops = stops.into_iter().enumerate().map(|(i, stop)| {
                let Value::String(stop) = stop else {
                    return Err(wrong_type(format!("stop[{i}]"), "a string", &stop));
                };
                Ok(stop)
            });
            stops.collect::<Result<_, _>>()?
        }
        Some(other) => return Err(wrong_type("stop", "a string or an array of strings", &other)),
    };
    if stops.len() > MAX_STOPS {
        let message = format!("`stop` holds {} strings, the limit is {MAX_STOPS}", stops.len());
        return Err(bad("stop", message));
    }
    if stops.iter().any(String::is_empty) {
        return Err(bad("stop", "`stop` must not hold an empty string"));
    }
    if let Some(long) = stops.iter().find(|stop| stop.len() > MAX_STOP_BYTES) {
        let message =
            format!("`stop` holds a string of {} bytes, the limit is {MAX_STOP_BYTES}", long.len());
        return Err(bad("stop", message));
    }
    Ok(stops)
}

fn stop_ids(fields: &mut Fields, model: &ModelFacts) -> Result<Vec<u32>, RouteError> {
    let Some(ids) = fields.array("stop_token_ids")? else { return Ok(Vec::new()) };
    if ids.len() > MAX_STOP_IDS {
        let message =
            format!("`stop_token_ids` holds {} ids, the limit is {MAX_STOP_IDS}", ids.len());
        return Err(bad("stop_token_ids", message));
    }
    token_ids(&ids, "stop_token_ids", model.vocab_size)
}

/// An array of token ids.
///
/// # Errors
/// `BadRequest` whose `param` is the element, such as `prompt[3]`.
pub(in crate::http) fn token_ids(
    ids: &[Value],
    param: &str,
    vocab: u32,
) -> Result<Vec<u32>, RouteError> {
    let range = 0..=i64::from(vocab) - 1;
    let ids = ids.iter().enumerate().map(|(i, id)| match id.as_u64() {
        Some(id) if id < u64::from(vocab) => Ok(u32::try_from(id).expect("below a u32")),
        _ => {
            let id = integer(id, format!("{param}[{i}]"), &range)?;
            Ok(u32::try_from(id).expect("range was checked"))
        }
    });
    ids.collect()
}

/// vLLM's `priority`: lower goes first. Inside, higher goes first.
///
/// # Errors
/// `BadRequest` about it.
pub(in crate::http) fn priority(fields: &mut Fields) -> Result<i8, RouteError> {
    let priority = fields.integer("priority", -127..=127)?.unwrap_or(0);
    Ok(i8::try_from(-priority).expect("range was checked"))
}

/// vLLM's `cache_salt`.
///
/// # Errors
/// `BadRequest` about it.
pub(in crate::http) fn salt(fields: &mut Fields) -> Result<Vec<u8>, RouteError> {
    let salt = fields.string("cache_salt")?;
    match salt {
        Some(salt) if salt.is_empty() => Err(bad("cache_salt", "`cache_salt` must not be empty")),
        Some(salt) => Ok(blake3::hash(salt.as_bytes()).as_bytes()[..16].to_vec()), // bounded, whatever the client sends
        None => Ok(Vec::new()),
    }
}

fn delivery(fields: &mut Fields) -> Result<Delivery, RouteError> {
    let stream = fields.boolean("stream")?.unwrap_or(false);
    let Some(mut options) = fields.object("stream_options")?.map(Fields::loose) else {
        return Ok(Delivery { stream, ..Delivery::default() });
    };
    if !stream {
        return Err(bad("stream_options", "`stream_options` is only allowed with `stream: true`"));
    }
    let running_usage = options.boolean("continuous_usage_stats")?.unwrap_or(false);
    let include_usage = options.boolean("include_usage")?.unwrap_or(false);
    if options.boolean("include_obfuscation")? == Some(true) {
        let why = "this server does not pad its events";
        return Err(crate::http::parse::fields::unsupported(
            "stream_options.include_obfuscation",
            why,
        ));
    }
    options.finish()?;
    if running_usage && !include_usage {
        let message = "`stream_options.continuous_usage_stats` needs `include_usage: true`";
        return Err(bad("stream_options.continuous_usage_stats", message));
    }
    Ok(Delivery { stream, include_usage, running_usage, ..Delivery::default() })
}

/// `min_tokens` cannot be more than the longest answer.
///
/// # Errors
/// `BadRequest` about `min_tokens`.
pub(in crate::http) fn min_fits_max(
    min_tokens: u32,
    max_tokens: Option<u32>,
) -> Result<(), RouteError> {
    match max_tokens {
        Some(max) if min_tokens > max => {
            let message =
                format!("`min_tokens` is {min_tokens}, but the longest answer is {max} tokens");
            Err(bad("min_tokens", message))
        }
        Some(_) | None => Ok(()),
    }
}

/// The name of the model, the first thing that a request must say.
///
/// # Errors
/// `BadRequest` about `model`.
pub(in crate::http) fn model_name(fields: &mut Fields) -> Result<String, RouteError> {
    let name = fields.string("model")?.unwrap_or_default();
    if name.is_empty() {
        return Err(bad("model", "`model` is required; GET /v1/models lists what is served"));
    }
    if name.len() > MAX_MODEL_BYTES {
        let message =
            format!("`model` is {} bytes long, the limit is {MAX_MODEL_BYTES}", name.len());
        return Err(bad("model", message));
    }
    Ok(name)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn facts() -> ModelFacts {
        ModelFacts { vocab_size: 100, ..ModelFacts::default() }
    }

    fn taken(body: Value) -> Result<SharedParams, RouteError> {
        let mut fields = Fields::of_body(body)?;
        let common = take(&mut fields, &facts())?;
        fields.finish()?;
        Ok(common)
    }

    #[test]
    fn each_number_has_its_range() {
        for (name, good, wrong) in [
            ("temperature", json!([0, 2, 0.5]), json!([-0.1, 2.1, "hot", true])),
            ("top_p", json!([1, 0.01]), json!([0, 1.1, -1])),
            ("top_k", json!([-1, 0, 50]), json!([-2, 1.5, 1e20])),
            ("min_p", json!([0, 1]), json!([-0.1, 1.1])),
            ("presence_penalty", json!([-2, 2]), json!([-2.1, 2.1])),
            ("frequency_penalty", json!([-2, 2]), json!([-2.1, 2.1])),
            ("repetition_penalty", json!([0.5, 1.3]), json!([0, -1])),
            ("n", json!([1, 128]), json!([0, 129, -1, "2"])),
            ("seed", json!([0, -5, i64::MAX]), json!([u64::MAX, 0.5, "x"])),
            ("min_tokens", json!([0, 7]), json!([-1])),
            ("priority", json!([-127, 127]), json!([128, "high"])),
            (
                "stop",
                json!(["x", ["a", "b"], []]),
                json!(["", [""], [1], 3, vec!["x"; 17], "x".repeat(2000)]),
            ),
            ("stop_token_ids", json!([[1, 99]]), json!([[100], [-1], ["a"], 5])),
            (
                "logit_bias",
                json!([{}, {"5": 1, "99": -100}]),
                json!([{"100": 1}, {"x": 1}, {"5": 101}, {"5": "a"}, {"7": 1, "07": 1}, []]),
            ),
            ("stream", json!([true, false]), json!(["yes", 1])),
            ("ignore_eos", json!([true]), json!([1])),
            ("include_stop_str_in_output", json!([true, false]), json!([1, "yes"])),
            ("return_token_ids", json!([true, false]), json!([1, "yes"])),
            ("truncate_prompt_tokens", json!([-1, 1, 4096]), json!([0, -2, 1.5, "9"])),
            ("allowed_token_ids", json!([[0, 99, 0]]), json!([[], [100], ["a"], 5, vec![1; 1025]])),
            (
                "bad_words",
                json!([[], ["a", "a", " b c"]]),
                json!(["a", [1], [""], ["  "], ["x".repeat(300)], vec!["x"; 129]]),
            ),
            ("prompt_logprobs", json!([0, 20]), json!([-1, 21, true])),
            ("cache_salt", json!(["x"]), json!(["", 1])),
        ] {
            for value in good.as_array().unwrap() {
                taken(json!({ name: value })).unwrap_or_else(|e| panic!("{name} {value}: {e}"));
            }
            for value in wrong.as_array().unwrap() {
                match taken(json!({ name: value })) {
                    Err(RouteError::BadRequest { param: Some(param), message }) => {
                        assert!(param.starts_with(name), "{name}: {param}");
                        assert!(message.len() < 300, "{message}");
                    }
                    other => panic!("{name} {value}: {other:?}"),
                }
            }
        }
    }

    #[test]
    fn null_is_absent() {
        let common =
            taken(json!({"temperature": null, "stop": null, "logit_bias": null, "n": null,
            "stream_options": null, "seed": null}));
        assert_eq!(common.unwrap().sampling.temperature.to_bits(), 1.0_f64.to_bits());
    }

    #[test]
    fn the_checkpoint_gives_the_defaults_and_the_client_overrides_them() {
        let model = ModelFacts { temperature: Some(0.6), top_k: Some(20), ..facts() };
        let mut fields = Fields::of_body(json!({"top_k": -1})).unwrap();
        let sampling = take(&mut fields, &model).unwrap().sampling;
        assert_eq!((sampling.temperature, sampling.top_k), (0.6, 0));
    }

    #[test]
    fn priority_turns_round() {
        assert_eq!(taken(json!({"priority": 127})).unwrap().priority, -127);
    }

    #[test]
    fn stream_options_need_a_stream() {
        let options = json!({"include_usage": true});
        assert!(taken(json!({"stream_options": options})).is_err());
        let delivery = taken(json!({"stream": true, "stream_options": options})).unwrap().delivery;
        assert!(delivery.stream && delivery.include_usage && !delivery.running_usage);
        assert!(taken(json!({"stream": true, "stream_options": {"shape": 1}})).is_err());
    }
}
