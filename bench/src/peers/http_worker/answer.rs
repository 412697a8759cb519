//! The bytes of answers, made once: the text of every token is the same.

use std::rc::Rc;

use serde_json::json;

use super::request::{Asked, Head, Unreadable, words};

/// The text of a token.
const TOKEN: &str = " water";

/// What an answer is put together from.
pub(super) struct Parts {
    /// Goes before the first token of a stream.
    pub(super) head: Rc<[u8]>,
    /// A token of a stream; `None` where the whole answer comes at once.
    pub(super) event: Option<Rc<[u8]>>,
    /// Goes after the last token: of a whole answer, all of it.
    pub(super) end: Vec<u8>,
}

/// Answers of one model.
pub(super) struct Answers {
    model: String,
    head: Rc<[u8]>,
    chat_event: Rc<[u8]>,
    text_event: Rc<[u8]>,
}

impl Answers {
    pub(super) fn new(model: &str) -> Self {
        let event = |choice: &str, object: &str| {
            chunk(&format!(
                r#"data: {{"id":"chatcmpl-00000000000000000000000000000000","object":"{object}","created":1700000000,"model":"{model}","choices":[{{"index":0,{choice},"logprobs":null,"finish_reason":null}}]}}

"#,
            ))
        };
        Self {
            model: model.to_owned(),
            head: Rc::from(STREAM.as_bytes()),
            chat_event: event(
                &format!(r#""delta":{{"content":"{TOKEN}"}}"#),
                "chat.completion.chunk",
            ),
            text_event: event(&format!(r#""text":"{TOKEN}""#), "text_completion"),
        }
    }

    /// The parts of one answer.
    pub(super) fn parts(&self, asked: &Asked<'_>, prompt_tokens: u32, cached_tokens: u32) -> Parts {
        let usage = json!({
            "prompt_tokens": prompt_tokens,
            "completion_tokens": asked.max_tokens,
            "total_tokens": u64::from(prompt_tokens) + u64::from(asked.max_tokens),
            "prompt_tokens_details": {"cached_tokens": cached_tokens},
        });
        if !asked.stream {
            let text = TOKEN.repeat(asked.max_tokens as usize);
            let choice = if asked.chat {
                json!({"message": {"role": "assistant", "content": text}})
            } else {
                json!({"text": text})
            };
            return Parts { head: Rc::from([]), event: None, end: self.whole(choice, &usage) };
        }
        let mut end = Vec::new();
        if asked.usage {
            let last = json!({
                "id": "chatcmpl-0", "object": "chat.completion.chunk", "created": 1_700_000_000,
                "model": self.model, "choices": [], "usage": usage,
            });
            end.extend_from_slice(&chunk(&format!("data: {last}\n\n")));
        }
        end.extend_from_slice(&chunk("data: [DONE]\n\n"));
        end.extend_from_slice(b"0\r\n\r\n");
        let event = if asked.chat { &self.chat_event } else { &self.text_event };
        Parts { head: Rc::clone(&self.head), event: Some(Rc::clone(event)), end }
    }

    fn whole(&self, mut choice: serde_json::Value, usage: &serde_json::Value) -> Vec<u8> {
        choice["index"] = json!(0);
        choice["finish_reason"] = json!("length");
        let body = json!({
            "id": "chatcmpl-0", "object": "chat.completion", "created": 1_700_000_000,
            "model": self.model, "choices": [choice], "usage": usage,
        });
        response("200 OK", &body)
    }

    /// What routers ask before they send anything here.
    pub(super) fn about(&self, head: &Head) -> Vec<u8> {
        let body = match (head.method.as_str(), head.path.as_str()) {
            ("GET", "/v1/models") => {
                json!({"object": "list", "data": [{"id": self.model, "object": "model", "created": 0,
                    "owned_by": "headrace", "max_model_len": 1 << 20}]})
            }
            ("GET", "/health" | "/health_generate") => json!({}),
            ("GET", "/get_model_info" | "/model_info") => json!({
                "model_path": self.model, "tokenizer_path": self.model, "is_generation": true,
            }),
            ("GET", "/get_server_info" | "/server_info") => {
                json!({"model_path": self.model, "served_model_name": self.model})
            }
            _ => return response("404 Not Found", &json!({"error": {"message": "not here"}})),
        };
        response("200 OK", &body)
    }
}

const STREAM: &str = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n\
    cache-control: no-cache\r\ntransfer-encoding: chunked\r\n\r\n";

/// One chunk of a body.
fn chunk(text: &str) -> Rc<[u8]> {
    Rc::from(format!("{:x}\r\n{text}\r\n", text.len()).into_bytes())
}

fn response(status: &str, body: &serde_json::Value) -> Vec<u8> {
    let body = body.to_string();
    let length = body.len();
    let head = "content-type: application/json\r\ncontent-length:";
    format!("HTTP/1.1 {status}\r\n{head} {length}\r\n\r\n{body}").into_bytes()
}

/// The end of a connection.
pub(super) fn refusal(why: Unreadable) -> Vec<u8> {
    let status = match why {
        Unreadable::NotHttp | Unreadable::NotJson => "400 Bad Request",
        Unreadable::NoLength => "411 Length Required",
        Unreadable::TooLong => "413 Content Too Large",
    };
    response(status, &json!({"error": {"message": why.to_string(), "code": &status[..3]}}))
}

/// The prompt's tokens: the number of each word, as two prompts with the same beginning have the same first tokens.
pub(super) fn tokens(asked: &Asked<'_>) -> Vec<u8> {
    let id = |word: &str| {
        let mix = |hash: u32, byte: u8| (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193);
        word.bytes().fold(0x811c_9dc5, mix) % 32_000 // FNV-1a
    };
    let ids: Vec<u32> = asked.text.split_ascii_whitespace().map(id).collect();
    let count = words(&asked.text);
    let body = json!({"tokens": ids, "token_ids": ids, "count": count, "max_model_len": 1 << 20});
    response("200 OK", &body)
}
