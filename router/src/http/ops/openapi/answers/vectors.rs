//! Answers that are made of vectors.

use serde_json::{Map, Value};

use super::object;
use crate::http::ops::openapi::json::json;

pub(super) fn schemas() -> Map<String, Value> {
    let text = json!({"type": "string"});
    let count = json!({"type": "integer", "minimum": 0});
    let number = json!({"type": "number"});
    let usage = object(&json!({
        "prompt_tokens": count, "total_tokens": count,
        "prompt_tokens_details": object(&json!({"cached_tokens": count})),
    }));
    let list = |about: &str, name: &str, item: Value| {
        let mut list = object(&json!({
            "id": text, "object": {"const": "list"}, "created": count, "model": text, "usage": usage,
        }));
        list["properties"][name] = json!({"type": "array", "items": item});
        list["required"].as_array_mut().into_iter().for_each(|names| names.push(name.into()));
        list["description"] = about.into();
        list
    };
    let vector = json!({"anyOf": [{"type": "array", "items": number}, text]});
    let embedding =
        object(&json!({"object": {"const": "embedding"}, "index": count, "embedding": vector}));
    let mut ranked = object(&json!({"index": count, "relevance_score": number}));
    ranked["properties"]["document"] = object(&json!({"text": text}));
    let score = object(&json!({"object": {"const": "score"}, "index": count, "score": number}));
    let schemas = [
        ("Embeddings", list("A vector of each text, in order.", "data", embedding)),
        ("Ranking", list("Documents, the one that is most alike first.", "results", ranked)),
        ("Scores", list("A score of each pair, in order.", "data", score)),
    ];
    schemas.into_iter().map(|(name, schema)| (name.to_owned(), schema)).collect()
}
