//! `/tokenize` and `/detokenize`, as vLLM has them.

use std::sync::Arc;

use axum::Json;
use axum::extract::{Request, State};
use serde_json::{Value, json};

use crate::app::App;
use crate::error::RouteError;
use crate::http::Surface;
use crate::http::fields::{Fields, bad, unsupported};
use crate::http::params;
use crate::http::reject::Reject;
use crate::http::{chat, generate};
use crate::prompt::PromptEngine;
use crate::request::{ChatPrompt, Prompt};

/// Text or messages to token ids.
pub(super) async fn tokenize(
    State(surface): State<Surface>,
    request: Request,
) -> Result<Json<Value>, Reject> {
    let (fields, _memory) = generate::fields(&surface, request).await?;
    let (engine, mut fields) = engine_of(&surface.app, fields)?;
    let wants_texts = fields.boolean("return_token_strs")?.unwrap_or(false);
    let input = input(&mut fields)?;
    fields.finish()?;
    let ids = match input {
        Input::Text { text, special } => engine.encode_text(text, special).await?,
        Input::Chat(chat) => engine.encode(Prompt::Chat(chat)).await?,
    };
    let texts: Option<Vec<String>> =
        wants_texts.then(|| ids.iter().map(|id| engine.token_text(*id).0).collect());
    Ok(Json(json!({
        "count": ids.len(),
        "max_model_len": engine.doc().context_tokens,
        "tokens": ids,
        "token_strs": texts,
    })))
}

enum Input {
    /// With or without what the tokenizer puts around a text.
    Text {
        text: String,
        special: bool,
    },
    Chat(ChatPrompt),
}

fn input(fields: &mut Fields) -> Result<Input, RouteError> {
    let text = fields.string("prompt")?;
    let special = fields.boolean("add_special_tokens")?;
    match (text, fields.has("messages")) {
        (Some(_), true) => Err(bad("prompt", "send `prompt` or `messages`, not both")),
        (Some(text), false) => Ok(Input::Text { text, special: special.unwrap_or(true) }),
        (None, true) if special == Some(true) => {
            Err(unsupported("add_special_tokens", "the chat template writes them"))
        }
        (None, true) => chat::prompt(fields).map(Input::Chat),
        (None, false) => Err(bad("prompt", "`prompt` or `messages` is required")),
    }
}

/// Token ids to text, special tokens included.
pub(super) async fn detokenize(
    State(surface): State<Surface>,
    request: Request,
) -> Result<Json<Value>, Reject> {
    let (fields, _memory) = generate::fields(&surface, request).await?;
    let (engine, mut fields) = engine_of(&surface.app, fields)?;
    let tokens = fields.array("tokens")?;
    let tokens = fields.require("tokens", tokens)?;
    fields.finish()?;
    let limit = engine.doc().context_tokens as usize;
    if tokens.len() > limit {
        let (prompt, answer) = (tokens.len(), 0);
        return Err(RouteError::ContextLength { got: prompt, prompt, answer, limit }.into());
    }
    let ids = params::token_ids(&tokens, "tokens", engine.doc().vocab_size)?;
    Ok(Json(json!({ "prompt": engine.decode(&ids, false) })))
}

/// The model may be left out where there is only one.
fn engine_of(app: &App, mut fields: Fields) -> Result<(Arc<PromptEngine>, Fields), RouteError> {
    let models = app.fleet.models();
    let name = match (fields.has("model"), models.as_slice()) {
        (false, [only]) => only.name.clone(),
        _ => params::model_name(&mut fields)?,
    };
    Ok((generate::engine(app, &name)?, fields))
}
