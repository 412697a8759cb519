//! `/tokenize`, `/detokenize` and `/tokenizer_info`, as vLLM has them.

use std::sync::Arc;

use axum::Json;
use axum::extract::{Path, Request, State};
use axum::response::Response;
use bytes::BytesMut;
use serde_json::{Map, Value};

use crate::app::App;
use crate::error::RouteError;
use crate::http::Surface;
use crate::http::access::{AllowedModels, caller};
use crate::http::generate::ReadBody;
use crate::http::parse::fields::{Fields, bad, wrong_type};
use crate::http::parse::params;
use crate::http::parse::template_fields;
use crate::http::parse::token_ids::{Ids, IdsField};
use crate::http::reply::events::{json, number};
use crate::http::reply::pieces::{Parts, json_response};
use crate::http::reply::reject::Reject;
use crate::http::{chat, generate};
use crate::limits::memory::MemoryShare;
use crate::prompt::{ChatPrompt, Prompt};
use crate::prompt::{Decoder, PromptEngine};

/// Text or messages to token ids.
pub(super) async fn tokenize(
    State(surface): State<Surface>,
    request: Request,
) -> Result<Response, Reject> {
    let app = Arc::clone(&surface.app);
    let salt = caller(&request).cache_of(&app).map(|tenant| tenant.salt(b"")).unwrap_or_default();
    let checked = generate::read(&surface, request, None, move |read| {
        let ReadBody { fields, mut memory, models, .. } = read;
        let (engine, fields) = engine_of(&app, &models, fields)?;
        let (wants_texts, mut input) = check(fields, &mut memory)?;
        if let Input::Chat(prompt) = &mut input {
            template_fields::allowed(prompt, &app.config.http)?;
            chat::tell_tools(prompt, &engine.conventions(), &mut memory)?;
        }
        Ok((engine, wants_texts, input, Some(Arc::new(memory))))
    });
    let (engine, wants_texts, input, charge) = checked.await?;
    let ids = match input {
        Input::Text { text, special } => {
            engine.encode_text_charged(text, special, salt, charge).await?
        }
        Input::Chat(chat) => {
            engine
                .encode_charged(Prompt::Chat(Box::new(chat)), engine.whole_context(), salt, charge)
                .await?
        }
    };
    let mut memory = surface.app.memory.bodies.share();
    memory.charge(ids.capacity() * size_of::<u32>()).map_err(|refused| refused.body(None))?;
    let at = Part::Head;
    Ok(json_response(Tokenized { engine, ids, wants_texts, at, _memory: memory }))
}

/// The answer, written as the client takes it: beside the ids there is never more than a piece of it.
struct Tokenized {
    engine: Arc<PromptEngine>,
    ids: Vec<u32>,
    wants_texts: bool,
    at: Part,
    _memory: MemoryShare,
}

/// What is to be written next.
enum Part {
    Head,
    /// From this id on.
    Ids(usize),
    /// From the text of this id on.
    Texts(usize),
}

/// Ids, or texts of ids, in one part.
const STEP: usize = 256;

impl Parts for Tokenized {
    fn write(&mut self, out: &mut BytesMut) -> bool {
        match self.at {
            Part::Head => {
                out.extend_from_slice(b"{\"count\":");
                json(out, &self.ids.len());
                out.extend_from_slice(b",\"max_model_len\":");
                json(out, &self.engine.doc().context_tokens);
                out.extend_from_slice(b",\"tokens\":[");
                self.at = Part::Ids(0);
            }
            Part::Ids(from) => {
                let to = (from + STEP).min(self.ids.len());
                list(out, from, &self.ids[from..to], |out, id| number(out, *id));
                self.at = Part::Ids(to);
                if to == self.ids.len() {
                    if !self.wants_texts {
                        out.extend_from_slice(b"],\"token_strs\":null}");
                        return false;
                    }
                    out.extend_from_slice(b"],\"token_strs\":[");
                    self.at = Part::Texts(0);
                }
            }
            Part::Texts(from) => {
                let to = (from + STEP).min(self.ids.len());
                list(out, from, &self.ids[from..to], |out, id| {
                    json(out, &String::from_utf8_lossy(self.engine.token_bytes(*id)));
                });
                self.at = Part::Texts(to);
                if to == self.ids.len() {
                    out.extend_from_slice(b"]}");
                    return false;
                }
            }
        }
        true
    }
}

/// Appends items of a list, of which `before` were written already.
fn list<T>(out: &mut BytesMut, before: usize, items: &[T], write: impl Fn(&mut BytesMut, &T)) {
    for (i, item) in items.iter().enumerate() {
        if before + i > 0 {
            out.extend_from_slice(b",");
        }
        write(out, item);
    }
}

enum Input {
    /// With or without what the tokenizer puts around a text.
    Text {
        text: String,
        special: bool,
    },
    Chat(ChatPrompt),
}

/// Whether texts of tokens are wanted, and of what. The model was taken.
fn check(mut fields: Fields, memory: &mut MemoryShare) -> Result<(bool, Input), RouteError> {
    let wants_texts = fields.boolean("return_token_strs")?.unwrap_or(false);
    let input = input(&mut fields, memory)?;
    fields.finish()?;
    Ok((wants_texts, input))
}

