//! What a request for vectors asks: from the body's fields to texts, and how they become vectors.

use serde_json::Value;

use crate::core::frame::{Pooling, Word as _};
use crate::error::RouteError;
use crate::http::parse::fields::{Fields, bad, clip, wrong_type};
use crate::http::parse::params;
use crate::http::parse::prompts::{bare, prompts};
use crate::http::parse::token_ids::{Ids, IdsField};
use crate::prompt::Prompt;
use crate::request::Truncation;

/// Texts of one request: OpenAI's own bound.
const MAX_INPUTS: usize = 2048;

/// Where `/v1/embeddings` has texts or token ids.
pub(in crate::http) const INPUT: IdsField = IdsField { name: "input", most: MAX_INPUTS };

/// How texts become vectors.
#[derive(Debug)]
pub(super) struct PoolingParams {
    pub(super) pooling: Pooling,
    pub(super) priority: i8,
    pub(super) salt: Vec<u8>,
    pub(super) session: Option<String>,
    pub(super) truncation: Option<Truncation>,
    /// With what the tokenizer puts around a text.
    special: bool,
}

/// A checked request of `/v1/embeddings`.
#[derive(Debug)]
pub(in crate::http) struct EmbeddingRequest {
    pub(super) inputs: Vec<Prompt>,
    pub(super) how: PoolingParams,
    pub(super) base64: bool,
    /// So many values of each vector, of its beginning.
    pub(super) dimensions: Option<u32>,
    /// Vectors have the length 1.
    pub(super) normalize: bool,
}

/// A checked request of `/v1/rerank`.
#[derive(Debug)]
pub(in crate::http) struct RerankRequest {
    pub(super) query: String,
    pub(super) documents: Vec<String>,
    pub(super) top_n: usize,
    pub(super) returns_documents: bool,
    pub(super) how: PoolingParams,
}

/// A checked request of `/v1/score`: each text with its partner, or one with all.
#[derive(Debug)]
pub(in crate::http) struct ScoreRequest {
    pub(super) first: Vec<String>,
    pub(super) second: Vec<String>,
    pub(super) how: PoolingParams,
}

/// Checks a body whose `model` was taken; `input` was read apart from the other fields.
///
/// # Errors
/// `BadRequest` about the first wrong field.
pub(in crate::http) fn embeddings(
    mut fields: Fields,
    input: Option<Ids>,
    vocab_size: u32,
) -> Result<EmbeddingRequest, RouteError> {
    let inputs = prompts(INPUT, fields.require(INPUT.name, input)?, vocab_size)?;
    let how = params(&mut fields)?;
    let base64 = match fields.string("encoding_format")?.as_deref() {
        None | Some("float") => false,
        Some("base64") => true,
        Some(_) => {
            return Err(bad(
                "encoding_format",
                "`encoding_format` must be \"float\" or \"base64\"",
            ));
        }
    };
    let dimensions = fields.count("dimensions", 1)?;
    let normalize = fields.boolean("normalize")?.unwrap_or(true);
    fields.finish()?;
    for (i, input) in inputs.iter().enumerate() {
        if let Prompt::Text(text) = input {
            not_empty(text, || {
                if inputs.len() == 1 { "input".into() } else { format!("input[{i}]") }
            })?;
        }
    }
    let inputs = inputs.into_iter().map(|input| how.prompt(input)).collect();
    Ok(EmbeddingRequest { inputs, how, base64, dimensions, normalize })
}

/// Checks a body whose `model` was taken.
///
/// # Errors
/// `BadRequest` about the first wrong field.
pub(in crate::http) fn rerank(mut fields: Fields) -> Result<RerankRequest, RouteError> {
    let query = fields.string("query")?;
    let query = fields.require("query", query)?;
    not_empty(&query, || "query".into())?;
    let documents = fields.array("documents")?;
    let documents = fields.require("documents", documents)?;
    if documents.is_empty() {
        return Err(bad("documents", "`documents` must not be an empty array"));
    }
    // the query has a vector, too
    check_count("documents", documents.len(), MAX_INPUTS - 1)?;
    let documents = documents.into_iter().enumerate().map(|(i, document)| text_of(i, document));
    let documents = documents.collect::<Result<Vec<_>, _>>()?;
    let top_n = fields.count("top_n", 1)?.map_or(usize::MAX, |n| n as usize);
    let returns_documents = fields.boolean("return_documents")?.unwrap_or(true);
    let how = params(&mut fields)?;
    fields.finish()?;
    Ok(RerankRequest { query, documents, top_n, returns_documents, how })
}

