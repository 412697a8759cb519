//! What a worker says about its model: the JSON document behind `Describe` and `Model`.

use serde::Deserialize;

use super::PromptError;

/// Tokenizer, chat template and limits of one model, as a worker sent them.
///
/// Unknown fields are ignored, so that a newer worker may say more than this router reads.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub struct ModelDoc {
    /// `tokenizer.json` of Hugging Face `tokenizers`, as text. Empty once the engine has read it.
    pub tokenizer: String,
    /// Jinja source; `None` for a model without chat.
    #[serde(default)]
    pub chat_template: Option<String>,
    /// Tokens that end an answer.
    #[serde(default)]
    pub eos_token_ids: Vec<u32>,
    /// `bos_token` of the template.
    #[serde(default)]
    pub bos_token: Option<String>,
    /// `eos_token` of the template.
    #[serde(default)]
    pub eos_token: Option<String>,
    /// `pad_token` of the template.
    #[serde(default)]
    pub pad_token: Option<String>,
    /// `unk_token` of the template.
    #[serde(default)]
    pub unk_token: Option<String>,
    /// Longest prompt and answer together.
    pub context_tokens: u32,
    /// Rows of the embedding: valid ids are `0..vocab_size`.
    pub vocab_size: u32,
    /// Sampling defaults of the checkpoint.
    #[serde(default)]
    pub generation: GenerationDefaults,
}

/// The checkpoint's own sampling defaults; `None` where it has none.
#[derive(Debug, Clone, Copy, Default, PartialEq, Deserialize)]
pub struct GenerationDefaults {
    /// At least 0.
    #[serde(default)]
    pub temperature: Option<f64>,
    /// Above 0, at most 1.
    #[serde(default)]
    pub top_p: Option<f64>,
    /// 0 switches it off.
    #[serde(default)]
    pub top_k: Option<u32>,
    /// Above 0; 1 switches it off.
    #[serde(default)]
    pub repetition_penalty: Option<f64>,
}

/// Longest special token that a template may name: every chat may write it as often as it likes. Real ones have tens of bytes.
const MAX_TOKEN_BYTES: usize = 1 << 10;

impl ModelDoc {
    /// Reads and checks the document.
    ///
    /// # Errors
    /// [`PromptError::Doc`] says which field is wrong, or at which line and column the JSON breaks.
    pub fn parse(json: &[u8]) -> Result<Self, PromptError> {
        let doc: Self =
            serde_json::from_slice(json).map_err(|e| PromptError::Doc(e.to_string()))?;
        doc.check().map_err(PromptError::Doc)?;
        Ok(doc)
    }

    fn check(&self) -> Result<(), String> {
        if self.tokenizer.is_empty() {
            return Err("`tokenizer` is empty".to_owned());
        }
        if self.context_tokens == 0 {
            return Err("`context_tokens` is 0".to_owned());
        }
        if self.vocab_size == 0 {
            return Err("`vocab_size` is 0".to_owned());
        }
        if let Some(id) = self.eos_token_ids.iter().find(|id| **id >= self.vocab_size) {
            let size = self.vocab_size;
            return Err(format!("`eos_token_ids` holds {id}, but `vocab_size` is {size}"));
        }
        for (name, token) in [
            ("bos_token", &self.bos_token),
            ("eos_token", &self.eos_token),
            ("pad_token", &self.pad_token),
            ("unk_token", &self.unk_token),
        ] {
            if let Some(len) = token.as_ref().map(String::len).filter(|len| *len > MAX_TOKEN_BYTES)
            {
                return Err(format!(
                    "`{name}` is {len} bytes long, and a special token has at most {MAX_TOKEN_BYTES}"
                ));
            }
        }
        let g = &self.generation;
        for (name, value, ok) in [
            ("temperature", g.temperature, (|x| x >= 0.0) as fn(f64) -> bool),
            ("top_p", g.top_p, |x| x > 0.0 && x <= 1.0),
            ("repetition_penalty", g.repetition_penalty, |x| x > 0.0),
        ] {
            if let Some(x) = value.filter(|x| !x.is_finite() || !ok(*x)) {
                return Err(format!("`generation.{name}` is {x}, which is out of range"));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error(json: &str) -> String {
        ModelDoc::parse(json.as_bytes()).unwrap_err().to_string()
    }

    #[test]
    fn errors_name_the_field() {
        assert!(error("{").contains("line 1"));
        assert!(error(r#"{"tokenizer":"{}"}"#).contains("context_tokens"));
        let doc = r#"{"tokenizer":"{}","context_tokens":8,"vocab_size":4"#;
        assert!(error(&format!(r#"{doc},"eos_token_ids":[4]}}"#)).contains("eos_token_ids"));
        assert!(error(&format!(r#"{doc},"eos_token_ids":[-1]}}"#)).contains("-1"));
        assert!(error(&format!(r#"{doc},"generation":{{"top_p":0}}}}"#)).contains("top_p"));
        let long = "x".repeat(2_000);
        assert!(error(&format!(r#"{doc},"bos_token":"{long}"}}"#)).contains("`bos_token` is 2000"));
        assert!(ModelDoc::parse(format!(r#"{doc},"later":1}}"#).as_bytes()).is_ok());
    }
}
