//! Templates, tokeniser and detokeniser against what `transformers` and `tokenizers` make of the same input.

use std::sync::Arc;

use headrace_router::config::STRETCH_BYTES;
use headrace_router::error::RouteError;
use headrace_router::prompt::{
    ChatPrompt, ModelDoc, PrefixCache, Prompt, PromptEngine, PromptError, TokenizePool,
};
use serde_json::{Value, json};
use tokenizers::Tokenizer;

mod answers;
mod cache;
mod hostile;
mod variants;

use variants::edited;

const BYTE_LEVEL: &str = include_str!("../data/tokenizer_byte_level.json");
const BYTE_FALLBACK: &str = include_str!("../data/tokenizer_byte_fallback.json");
const WORD_PIECE: &str = include_str!("../data/tokenizer_word_piece.json");
const TEMPLATES: &str = include_str!("../data/chat_templates.json");

const CHATML: &str = "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}\
    {% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}";

fn doc(tokenizer: &str, template: Option<&str>) -> ModelDoc {
    let json = json!({
        "tokenizer": tokenizer,
        "chat_template": template,
        "bos_token": "<s>",
        "eos_token": "</s>",
        "context_tokens": 2_000_000,
        "vocab_size": 200_000,
    });
    ModelDoc::parse(json.to_string().as_bytes()).unwrap()
}

fn pool() -> Arc<TokenizePool> {
    Arc::new(TokenizePool::new(1, 64).unwrap())
}

fn engine(tokenizer: &str, template: Option<&str>) -> PromptEngine {
    PromptEngine::new(doc(tokenizer, template), pool()).unwrap()
}

fn block_on<T>(future: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_current_thread().build().unwrap().block_on(future)
}

fn chat(messages: &Value) -> ChatPrompt {
    ChatPrompt {
        messages: messages.as_array().unwrap().clone(),
        add_generation_prompt: true,
        ..ChatPrompt::default()
    }
}

fn bad_request(result: Result<impl std::fmt::Debug, RouteError>) -> (String, String) {
    let error = result.unwrap_err();
    let RouteError::BadRequest { param: Some(param), message } = error else {
        panic!("{error:?}");
    };
    (param, message)
}

// Templates

