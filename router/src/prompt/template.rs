//! Chat templates as Hugging Face `transformers` renders them, with bounds on what a template can cost.

mod conventions;

use std::time::Duration;

use serde_json::{Map, Value as Json};

use super::jinja::{self, Bound, Budget, Error, ErrorKind, Limits, OUTPUT, Program, Value};
use super::{ModelDoc, PromptError};
use crate::error::RouteError;

pub use conventions::{Conventions, MistralCalls};

/// What the chat template gets to see.
#[derive(Debug, Clone, Default)]
pub struct ChatPrompt {
    /// Checked messages, as JSON objects with `role` and `content` (text parts already joined where the template
    /// wants text).
    pub messages: Vec<Json>,
    /// Definitions of tools, as the client sent them.
    pub tools: Option<Vec<Json>>,
    /// End with the header of an assistant message.
    pub add_generation_prompt: bool,
    /// Leave the last message open, to be gone on with.
    pub continue_final_message: bool,
    /// Further variables of the template.
    pub template_kwargs: Map<String, Json>,
    /// Those of them that are parameters of the request: a template that does not name one refuses the chat.
    pub asked: Vec<&'static str>,
    /// The request's own template, in place of the model's.
    pub template: Option<String>,
    /// The tokenizer puts around the text what it puts around any text, beside what the template writes.
    pub add_special_tokens: bool,
}

/// A chat template that was read, and the special tokens it may name.
#[derive(Debug)]
pub(crate) struct ChatTemplate {
    program: Program,
    conventions: Conventions,
    /// Those of [`ASKED`] that its source names.
    names: Vec<&'static str>,
    reads_content: bool,
    special_tokens: Vec<(&'static str, String)>,
    context_tokens: usize,
}

/// A chat that a template can be rendered with, also a second time.
#[derive(Debug)]
pub(crate) struct Prepared {
    chat: ChatPrompt,
    /// Text of the last message, if that is to be left open.
    open: Option<String>,
    /// Bytes of all text that the template sees, and some for each value.
    bytes: usize,
}

impl Prepared {
    fn new(chat: ChatPrompt, open: Option<String>) -> Self {
        let values = chat.messages.iter().chain(chat.tools.iter().flatten());
        let bytes = values.chain(chat.template_kwargs.values()).map(json_bytes).sum();
        Self { chat, open, bytes }
    }

    pub(crate) fn chat(&self) -> &ChatPrompt {
        &self.chat
    }
}

/// Bytes of a name or value without text: what templates make of short ones takes room, too.
const VALUE_BYTES: usize = 8;

fn json_bytes(json: &Json) -> usize {
    VALUE_BYTES
        + match json {
            Json::Null | Json::Bool(_) | Json::Number(_) => 0,
            Json::String(text) => text.len(),
            Json::Array(items) => items.iter().map(json_bytes).sum(),
            Json::Object(fields) => {
                fields.iter().map(|(name, x)| VALUE_BYTES + name.len() + json_bytes(x)).sum()
            }
        }
}

/// What a template wrote, with the mark of an open message still in it.
struct Open(String);

impl Open {
    fn closed(self, prepared: &Prepared) -> Result<String, RouteError> {
        match &prepared.open {
            Some(last) => cut_after(self.0, last),
            None => Ok(self.0),
        }
    }
}

/// Units of work and bytes that a rendering may take beside the short prompts of others: some 10 ms, a thousand times what
/// a usual chat takes.
const QUICK_WORK: u64 = 10_000_000;
const QUICK_MEMORY: usize = 8 << 20;

/// The same on a thread that serves sockets: some 0.3 ms, thirty times what a usual chat takes. Such a thread has a stack of
/// 2 MiB, where those of the tokeniser have 16 MiB for 1,000 levels.
const HERE_WORK: u64 = 300_000;
const HERE_MEMORY: usize = 1 << 20;
const HERE_LEVELS: u32 = 48;

fn output(longest: Option<usize>) -> usize {
    longest.map_or(OUTPUT, |longest| longest.min(OUTPUT))
}

/// Names that the template gets from us. A client's own variables must not replace them.
const OURS: [&str; 6] = [
    "messages",
    "tools",
    "add_generation_prompt",
    "continue_final_message",
    "chat_template",
    "tokenize",
];

/// Variables that requests have parameters for, and that not every template reads.
const ASKED: [&str; 2] = ["documents", "verbosity"];

/// As in transformers: where a message names its reasoning. The first is the one that templates read.
const REASONING: [&str; 3] = ["reasoning_content", "thinking", "reasoning"];

/// How long the client is asked to wait after a rendering that a busy machine did not finish in time.
const BUSY: Duration = Duration::from_secs(1);

/// Bytes of what a template raises that reach the client.
const MAX_WORDS: usize = 4 << 10;

impl ChatTemplate {
    /// # Errors
    /// [`PromptError::Template`] says at which line the template breaks, or what it uses that is not supported.
    pub(crate) fn new(source: &str, doc: &ModelDoc) -> Result<Self, PromptError> {
        let program =
            Program::new(&without_generation_tags(source)).map_err(PromptError::Template)?;
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
        let template = Self {
            program,
            conventions: Conventions::of(source),
            names: ASKED.into_iter().filter(|name| source.contains(name)).collect(),
            reads_content: source.contains("content"),
            special_tokens,
            context_tokens: doc.context_tokens as usize,
        };
        jinja::deep(|| template.try_out()).unwrap_or_else(Err).map_err(PromptError::Template)?;
        Ok(template)
    }

