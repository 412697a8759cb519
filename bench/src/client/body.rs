//! The JSON bodies that are sent.

use bytes::Bytes;
use serde::Serialize;
use serde_json::Value;

use crate::client::Request;

/// What is asked.
#[derive(Debug, Clone, Serialize, PartialEq)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Prompt {
    #[serde(rename = "prompt")]
    Text(String),
    #[serde(rename = "prompt")]
    Tokens(Vec<u32>),
    Messages(Vec<Value>),
}

/// What all requests of a run have in common.
#[derive(Debug, Clone)]
pub(crate) struct Asker {
    pub(crate) model: String,
    pub(crate) priority: Option<i32>,
    /// Ask for the whole answer at once.
    pub(crate) unary: bool,
}

#[derive(Serialize)]
struct Body<'a> {
    model: &'a str,
    #[serde(flatten)]
    prompt: &'a Prompt,
    max_tokens: u32,
    ignore_eos: bool,
    temperature: u32,
    stream: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    stream_options: Option<StreamOptions>,
    #[serde(skip_serializing_if = "Option::is_none")]
    priority: Option<i32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    tools: Option<&'a Value>,
    #[serde(skip_serializing_if = "Option::is_none")]
    tool_choice: Option<&'static str>,
}

#[derive(Serialize)]
struct StreamOptions {
    include_usage: bool,
}

impl Asker {
    /// Tools are shown to the model, but it is told not to call them: the recorded answers come back as text.
    pub(crate) fn request(
        &self,
        prompt: &Prompt,
        tools: Option<&Value>,
        max_tokens: u32,
        session: Option<String>,
    ) -> Request {
        let path = match prompt {
            Prompt::Text(_) | Prompt::Tokens(_) => "/v1/completions",
            Prompt::Messages(_) => "/v1/chat/completions",
        };
        let body = Body {
            model: &self.model,
            prompt,
            max_tokens,
            ignore_eos: true, // the length is the trace's, not the model's
            temperature: 0,
            stream: !self.unary,
            stream_options: (!self.unary).then_some(StreamOptions { include_usage: true }),
            priority: self.priority,
            tools,
            tool_choice: tools.map(|_| "none"),
        };
        let body = serde_json::to_vec(&body).expect("text and numbers become JSON");
        Request { path, body: Bytes::from(body), session, streams: !self.unary }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn body(prompt: &Prompt, tools: Option<&Value>) -> (Value, Request) {
        let asker = Asker { model: "m".into(), priority: Some(-1), unary: false };
        let request = asker.request(prompt, tools, 5, Some("s".into()));
        (serde_json::from_slice(&request.body).unwrap(), request)
    }

    #[test]
    fn each_kind_of_prompt_has_its_endpoint_and_field() {
        let (tokens, request) = body(&Prompt::Tokens(vec![3, 4]), None);
        assert_eq!(request.path, "/v1/completions");
        assert_eq!(tokens["prompt"], json!([3, 4]));
        assert_eq!((&tokens["max_tokens"], &tokens["priority"]), (&json!(5), &json!(-1)));
        assert_eq!(tokens["stream_options"]["include_usage"], true);
        assert!(tokens.get("tools").is_none());
        let messages = vec![json!({"role": "user", "content": "x"})];
        let tools = json!([{"type": "function"}]);
        let (chat, request) = body(&Prompt::Messages(messages), Some(&tools));
        assert_eq!(request.path, "/v1/chat/completions");
        assert_eq!(chat["messages"][0]["content"], "x");
        assert_eq!(chat["tool_choice"], "none");
        assert_eq!(body(&Prompt::Text("t".into()), None).0["prompt"], "t");
    }
}