/// Reads a body as `/tokenize` does, for the test of its documentation.
#[cfg(test)]
pub(in crate::http) fn is_checked(
    fields: Fields,
    memory: &mut MemoryShare,
) -> Result<(), RouteError> {
    check(fields, memory).map(drop)
}

fn input(fields: &mut Fields, memory: &mut MemoryShare) -> Result<Input, RouteError> {
    let text = fields.string("prompt")?;
    match (text, fields.has("messages")) {
        (Some(_), true) => Err(bad("prompt", "send `prompt` or `messages`, not both")),
        (Some(text), false) => {
            let special = fields.boolean("add_special_tokens")?.unwrap_or(true);
            Ok(Input::Text { text, special })
        }
        (None, true) => chat::prompt(fields, memory).map(Input::Chat),
        (None, false) => Err(bad("prompt", "`prompt` or `messages` is required")),
    }
}

/// Token ids to text, special tokens included.
pub(super) async fn detokenize(
    State(surface): State<Surface>,
    request: Request,
) -> Result<Response, Reject> {
    let app = Arc::clone(&surface.app);
    let checked = generate::read(&surface, request, Some(TOKENS), move |read| {
        let ReadBody { fields, ids, models, memory } = read;
        let (engine, fields) = engine_of(&app, &models, fields)?;
        let ids = match fields.require("tokens", ids)? {
            Ids::List(ids) => ids,
            Ids::Other(other) => return Err(wrong_type("tokens", "an array", &other)),
            Ids::Text(_) | Ids::Texts(_) | Ids::Lists(_) | Ids::Odd { .. } => {
                return Err(RouteError::mistake("a list of ids was read as a prompt"));
            }
        };
        fields.finish()?;
        let limit = engine.doc().context_tokens as usize;
        if ids.len() > limit {
            let (prompt, answer) = (ids.len(), 0);
            return Err(RouteError::ContextLength { got: prompt, prompt, answer, limit });
        }
        let ids = ids.check("tokens", engine.doc().vocab_size)?;
        Ok((engine, ids, memory))
    });
    let (engine, ids, memory) = checked.await?;
    let decoder = engine.decoder(&[], false);
    Ok(json_response(Detokenized { decoder, ids, done: None, _memory: memory }))
}

/// Where `/detokenize` has token ids.
pub(super) const TOKENS: IdsField = IdsField { name: "tokens", most: 0 };

/// The answer, decoded as the client takes it.
struct Detokenized {
    decoder: Decoder,
    ids: Vec<u32>,
    /// Ids that were decoded; `None` before the beginning.
    done: Option<usize>,
    _memory: MemoryShare,
}

impl Parts for Detokenized {
    fn write(&mut self, out: &mut BytesMut) -> bool {
        let Some(from) = self.done else {
            out.extend_from_slice(b"{\"prompt\":\"");
            self.done = Some(0);
            return true;
        };
        let to = (from + STEP).min(self.ids.len());
        string_part(out, &self.decoder.push(&self.ids[from..to]).text);
        self.done = Some(to);
        if to < self.ids.len() {
            return true;
        }
        string_part(out, &self.decoder.finish());
        out.extend_from_slice(b"\"}");
        false
    }
}

/// Appends text as JSON has it inside a string.
fn string_part(out: &mut BytesMut, text: &str) {
    let mut quoted = BytesMut::new();
    json(&mut quoted, text);
    out.extend_from_slice(&quoted[1..quoted.len() - 1]);
}

/// What a tokenizer's configuration says, under the names of Hugging Face. Without a name it is that
/// of the only model.
pub(super) async fn info(
    State(app): State<Arc<App>>,
    name: Option<Path<String>>,
    request: Request,
) -> Result<Json<Value>, Reject> {
    let mut fields = Map::new();
    if let Some(Path(name)) = name {
        fields.insert("model".to_owned(), Value::String(name));
    }
    let models = AllowedModels::of(&request);
    let (engine, _) = engine_of(&app, &models, Fields::of_body(Value::Object(fields))?)?;
    let (doc, stats) = (engine.doc(), engine.cache_stats());
    Ok(Json(serde_json::json!({
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": doc.bos_token,
        "eos_token": doc.eos_token,
        "pad_token": doc.pad_token,
        "unk_token": doc.unk_token,
        "eos_token_ids": doc.eos_token_ids,
        "model_max_length": doc.context_tokens,
        "vocab_size": doc.vocab_size,
        "chat_template": doc.chat_template,
        "encoder": stats.encoder(),
        "encoder_reason": stats.slow,
    })))
}

/// The model may be left out where there is only one.
fn engine_of(
    app: &App,
    models: &AllowedModels,
    mut fields: Fields,
) -> Result<(Arc<PromptEngine>, Fields), RouteError> {
    let name = match (fields.has("model"), models.list(app).as_slice()) {
        (false, [only]) => only.name.clone(),
        _ => params::model_name(&mut fields)?,
    };
    Ok((Arc::clone(&models.find(app, &name)?.engine), fields))
}