/// Checks a body whose `model` was taken.
///
/// # Errors
/// `BadRequest` about the first wrong field.
pub(in crate::http) fn score(mut fields: Fields) -> Result<ScoreRequest, RouteError> {
    let first = texts(&mut fields, "text_1")?;
    let second = texts(&mut fields, "text_2")?;
    if first.len() != 1 && first.len() != second.len() {
        let (one, two) = (first.len(), second.len());
        let message = format!(
            "`text_1` holds {one} texts and `text_2` {two}: send as many of both, or one `text_1`"
        );
        return Err(bad("text_1", message));
    }
    check_count("text_2", first.len() + second.len(), MAX_INPUTS)?;
    let how = params(&mut fields)?;
    fields.finish()?;
    Ok(ScoreRequest { first, second, how })
}

fn params(fields: &mut Fields) -> Result<PoolingParams, RouteError> {
    let pooling = match fields.string("pooling")? {
        None => Pooling::Last,
        Some(word) => Pooling::named(&word)
            .ok_or_else(|| bad("pooling", "`pooling` must be \"last\" or \"mean\""))?,
    };
    Ok(PoolingParams {
        pooling,
        priority: params::priority(fields)?,
        salt: params::salt(fields)?,
        session: fields.string("user")?,
        truncation: params::truncation(fields)?,
        special: fields.boolean("add_special_tokens")?.unwrap_or(true),
    })
}

impl PoolingParams {
    /// A text as the model is to read it.
    pub(super) fn text(&self, text: String) -> Prompt {
        self.prompt(Prompt::Text(text))
    }

    fn prompt(&self, mut prompt: Prompt) -> Prompt {
        if !self.special {
            bare(&mut prompt);
        }
        prompt
    }
}

/// A document is a text, or an object with one.
fn text_of(i: usize, document: Value) -> Result<String, RouteError> {
    let at = || format!("documents[{i}]");
    let text = match document {
        Value::String(text) => text,
        Value::Object(mut fields) => {
            let text = fields.remove("text").filter(|text| !text.is_null());
            if let Some((name, _)) = fields.iter().find(|(_, value)| !value.is_null()) {
                let path = format!("{}.{}", at(), clip(name));
                let message = format!("unrecognized request argument: `{path}`");
                return Err(bad(path, message));
            }
            match text {
                Some(Value::String(text)) => text,
                Some(other) => {
                    return Err(wrong_type(format!("{}.text", at()), "a string", &other));
                }
                None => {
                    let path = format!("{}.text", at());
                    let message = format!("`{path}` is required");
                    return Err(bad(path, message));
                }
            }
        }
        other @ (Value::Null | Value::Bool(_) | Value::Number(_) | Value::Array(_)) => {
            return Err(wrong_type(at(), "a string or an object with `text`", &other));
        }
    };
    not_empty(&text, at)?;
    Ok(text)
}

/// A text or several.
fn texts(fields: &mut Fields, name: &str) -> Result<Vec<String>, RouteError> {
    let value = fields.take(name);
    let texts = match fields.require(name, value)? {
        Value::String(text) => {
            not_empty(&text, || name.into())?;
            return Ok(vec![text]);
        }
        Value::Array(texts) => texts,
        other @ (Value::Null | Value::Bool(_) | Value::Number(_) | Value::Object(_)) => {
            return Err(wrong_type(name, "a string or an array of strings", &other));
        }
    };
    if texts.is_empty() {
        return Err(bad(name, format!("`{name}` must not be an empty array")));
    }
    check_count(name, texts.len(), MAX_INPUTS)?;
    let texts = texts.into_iter().enumerate().map(|(i, text)| {
        let at = || format!("{name}[{i}]");
        let Value::String(text) = text else { return Err(wrong_type(at(), "a string", &text)) };
        not_empty(&text, at)?;
        Ok(text)
    });
    texts.collect()
}

fn check_count(name: &str, count: usize, most: usize) -> Result<(), RouteError> {
    if count <= most {
        return Ok(());
    }
    Err(bad(name, format!("`{name}` makes {count} texts, the limit is {most}")))
}

