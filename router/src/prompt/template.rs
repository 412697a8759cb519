//! Chat templates as Hugging Face `transformers` renders them, with bounds on what a template can cost.

use std::collections::BTreeMap;
use std::io;
use std::time::SystemTime;

use minijinja::value::{Kwargs, Value, ViaDeserialize};
use minijinja::{Environment, Error, ErrorKind};
use serde_json::{Map, Value as Json};

use super::python;
use super::{ModelDoc, PromptError};
use crate::error::RouteError;
use crate::request::ChatPrompt;

/// A compiled chat template and the special tokens it may name.
#[derive(Debug)]
pub(crate) struct ChatTemplate {
    environment: Environment<'static>,
    source: String,
    special_tokens: Vec<(&'static str, String)>,
}

/// Instructions that one rendering may take: a guess, well above what 10,000 messages need in the tests' templates.
const FUEL: u64 = 50_000_000;

/// Longest rendered prompt: above any context window times any token's length that makes sense.
const MAX_RENDERED_BYTES: usize = 64 << 20;

/// Names that the template gets from us. A client's own variables must not replace them.
const OURS: [&str; 6] = [
    "messages",
    "tools",
    "add_generation_prompt",
    "continue_final_message",
    "chat_template",
    "tokenize",
];

/// As in transformers: where a message names its reasoning. The first is the one that templates read.
const REASONING: [&str; 3] = ["reasoning_content", "thinking", "reasoning"];

const NAME: &str = "chat_template";

impl ChatTemplate {
    /// # Errors
    /// [`PromptError::Template`] says at which line the template breaks.
    pub(crate) fn new(source: &str, doc: &ModelDoc) -> Result<Self, PromptError> {
        let mut environment = Environment::new();
        environment.set_trim_blocks(true);
        environment.set_lstrip_blocks(true);
        environment.set_fuel(Some(FUEL));
        environment.set_debug(false); // errors would copy the messages
        environment.set_auto_escape_callback(|_| minijinja::AutoEscape::None);
        environment
            .set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        environment.set_formatter(|out, _, value| python::write_str(out, value));
        environment.add_filter("tojson", tojson);
        environment.add_filter("string", python::to_str);
        environment.add_function("raise_exception", |message: String| -> Result<Value, Error> {
            Err(Error::new(ErrorKind::InvalidOperation, "raised").with_source(Raised(message)))
        });
        environment.add_function("strftime_now", |format: String| {
            python::strftime(&format, SystemTime::now())
        });
        environment
            .add_template_owned(NAME, without_generation_tags(source))
            .map_err(|e| PromptError::Template(describe(&e)))?;
        let special_tokens = [
            ("bos_token", &doc.bos_token),
            ("eos_token", &doc.eos_token),
            ("pad_token", &doc.pad_token),
            ("unk_token", &doc.unk_token),
        ];
        let special_tokens = special_tokens
            .into_iter()
            .filter_map(|(name, token)| Some((name, token.clone()?)))
            .collect();
        Ok(Self { environment, source: source.to_owned(), special_tokens })
    }

    /// The prompt's text.
    ///
    /// # Errors
    /// `BadRequest`: what the template raised, or what does not fit together in the request.
    pub(crate) fn render(&self, mut chat: ChatPrompt) -> Result<String, RouteError> {
        if let Some(name) = chat.template_kwargs.keys().find(|k| OURS.contains(&k.as_str())) {
            let param = Some("chat_template_kwargs".to_owned());
            let message = format!("`{name}` is not a free variable of the chat template");
            return Err(RouteError::BadRequest { param, message });
        }
        for message in chat.messages.iter_mut().filter_map(Json::as_object_mut) {
            alias_reasoning(message);
        }
        let open = match chat.continue_final_message {
            true => Some(self.open_final_message(&mut chat)?),
            false => None,
        };
        let mut out = Bounded::default();
        let template = self.environment.get_template(NAME).map_err(|e| internal(&e))?;
        let context = self.context(chat);
        if let Err(error) = template.render_captured_to(context, &mut out) {
            return Err(if out.full { too_long() } else { rejected(&error) });
        }
        let text = String::from_utf8(out.bytes)
            .map_err(|e| RouteError::Internal(format!("the chat template wrote bytes: {e}")))?;
        match open {
            Some(last) => cut_after(text, &last),
            None => Ok(text),
        }
    }

    fn context(&self, chat: ChatPrompt) -> Value {
        // Later ones win: a client's variables over the model's special tokens, ours over all.
        let mut names: BTreeMap<String, Value> = BTreeMap::new();
        names.insert("documents".to_owned(), Value::from(()));
        for (name, token) in &self.special_tokens {
            names.insert((*name).to_owned(), Value::from(token.as_str()));
        }
        for (name, value) in chat.template_kwargs {
            names.insert(name, Value::from_serialize(value));
        }
        names.insert("messages".to_owned(), Value::from_serialize(chat.messages));
        names.insert("tools".to_owned(), Value::from_serialize(chat.tools));
        names.insert("add_generation_prompt".to_owned(), chat.add_generation_prompt.into());
        Value::from(names)
    }

