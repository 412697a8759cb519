//! What a tokenizer does to a text before its model sees it, as flat lists of steps: [`super::length`] and
//! [`super::seams`] ask what each step can do.

use serde_json::Value;
use tokenizers::Tokenizer;

/// The steps before the model.
#[derive(Debug)]
pub(super) struct Pipeline {
    /// Each with its `type` and options, as in `tokenizer.json`.
    pub(super) normalizers: Vec<Value>,
    pub(super) pre_tokenizers: Vec<Value>,
}

impl Pipeline {
    pub(super) fn new(tokenizer: &Tokenizer) -> Self {
        let normalizer = tokenizer.get_normalizer().and_then(|n| serde_json::to_value(n).ok());
        let splits = tokenizer.get_pre_tokenizer().and_then(|p| serde_json::to_value(p).ok());
        Self {
            normalizers: flat(normalizer, "normalizers"),
            pre_tokenizers: flat(splits, "pretokenizers"),
        }
    }

    /// The model sees bytes, each as a character of its own.
    pub(super) fn works_on_bytes(&self) -> bool {
        self.pre_tokenizers.iter().any(|step| kind(step) == "ByteLevel")
    }
}

/// What a step is.
pub(super) fn kind(step: &Value) -> &str {
    step["type"].as_str().unwrap_or("?")
}

/// The string, not the regular expression, that a `Replace` or a `Split` looks for.
pub(super) fn string_pattern(step: &Value) -> Option<&str> {
    step["pattern"]["String"].as_str()
}

fn flat(step: Option<Value>, inner: &str) -> Vec<Value> {
    let Some(mut step) = step else { return Vec::new() };
    if kind(&step) != "Sequence" {
        return vec![step];
    }
    match step.get_mut(inner).and_then(Value::as_array_mut) {
        Some(steps) => {
            let steps = std::mem::take(steps).into_iter();
            steps.flat_map(|step| flat(Some(step), inner)).collect()
        }
        None => vec![step], // of no known type: whoever asks knows nothing of it
    }
}