fn not_empty(text: &str, at: impl FnOnce() -> String) -> Result<(), RouteError> {
    if !text.is_empty() {
        return Ok(());
    }
    let at = at();
    let message = format!("`{at}` must not be empty: a text without tokens has no vector");
    Err(bad(at, message))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::http::parse::json;
    use crate::limits::memory::MemoryPool;

    fn embedded(body: &Value) -> Result<EmbeddingRequest, RouteError> {
        let mut memory = MemoryPool::private(1 << 20).share();
        let document = json::parse(body.to_string().as_bytes(), Some(INPUT), &mut memory)?;
        embeddings(Fields::of_body(document.value)?, document.ids, 100)
    }

    fn param<T: std::fmt::Debug>(found: Result<T, RouteError>, body: &Value) -> String {
        match found {
            Err(RouteError::BadRequest { param: Some(param), .. }) => param,
            other => panic!("{body}: {other:?}"),
        }
    }

    #[test]
    fn every_form_of_input_is_read() {
        for (input, count) in [
            (json!("a"), 1),
            (json!(["a", "b"]), 2),
            (json!([1, 2, 99]), 1),
            (json!([[1], [2, 3]]), 2),
            (json!(vec!["a"; MAX_INPUTS]), MAX_INPUTS),
        ] {
            assert_eq!(embedded(&json!({ "input": input })).unwrap().inputs.len(), count);
        }
        let how = embedded(&json!({"input": "a", "pooling": "mean", "priority": 3})).unwrap().how;
        assert_eq!((how.pooling, how.priority), (Pooling::Mean, -3));
        let bare = embedded(&json!({"input": "a", "add_special_tokens": false})).unwrap();
        assert!(matches!(bare.inputs[..], [Prompt::Bare(_)]));
    }

    #[test]
    fn each_wrong_field_of_embeddings_is_named() {
        for (body, want) in [
            (json!({}), "input"),
            (json!({"input": null}), "input"),
            (json!({"input": 7}), "input"),
            (json!({"input": []}), "input"),
            (json!({"input": ""}), "input"),
            (json!({"input": ["a", ""]}), "input[1]"),
            (json!({"input": ["a", 1]}), "input[1]"),
            (json!({"input": [1, 100]}), "input[1]"),
            (json!({"input": [[1], []]}), "input[1]"),
            (json!({"input": vec!["a"; MAX_INPUTS + 1]}), "input"),
            (json!({"input": "a", "encoding_format": "int8"}), "encoding_format"),
            (json!({"input": "a", "encoding_format": 1}), "encoding_format"),
            (json!({"input": "a", "dimensions": 0}), "dimensions"),
            (json!({"input": "a", "dimensions": 1.5}), "dimensions"),
            (json!({"input": "a", "pooling": "max"}), "pooling"),
            (json!({"input": "a", "normalize": "yes"}), "normalize"),
            (json!({"input": "a", "truncate_prompt_tokens": 0}), "truncate_prompt_tokens"),
            (json!({"input": "a", "temperature": 1}), "temperature"),
        ] {
            assert_eq!(param(embedded(&body), &body), want);
        }
    }

    #[test]
    fn documents_are_texts_or_objects_with_one() {
        let read = |body: &Value| rerank(Fields::of_body(body.clone()).unwrap());
        let body = json!({"query": "q", "documents": ["a", {"text": "b"}], "top_n": 1});
        let request = read(&body).unwrap();
        assert_eq!((request.documents, request.top_n), (vec!["a".to_owned(), "b".to_owned()], 1));
        for (body, want) in [
            (json!({"documents": ["a"]}), "query"),
            (json!({"query": "", "documents": ["a"]}), "query"),
            (json!({"query": ["q"], "documents": ["a"]}), "query"),
            (json!({"query": "q"}), "documents"),
            (json!({"query": "q", "documents": []}), "documents"),
            (json!({"query": "q", "documents": "a"}), "documents"),
            (json!({"query": "q", "documents": [1]}), "documents[0]"),
            (json!({"query": "q", "documents": ["a", ""]}), "documents[1]"),
            (json!({"query": "q", "documents": [{}]}), "documents[0].text"),
            (json!({"query": "q", "documents": [{"text": "a", "x": 1}]}), "documents[0].x"),
            (json!({"query": "q", "documents": vec!["a"; MAX_INPUTS]}), "documents"),
            (json!({"query": "q", "documents": ["a"], "top_n": 0}), "top_n"),
            (json!({"query": "q", "documents": ["a"], "return_documents": 1}), "return_documents"),
        ] {
            assert_eq!(param(read(&body), &body), want);
        }
    }

    #[test]
    fn texts_are_compared_in_pairs_or_one_with_all() {
        let read = |body: &Value| score(Fields::of_body(body.clone()).unwrap());
        for (one, two) in [
            (json!("a"), json!("b")),
            (json!("a"), json!(["b", "c"])),
            (json!(["a", "b"]), json!(["c", "d"])),
        ] {
            read(&json!({"text_1": one, "text_2": two})).unwrap();
        }
        for (body, want) in [
            (json!({"text_2": "b"}), "text_1"),
            (json!({"text_1": "a"}), "text_2"),
            (json!({"text_1": ["a", "b"], "text_2": "c"}), "text_1"),
            (json!({"text_1": ["a", "b", "c"], "text_2": ["c", "d"]}), "text_1"),
            (json!({"text_1": "a", "text_2": []}), "text_2"),
            (json!({"text_1": "a", "text_2": ["b", 1]}), "text_2[1]"),
            (json!({"text_1": "a", "text_2": {"x": 1}}), "text_2"),
            (json!({"text_1": "a", "text_2": vec!["a"; MAX_INPUTS]}), "text_2"),
        ] {
            assert_eq!(param(read(&body), &body), want);
        }
    }
}
