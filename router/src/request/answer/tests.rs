//! What fits a context.

use super::*;
use crate::core::frame::Reasoning;

#[test]
fn a_prompt_leaves_room_for_its_answer_or_is_refused_with_both_numbers() {
    assert_eq!(check_context(10, None, 16).unwrap(), 6);
    assert_eq!(check_context(10, Some(6), 16).unwrap(), 6);
    assert_eq!(check_context(16, Some(0), 16).unwrap(), 0);
    for (prompt, max_tokens, needs) in [(16, None, 17), (10, Some(7), 17), (17, Some(0), 17)] {
        match check_context(prompt, max_tokens, 16) {
            Err(RouteError::ContextLength { got, limit: 16, .. }) => assert_eq!(got, needs),
            other => panic!("{other:?}"),
        }
    }
}

/// An engine with the tokens of `<think>` and `</think>`.
fn thinking() -> PromptEngine {
    let tokenizer = include_str!("../../../../tests/data/tokenizer_byte_level.json");
    let doc =
        serde_json::json!({"tokenizer": tokenizer, "context_tokens": 100, "vocab_size": 1000});
    let doc = crate::prompt::ModelDoc::parse(doc.to_string().as_bytes()).unwrap();
    let pool = crate::prompt::TokenizePool::new(1, 4).unwrap();
    PromptEngine::new(doc, Arc::new(pool)).unwrap()
}

#[tokio::test]
async fn what_a_prompt_did_with_the_reasoning_is_settled() {
    let engine = thinking();
    let [begin, end] = ["<think>", "</think>"].map(|mark| vec![engine.token_id(mark).unwrap()]);
    let whole = Reasoning {
        begin: begin.clone(),
        end: end.clone(),
        max_tokens: Some(3),
        ..Reasoning::default()
    };
    let opened = Reasoning { begin: Vec::new(), ..whole.clone() };
    for (prompt, want) in [
        ("hello", Some(&whole)),
        ("hello <think>", Some(&opened)),
        ("hello <think>\n \n", Some(&opened)),
        ("hello <think>\n\n</think>\n\n", None),
        ("hello <think> but", Some(&whole)),
    ] {
        let ids = engine.encode_text(prompt.into(), false).await.unwrap();
        let mut sampling = Sampling { reasoning: Some(whole.clone()), ..Sampling::default() };
        settle_reasoning(&engine, &mut sampling, &ids);
        assert_eq!(sampling.reasoning.as_ref(), want, "{prompt:?}");
    }
    let mut sampling = Sampling::default();
    settle_reasoning(&engine, &mut sampling, &begin);
    assert_eq!(sampling.reasoning, None, "nothing was asked of it");
}