    pub(crate) fn conventions(&self) -> Conventions {
        self.conventions
    }

    /// Renders the smallest chat: a template that passes its bounds with that one is itself at fault, whatever is asked
    /// of it. What it raises, or does not find in this chat, is no fault.
    fn try_out(&self) -> Result<(), String> {
        let message = Json::Object(Map::from_iter(
            [("role", "user"), ("content", "Hi")].map(|(k, v)| (k.to_owned(), v.into())),
        ));
        let chat = ChatPrompt {
            messages: vec![message],
            add_generation_prompt: true,
            ..ChatPrompt::default()
        };
        let prepared = Prepared::new(chat, None);
        if let Err((error, budget)) = self.attempt(&prepared, Limits::of(prepared.bytes))
            && let ErrorKind::Spent(bound) = error.kind()
            && bound != Bound::Time
        // which is the fault of a busy machine
        {
            let why = budget.describe(bound);
            return Err(format!("even with a single short message, {why}"));
        }
        Ok(())
    }

    /// What a client sent, as the template gets it.
    ///
    /// # Errors
    /// `BadRequest`: what does not fit together in the request.
    pub(crate) fn prepare(&self, mut chat: ChatPrompt) -> Result<Prepared, RouteError> {
        if let Some(name) = chat.template_kwargs.keys().find(|k| OURS.contains(&k.as_str())) {
            let param = Some("chat_template_kwargs".to_owned());
            let message = format!("`{name}` is not a free variable of the chat template");
            return Err(RouteError::BadRequest { param, message });
        }
        if let Some(name) = chat.asked.iter().find(|name| !self.names.contains(name)) {
            let message = format!(
                "`{name}` is not supported: the chat template of this model does not read it"
            );
            return Err(RouteError::BadRequest { param: Some((*name).to_owned()), message });
        }
        for message in chat.messages.iter_mut().filter_map(Json::as_object_mut) {
            alias_reasoning(message);
        }
        let open = match chat.continue_final_message {
            true => Some(self.open_final_message(&mut chat)?),
            false => None,
        };
        Ok(Prepared::new(chat, open))
    }

    /// The prompt's text, of at most `longest` bytes (and 64 MiB), which is the longest text that can fit the context.
    ///
    /// # Errors
    /// `ContextLengthAtLeast` for a longer one. `BadRequest`: what the template raised, or which bound of a rendering it
    /// passed with these messages. `Overloaded`: the machine is too busy to render it in time.
    pub(crate) fn render(
        &self,
        prepared: &Prepared,
        longest: Option<usize>,
    ) -> Result<String, RouteError> {
        let limits = Limits { output: output(longest), ..Limits::of(prepared.bytes) };
        let text = self.attempt(prepared, limits);
        text.map_err(|(error, budget)| self.refuse(&error, &budget, &limits))?.closed(prepared)
    }