    /// Marks the end of the last message and returns its text.
    fn open_final_message(&self, chat: &mut ChatPrompt) -> Result<String, RouteError> {
        if chat.add_generation_prompt {
            let why = "it cannot be combined with `add_generation_prompt`";
            return Err(cannot_continue(why));
        }
        if !self.source.contains("content") {
            return Err(cannot_continue("the chat template does not read `content`"));
        }
        let last = chat.messages.last_mut().and_then(|m| m.get_mut("content"));
        let text = match last {
            Some(Json::String(text)) => Some(text),
            Some(Json::Array(parts)) => {
                parts.iter_mut().rev().find_map(|p| match p.get_mut("text") {
                    Some(Json::String(text)) => Some(text),
                    _ => None,
                })
            }
            _ => None,
        };
        let text = text.ok_or_else(|| cannot_continue("the last message has no text"))?;
        let original = text.clone();
        text.push_str(OPEN_END);
        Ok(original)
    }
}

/// Marks where the last message ends, as in transformers (the final space tells whether the template trims).
const OPEN_END: &str = "CONTINUE_FINAL_MESSAGE_TAG ";

fn cut_after(mut text: String, last: &str) -> Result<String, RouteError> {
    let at = text.rfind(OPEN_END.trim_end()).filter(|_| text.contains(last.trim()));
    let at = at.ok_or_else(|| cannot_continue("the chat template leaves the last message out"))?;
    let trimmed = !text[at..].starts_with(OPEN_END);
    text.truncate(at);
    if trimmed {
        text.truncate(text.trim_end().len());
    }
    Ok(text)
}

fn cannot_continue(why: &str) -> RouteError {
    RouteError::BadRequest {
        param: Some("continue_final_message".to_owned()),
        message: format!("the last message cannot be continued: {why}"),
    }
}

fn alias_reasoning(message: &mut Map<String, Json>) {
    let found = REASONING.iter().find_map(|name| message.get(*name).filter(|v| !v.is_null()));
    let Some(reasoning) = found.cloned() else { return };
    message.entry("thinking").or_insert_with(|| reasoning.clone());
    message.insert("reasoning_content".to_owned(), reasoning);
}

/// What `raise_exception` was called with.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct Raised(String);

fn rejected(error: &Error) -> RouteError {
    let mut cause: Option<&(dyn std::error::Error + 'static)> = Some(error);
    let mut message =
        format!("the chat template cannot render these messages: {}", describe(error));
    while let Some(at) = cause {
        if let Some(Raised(words)) = at.downcast_ref() {
            message = format!("the chat template rejected the messages: {words}");
            break;
        }
        if let Some(e) = at.downcast_ref::<Error>()
            && e.kind() == ErrorKind::OutOfFuel
        {
            message = "the chat template takes too long for these messages".to_owned();
            break;
        }
        cause = at.source();
    }
    RouteError::BadRequest { param: Some("messages".to_owned()), message }
}

fn too_long() -> RouteError {
    let message = format!("the chat as text is longer than {} MiB", MAX_RENDERED_BYTES >> 20);
    RouteError::BadRequest { param: Some("messages".to_owned()), message }
}

/// The error with its line, without the source that minijinja would show.
fn describe(error: &Error) -> String {
    let mut text = error.kind().to_string();
    if let Some(detail) = error.detail() {
        text = format!("{text}: {detail}");
    }
    if let Some(line) = error.line() {
        text = format!("{text} (line {line} of the template)");
    }
    text
}

fn internal(error: &Error) -> RouteError {
    RouteError::Internal(format!("chat template: {}", describe(error)))
}

/// `{% generation %}` marks the assistant's words for training. For us it is a block like any other, so it becomes
/// `{% with %}`, whose names do not leak either.
fn without_generation_tags(source: &str) -> String {
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(at) = rest.find("{%") {
        let (before, tag) = rest.split_at(at + 2);
        out.push_str(before);
        rest = tag;
        let Some(end) = tag.find("%}") else { break };
        let inner = &tag[..end];
        let (name, new) = match inner.trim_matches(|c: char| c.is_whitespace() || "-+".contains(c))
        {
            "generation" => ("generation", "with"),
            "endgeneration" => ("endgeneration", "endwith"),
            _ => continue,
        };
        out.push_str(&inner.replace(name, new));
        rest = &tag[end..];
    }
    out + rest
}

/// `tojson` of transformers: `json.dumps` without HTML escapes.
#[allow(clippy::needless_pass_by_value, reason = "minijinja passes Kwargs by value")]
fn tojson(value: &Value, ensure_ascii: Option<bool>, options: Kwargs) -> Result<Value, Error> {
    let separators: Option<ViaDeserialize<(String, String)>> = options.get("separators")?;
    let dump = python::Dump {
        ensure_ascii: match ensure_ascii {
            Some(given) => given,
            None => options.get::<Option<bool>>("ensure_ascii")?.unwrap_or(false),
        },
        indent: match options.get::<Option<Value>>("indent")? {
            Some(indent) => python::indent(&indent)?,
            None => None,
        },
        separators: separators.map(|s| s.0),
        sort_keys: options.get::<Option<bool>>("sort_keys")?.unwrap_or(false),
    };
    options.assert_all_used()?;
    dump.dumps(value).map(Value::from)
}

/// Collects what a template writes, up to [`MAX_RENDERED_BYTES`].
#[derive(Default)]
struct Bounded {
    bytes: Vec<u8>,
    full: bool,
}

impl io::Write for Bounded {
    fn write(&mut self, part: &[u8]) -> io::Result<usize> {
        if self.bytes.len() + part.len() > MAX_RENDERED_BYTES {
            self.full = true;
            return Err(io::ErrorKind::StorageFull.into());
        }
        self.bytes.extend_from_slice(part);
        Ok(part.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