#[test]
fn templates_render_as_in_transformers() {
    let data: Value = serde_json::from_str(TEMPLATES).unwrap();
    let mut failures = Vec::new();
    for (i, case) in data["cases"].as_array().unwrap().iter().enumerate() {
        let name = case["template"].as_str().unwrap();
        let engine = engine(BYTE_LEVEL, data["templates"][name].as_str());
        let mut kwargs = case["kwargs"].as_object().cloned().unwrap_or_default();
        kwargs.insert("date_string".to_owned(), "26 Jul 2024".into());
        let prompt = ChatPrompt {
            messages: case["messages"].as_array().unwrap().clone(),
            tools: case["tools"].as_array().cloned(),
            add_generation_prompt: case["add_generation_prompt"] == true,
            continue_final_message: case["continue_final_message"] == true,
            template_kwargs: kwargs,
            ..ChatPrompt::default()
        };
        let got = block_on(engine.render(prompt));
        match (case["expected"].as_str(), &got) {
            (Some(expected), Ok(got)) if expected == got => {}
            (None, Err(RouteError::BadRequest { .. })) => {}
            (expected, got) => {
                failures
                    .push(format!("case {i}, {name}:\n expected {expected:?}\n got      {got:?}"));
            }
        }
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

#[test]
fn what_a_template_raises_reaches_the_client() {
    let engine = engine(BYTE_LEVEL, Some("{{ raise_exception('Roles must ' ~ 'alternate') }}"));
    let (param, message) = bad_request(block_on(engine.render(chat(&json!([])))));
    assert_eq!(param, "messages");
    assert!(message.contains("Roles must alternate"), "{message}");
}

#[test]
fn a_model_without_template_points_to_completions() {
    let engine = engine(BYTE_LEVEL, None);
    let prompt = Prompt::Chat(Box::new(chat(&json!([{"role": "user", "content": "hi"}]))));
    let (param, message) = bad_request(block_on(engine.encode(prompt)));
    assert_eq!(param, "messages");
    assert!(message.contains("/v1/completions"), "{message}");
}

#[test]
fn endless_templates_end() {
    // Long only with this message; templates that never end are refused when they are read.
    let nested = "{% for a in messages[0].content %}{% for b in range(10000) %}{% set x = a + b|string %}\
        {% endfor %}{% endfor %}";
    let recursive = "{% macro f(x) %}{% if x %}{{ f(x - 1) }}{% endif %}{% endmacro %}\
        {{ f(messages[0].content | length) }}";
    let long = "{% for a in messages[0].content %}{{ messages[0].content }}{% endfor %}";
    for (template, bytes, says) in [
        (nested, 10_000, "the chat template takes"),
        (recursive, 10_000, "recursion"),
        (long, 10_000, "more than 32 MiB of memory"),
        (long, 16 << 20, "longer than 64 MiB"),
    ] {
        let engine = engine(BYTE_LEVEL, Some(template));
        let messages = json!([{"role": "user", "content": "x".repeat(bytes)}]);
        // A build without optimisation may pass the deadline first, which says so in the same words.
        let error = block_on(engine.render(chat(&messages))).unwrap_err().to_string();
        assert!(error.contains(says), "{template}: {error}");
    }
}

#[test]
fn a_chat_of_10_000_messages_is_within_the_bounds_of_every_family() {
    let data: Value = serde_json::from_str(TEMPLATES).unwrap();
    let message = |i| json!({"role": role(i), "content": format!("message {i}")});
    let messages: Vec<Value> = (0..9_999).map(message).collect();
    let templates = data["templates"].as_object().unwrap().iter();
    for (name, template) in templates.filter(|(name, _)| *name != "python") {
        let engine = engine(BYTE_LEVEL, template.as_str());
        let mut prompt = chat(&json!(messages));
        prompt.template_kwargs.insert("date_string".to_owned(), "26 Jul 2024".into());
        let text = block_on(engine.render(prompt)).unwrap();
        assert!(text.contains("message 9998"), "{name}");
    }
}

#[test]
fn deeply_nested_messages_are_refused_where_they_are_printed() {
    let mut content = json!("deep");
    for _ in 0..120 {
        content = json!([{ "a": content }]);
    }
    for template in ["{{ messages[0].content }}", "{{ messages | tojson }}"] {
        let engine = engine(BYTE_LEVEL, Some(template));
        let messages = json!([{"role": "user", "content": content}]);
        let (_, message) = bad_request(block_on(engine.render(chat(&messages))));
        assert!(message.contains("nested"), "{message}");
    }
}

#[test]
fn template_variables_of_the_client_do_not_replace_ours() {
    let engine = engine(BYTE_LEVEL, Some("{{ messages|length }}{{ bos_token }}{{ extra }}"));
    let mut prompt = chat(&json!([{"role": "user", "content": "hi"}]));
    prompt.template_kwargs.insert("extra".to_owned(), json!(true));
    assert_eq!(block_on(engine.render(prompt.clone())).unwrap(), "1<s>True");
    prompt.template_kwargs.insert("messages".to_owned(), json!([]));
    let (param, _) = bad_request(block_on(engine.render(prompt)));
    assert_eq!(param, "chat_template_kwargs");
}

#[test]
fn strftime_now_is_the_date() {
    let engine = engine(BYTE_LEVEL, Some("{{ strftime_now('%Y') }}"));
    let year: u32 = block_on(engine.render(chat(&json!([])))).unwrap().parse().unwrap();
    assert!((2024..2200).contains(&year));
}

#[test]
fn a_last_message_cannot_be_continued_and_answered() {
    let engine = engine(BYTE_LEVEL, Some(CHATML));
    let mut prompt = chat(&json!([{"role": "assistant", "content": "Once"}]));
    prompt.continue_final_message = true;
    let (param, _) = bad_request(block_on(engine.render(prompt.clone())));
    assert_eq!(param, "continue_final_message");
    prompt.add_generation_prompt = false;
    assert_eq!(block_on(engine.render(prompt)).unwrap(), "<|im_start|>assistant\nOnce");
}

#[test]
fn broken_documents_name_their_part() {
    let error = |tokenizer: &str, template: Option<&str>| {
        PromptEngine::new(doc(tokenizer, template), pool()).unwrap_err()
    };
    assert!(matches!(error("{}", None), PromptError::Tokenizer(_)));
    let template = error(BYTE_LEVEL, Some("line one\n{% if %}"));
    assert!(matches!(&template, PromptError::Template(m) if m.contains("line 2")), "{template}");
    let ctc =
        json!({"type": "CTC", "pad_token": "p", "word_delimiter_token": "|", "cleanup": true});
    let decoder = error(&edited(BYTE_LEVEL, |t| t["decoder"] = ctc.clone()), None);
    assert!(matches!(&decoder, PromptError::Decoder(m) if m.contains("CTC")), "{decoder}");
}

// Prompts

#[test]
fn chats_are_encoded_as_rendered_and_texts_with_special_tokens() {
    let engine = engine(BYTE_FALLBACK, Some("{{ bos_token }}{{ messages[0].content }}"));
    let text = block_on(engine.encode(Prompt::Text("the river".to_owned()))).unwrap();
    let messages = json!([{"role": "user", "content": "the river"}]);
    let chat = block_on(engine.encode(Prompt::Chat(Box::new(chat(&messages))))).unwrap();
    assert_eq!(text, chat);
    assert_eq!(text.iter().filter(|id| **id == 1).count(), 1);
    assert_eq!(engine.decode(&text, true), "the river");
}

#[test]
fn token_prompts_are_checked() {
    let engine = engine(BYTE_LEVEL, None);
    let encode = |ids: &[u32]| block_on(engine.encode(Prompt::Tokens(ids.to_vec())));
    assert_eq!(encode(&[0, 199_999]).unwrap(), [0, 199_999]);
    let (param, message) = bad_request(encode(&[5, 200_000]));
    assert_eq!(param, "prompt");
    assert!(message.contains("200000"), "{message}");
    assert_eq!(bad_request(encode(&[])).0, "prompt");
    assert_eq!(bad_request(block_on(engine.encode(Prompt::Text(String::new())))).0, "prompt");
}

#[test]
fn a_text_that_cannot_fit_is_refused_before_it_is_tokenised() {
    let mut doc = doc(BYTE_LEVEL, None);
    doc.context_tokens = 100;
    let engine = PromptEngine::new(doc, pool()).unwrap();
    let encode = |len: usize| block_on(engine.encode(Prompt::Text("x".repeat(len))));
    let error = encode(1 << 20).unwrap_err();
    assert!(matches!(error, RouteError::ContextLengthAtLeast { limit: 100, .. }), "{error}");
    assert!(encode(100).is_ok());
}

fn role(turn: usize) -> &'static str {
    ["user", "assistant"][turn % 2]
}

#[test]
fn extreme_chats_are_tokenised() {
    let engine = engine(BYTE_LEVEL, Some(CHATML));
    let tokenizer: Tokenizer = BYTE_LEVEL.parse().unwrap();
    let many: Vec<Value> =
        (0..10_000).map(|i| json!({"role": role(i), "content": format!("message {i}")})).collect();
    let long = "The river\u{0}runs \u{1F9D1}\u{200D}\u{1F33E}. ".repeat(40_000);
    for messages in [json!(many), json!([{"role": "user", "content": long}])] {
        let prompt = chat(&messages);
        let text = block_on(engine.render(prompt.clone())).unwrap();
        let ids = block_on(engine.encode(Prompt::Chat(Box::new(prompt)))).unwrap();
        assert_eq!(ids, tokenizer.encode_fast(text.as_str(), false).unwrap().get_ids());
        assert_eq!(engine.decode(&ids, false), text);
    }
}
