//! Texts as vectors, and how alike they are.

use serde_json::Value;

use super::FieldKind::{Boolean, Integer, Other, Text, Words};
use super::{Field, ObjectShape, U32, field, must, text, token_id};
use crate::http::ops::openapi::json::json;

pub(in super::super) const EMBEDDINGS: ObjectShape = ObjectShape::new(
    "EmbeddingRequest",
    "Texts whose vectors are asked for.",
    &[
        MODEL,
        &[
            must(
                "input",
                Other(|| {
                    let ids = json!({"type": "array", "items": token_id(), "minItems": 1});
                    json!({"anyOf": [
                        text(),
                        {"type": "array", "items": text(), "minItems": 1, "maxItems": 2048},
                        ids,
                        {"type": "array", "items": ids, "minItems": 1, "maxItems": 2048},
                    ]})
                }),
                "A text or an array of token ids, or an array of either.",
            ),
            field(
                "encoding_format",
                Words(&["float", "base64"]),
                "How values are sent: as numbers, or as little-endian float32 in base64.",
            ),
            field(
                "dimensions",
                Integer(1, U32),
                "So many values of each vector, of its beginning; at most what the model has.",
            ),
            field("normalize", Boolean, "Vectors have the length 1. True where left out."),
        ],
        POOLING,
    ],
);

pub(in super::super) const RERANK: ObjectShape = ObjectShape::new(
    "RerankRequest",
    "Documents to put in order of how alike they are to a query.",
    &[
        MODEL,
        &[
            must("query", Text, "A text."),
            must("documents", Other(documents), "1 to 2,047 texts, or objects with one."),
            field("top_n", Integer(1, U32), "Only the best ones; all where left out."),
            field("return_documents", Boolean, "With their texts. True where left out."),
        ],
        POOLING,
    ],
);

pub(in super::super) const SCORE: ObjectShape = ObjectShape::new(
    "ScoreRequest",
    "Texts to compare in pairs, or one with all others.",
    &[
        MODEL,
        &[
            must("text_1", Other(texts), "A text, or as many as in `text_2`."),
            must("text_2", Other(texts), "A text, or several."),
        ],
        POOLING,
    ],
);

const MODEL: &[Field] = &[must("model", Text, "A served name.")];

const POOLING: &[Field] = &[
    field(
        "pooling",
        Words(&["last", "mean"]),
        "The hidden state of the last token, which is the default, or the mean of all.",
    ),
    field(
        "truncate_prompt_tokens",
        Integer(-1, U32),
        "Only the last so many tokens of each text; -1: what fits the context.",
    ),
    field(
        "add_special_tokens",
        Boolean,
        "With what the tokenizer puts around a text. True where left out.",
    ),
    field("priority", Integer(-127, 127), "Lower goes first."),
    field("cache_salt", Text, "Requests with other salts share no prefix cache."),
    field("user", Text, "Names the session, for the routing."),
];

fn documents() -> Value {
    let object = json!({
        "type": "object", "properties": {"text": text()}, "required": ["text"],
        "additionalProperties": {"type": "null"},
    });
    json!({
        "type": "array", "items": {"anyOf": [text(), object]}, "minItems": 1, "maxItems": 2047,
    })
}

fn texts() -> Value {
    json!({"anyOf": [text(), {"type": "array", "items": text(), "minItems": 1}]})
}
