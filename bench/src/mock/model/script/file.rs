//! The file of a script: one JSON object a line, each an answer. Errors name the line and the field.

use std::collections::HashSet;
use std::io::Read as _;
use std::path::Path;

use anyhow::{Context as _, bail, ensure};
use headrace_router::core::frame::Finish;
use headrace_router::prompt::PromptEngine;
use serde_json::{Map, Value};

use super::{Entry, Portions, ScriptedAnswer};

/// Bounds of one script: tests have a few dozen answers of some kilobytes.
const MAX_FILE_BYTES: u64 = 4 << 20;
const MAX_ANSWERS: usize = 4_096;
const MAX_TEXT_BYTES: usize = 256 << 10;
const MAX_WHEN_BYTES: usize = 4 << 10;
const MAX_PORTION: u64 = 65_536;
const MAX_DELAY_STEPS: u64 = 10_000;

/// What makes tokens of texts.
pub(super) struct Texts<'a> {
    pub(super) engine: &'a PromptEngine,
    /// Tokens with a name of their own, such as `<think>`: they are never cut.
    pub(super) added: HashSet<u32>,
}

/// A field, and what is wrong with it, as the end of a sentence.
type Wrong = (&'static str, String);

pub(super) async fn read(path: &Path, texts: &Texts<'_>) -> anyhow::Result<Vec<Entry>> {
    let name = path.display();
    let mut text = String::new();
    let file = std::fs::File::open(path).with_context(|| name.to_string())?;
    let read = file.take(MAX_FILE_BYTES + 1).read_to_string(&mut text);
    let bytes = read.with_context(|| name.to_string())?;
    ensure!(bytes as u64 <= MAX_FILE_BYTES, "{name}: longer than {MAX_FILE_BYTES} bytes");
    let mut entries = Vec::new();
    for (at, line) in text.lines().enumerate() {
        let number = at + 1;
        if line.trim().is_empty() || line.starts_with('#') {
            continue;
        }
        let value = serde_json::from_str(line).with_context(|| format!("{name}:{number}"))?;
        let Value::Object(fields) = value else {
            bail!("{name}:{number}: an answer is a JSON object");
        };
        let wrong = |(field, wrong)| anyhow::anyhow!("{name}:{number}: `{field}` {wrong}");
        entries.push(entry(fields, texts).await.map_err(wrong)?);
        ensure!(entries.len() <= MAX_ANSWERS, "{name}:{number}: more than {MAX_ANSWERS} answers");
    }
    ensure!(!entries.is_empty(), "{name}: no line has an answer");
    Ok(entries)
}

async fn entry(mut fields: Map<String, Value>, texts: &Texts<'_>) -> Result<Entry, Wrong> {
    let text = string(&mut fields, "text", MAX_TEXT_BYTES)?;
    let text = text.ok_or_else(|| ("text", "is required".to_owned()))?;
    let when = string(&mut fields, "when", MAX_WHEN_BYTES)?;
    if when.as_ref().is_some_and(String::is_empty) {
        return Err(("when", "is empty; leave it out for any prompt".to_owned()));
    }
    let stops = word(&mut fields, "finish", ["stop", "length"])? != Some("length");
    let finish = if stops { Finish::Stop } else { Finish::Length };
    let by_character = word(&mut fields, "pieces", ["tokens", "characters"])? == Some("characters");
    let portions = portions(fields.remove("tokens_per_step"))?;
    let delay_steps = match fields.remove("delay_steps") {
        None => 0,
        Some(value) => count(&value, "delay_steps", 0..=MAX_DELAY_STEPS)?,
    };
    if let Some(name) = fields.keys().next() {
        let shown: String = name.chars().take(64).collect();
        let known = "text, when, finish, tokens_per_step, pieces and delay_steps";
        return Err(("line", format!("has an unknown field `{shown}`; known are {known}")));
    }
    let mut ids = tokens(&text, by_character, texts).await.map_err(|wrong| ("text", wrong))?;
    let doc = texts.engine.doc();
    if stops {
        ids.extend(doc.eos_token_ids.first());
    }
    let longest = doc.context_tokens as usize;
    if ids.is_empty() {
        return Err(("text", "is empty, and no end token follows it".to_owned()));
    }
    if ids.len() >= longest {
        let wrong = format!("is {} tokens, the model's context is {longest}", ids.len());
        return Err(("text", wrong));
    }
    let answer = ScriptedAnswer { ids: ids.into(), finish, portions, delay_steps };
    Ok(Entry { when, answer })
}

fn string(
    fields: &mut Map<String, Value>,
    name: &'static str,
    longest: usize,
) -> Result<Option<String>, Wrong> {
    match fields.remove(name) {
        None => Ok(None),
        Some(Value::String(text)) if text.len() > longest => {
            Err((name, format!("is {} bytes, the limit is {longest}", text.len())))
        }
        Some(Value::String(text)) => Ok(Some(text)),
        Some(_) => Err((name, "is not a string".to_owned())),
    }
}

fn word(
    fields: &mut Map<String, Value>,
    name: &'static str,
    known: [&'static str; 2],
) -> Result<Option<&'static str>, Wrong> {
    let Some(value) = fields.remove(name) else { return Ok(None) };
    match known.into_iter().find(|word| value == *word) {
        Some(word) => Ok(Some(word)),
        None => Err((name, format!("is {:?} or {:?}, not {}", known[0], known[1], shown(&value)))),
    }
}

fn portions(value: Option<Value>) -> Result<Portions, Wrong> {
    let name = "tokens_per_step";
    match value {
        None => Ok(Portions::Of(1)),
        Some(Value::String(word)) if word == "all" => Ok(Portions::All),
        Some(Value::String(word)) if word == "every-cut" => Ok(Portions::EveryCut),
        Some(value) if value.is_number() => Ok(Portions::Of(count(&value, name, 1..=MAX_PORTION)?)),
        Some(value) => {
            Err((name, format!("is a number, \"all\" or \"every-cut\", not {}", shown(&value))))
        }
    }
}

fn count(
    value: &Value,
    name: &'static str,
    range: std::ops::RangeInclusive<u64>,
) -> Result<u32, Wrong> {
    let number = value.as_u64().filter(|number| range.contains(number));
    number.and_then(|number| u32::try_from(number).ok()).ok_or_else(|| {
        let (from, to) = (range.start(), range.end());
        (name, format!("is a whole number from {from} to {to}, not {}", shown(value)))
    })
}

fn shown(value: &Value) -> String {
    value.to_string().chars().take(64).collect()
}

/// The tokens of a text, in which names of special tokens stand for these.
async fn tokens(text: &str, by_character: bool, texts: &Texts<'_>) -> Result<Vec<u32>, String> {
    if text.is_empty() {
        return Ok(Vec::new());
    }
    let Texts { engine, added } = texts;
    let mut ids = encode(text, engine).await?;
    if by_character {
        let mut single = Vec::new();
        for id in ids {
            let (text, bytes) = engine.token_text(id);
            if added.contains(&id) || text.as_bytes() != bytes || text.chars().count() < 2 {
                single.push(id);
                continue;
            }
            for character in text.chars() {
                single.extend(encode(&character.to_string(), engine).await?);
            }
        }
        ids = single;
    }
    let back = engine.decode(&ids, false);
    if back == text {
        return Ok(ids);
    }
    let same = text.chars().zip(back.chars()).take_while(|(one, other)| one == other).count();
    let part = |text: &str| text.chars().skip(same).take(16).collect::<String>();
    Err(format!(
        "does not come back from the tokenizer: from character {} on it gives {:?} for {:?}",
        same + 1,
        part(&back),
        part(text)
    ))
}

async fn encode(text: &str, engine: &PromptEngine) -> Result<Vec<u32>, String> {
    let ids = engine.encode_text(text.to_owned(), false).await;
    ids.map_err(|error| format!("cannot be tokenised: {error}"))
}
