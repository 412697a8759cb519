//! Texts to continue, texts and token ids to change into each other, and how a worker leaves.

use super::FieldKind::{Array, Boolean, Integer, Other, SomeObjects, Text};
use super::chat::{CHAT_PROMPT, MESSAGE};
use super::generation::{GENERATION, HARMLESS};
use super::{Field, ObjectShape, U32, field, must, text, token_id};
use crate::http::ops::openapi::json::json;

pub(in super::super) const COMPLETION: ObjectShape = ObjectShape::new(
    "CompletionRequest",
    "Texts to continue.",
    &[
        &[must(
            "prompt",
            Other(|| {
                let ids = json!({"type": "array", "items": token_id(), "minItems": 1});
                json!({"anyOf": [
                    text(),
                    {"type": "array", "items": text(), "minItems": 1},
                    ids,
                    {"type": "array", "items": ids, "minItems": 1},
                ]})
            }),
            "A text or an array of token ids, or an array of either.",
        )],
        GENERATION,
        &[
            field(
                "max_tokens",
                Integer(0, U32),
                "The longest answer, 16 where left out. 0 only with `echo`.",
            ),
            field("echo", Boolean, "The answer begins with the prompt."),
            field(
                "logprobs",
                Integer(0, 20),
                "Alternatives of each token, whose log-probabilities are sent.",
            ),
            field(
                "add_special_tokens",
                Boolean,
                "With what the tokenizer puts around a text. True where left out.",
            ),
            field("best_of", Integer(0, U32), "As many as `n`."),
        ],
        HARMLESS,
    ],
);

pub(in super::super) const TOKENIZE: ObjectShape = ObjectShape {
    name: "TokenizeRequest",
    about: "A text or a chat to cut into tokens: `prompt` or `messages`.",
    fields: &[
        MODEL_IF_SEVERAL,
        &[
            field("prompt", Text, "A text."),
            field("messages", SomeObjects(&MESSAGE), "A chat."),
            field("return_token_strs", Boolean, "Send the text of each token, too."),
        ],
        CHAT_PROMPT,
    ],
    as_chat: &[],
    one_of: &["prompt", "messages"],
};

pub(in super::super) const DETOKENIZE: ObjectShape = ObjectShape::new(
    "DetokenizeRequest",
    "Tokens whose text is asked for.",
    &[MODEL_IF_SEVERAL, &[must("tokens", Array(token_id), "Token ids.")]],
);

const MODEL_IF_SEVERAL: &[Field] =
    &[field("model", Text, "A served name; may be left out where there is only one.")];

pub(in super::super) const DRAIN: ObjectShape = ObjectShape::new(
    "DrainRequest",
    "How a worker leaves.",
    &[&[
        field(
            "budget_ms",
            Integer(0, 3_600_000),
            "Running answers may go on so long; 30,000 where left out.",
        ),
        field(
            "hand_over",
            Integer(0, 65_536),
            "Hot blocks that go to other workers; 4,096 where left out.",
        ),
    ]],
);