    /// The same within some ms, or less on a thread that serves sockets (`here`); `None` for what takes longer.
    ///
    /// # Errors
    /// As [`Self::render`].
    pub(crate) fn render_quickly(
        &self,
        prepared: &Prepared,
        longest: Option<usize>,
        here: bool,
    ) -> Result<Option<String>, RouteError> {
        let limits = Limits { output: output(longest), ..Limits::of(prepared.bytes) };
        let limits = if here {
            Limits { work: HERE_WORK, memory: HERE_MEMORY, levels: HERE_LEVELS, ..limits }
        } else {
            Limits { work: QUICK_WORK, memory: QUICK_MEMORY, ..limits }
        };
        let later = |bound| match bound {
            Bound::Work | Bound::Memory => true,
            Bound::Levels => here,
            Bound::Output | Bound::Nested | Bound::Time => false,
        };
        match self.attempt(prepared, limits) {
            Ok(text) => text.closed(prepared).map(Some),
            Err((error, _)) if matches!(error.kind(), ErrorKind::Spent(bound) if later(bound)) => {
                Ok(None)
            }
            Err((error, budget)) => Err(self.refuse(&error, &budget, &limits)),
        }
    }

    fn attempt(&self, prepared: &Prepared, limits: Limits) -> Result<Open, (Error, Budget)> {
        let budget = Budget::new(limits);
        match self.given(&prepared.chat, &budget) {
            Ok(given) => self.program.render(given, budget).map(Open),
            Err(error) => Err((error, budget)),
        }
    }

    /// What to say of a text that the context cannot hold, or of what else went wrong.
    fn refuse(&self, error: &Error, budget: &Budget, limits: &Limits) -> RouteError {
        if matches!(error.kind(), ErrorKind::Spent(Bound::Output)) && limits.output < OUTPUT {
            let (prompt, limit) = (self.context_tokens.saturating_add(1), self.context_tokens);
            return RouteError::ContextLengthAtLeast { prompt, answer: 0, limit };
        }
        rejected(error, budget)
    }

    /// The variables. Later ones win: a client's over the model's special tokens, ours over all.
    fn given<'r>(
        &'r self,
        chat: &'r ChatPrompt,
        budget: &Budget,
    ) -> Result<Vec<(&'r str, Value<'r>)>, Error> {
        let mut given = vec![("documents", Value::None)];
        for (name, token) in &self.special_tokens {
            given.push((name, Value::text(token)));
        }
        for (name, value) in &chat.template_kwargs {
            given.push((name, Value::from_json(value, budget)?));
        }
        given.push(("messages", Value::from_jsons(&chat.messages, budget)?));
        let tools = chat.tools.as_ref().map(|tools| Value::from_jsons(tools, budget));
        given.push(("tools", tools.transpose()?.unwrap_or(Value::None)));
        given.push(("add_generation_prompt", Value::Bool(chat.add_generation_prompt)));
        Ok(given)
    }

    /// Marks the end of the last message and returns its text.
    fn open_final_message(&self, chat: &mut ChatPrompt) -> Result<String, RouteError> {
        if chat.add_generation_prompt {
            let why = "it cannot be combined with `add_generation_prompt`";
            return Err(cannot_continue(why));
        }
        if !self.reads_content {
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

fn rejected(error: &Error, budget: &Budget) -> RouteError {
    let message = match error.kind() {
        ErrorKind::Spent(Bound::Time) => {
            return RouteError::Overloaded {
                what: "rendering the chat template took too long",
                retry_after: BUSY,
            };
        }
        ErrorKind::Spent(bound) => budget.describe(bound),
        ErrorKind::Raised => format!("the chat template rejected the messages: {}", error.detail()),
        ErrorKind::Invalid
        | ErrorKind::Undefined
        | ErrorKind::TooManyArguments
        | ErrorKind::MissingArgument
        | ErrorKind::UnknownFilter
        | ErrorKind::UnknownTest
        | ErrorKind::UnknownFunction
        | ErrorKind::UnknownMethod
        | ErrorKind::CannotUnpack => {
            format!("the chat template cannot render these messages: {error}")
        }
    };
    // A template may raise what the client sent, which need not come back whole.
    let end = (MAX_WORDS..message.len()).find(|at| message.is_char_boundary(*at));
    let message = match end {
        Some(end) => format!("{}...", &message[..end]),
        None => message,
    };
    RouteError::BadRequest { param: Some("messages".to_owned()), message }
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

#[cfg(test)]
mod tests;
