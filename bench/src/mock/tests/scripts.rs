//! Scripted answers, through a real router.

use super::*;

/// Markers that are tokens, letters of several bytes, and JSON that a cut may fall into.
const TEXT: &str = "<think>\nIs it \u{6c34}? \u{1f642}</think>\n\n<tool_call>\n{\"name\": \"level\", \"arguments\": {\"at\": \"B\u{e4}chle\"}}\n</tool_call>";

async fn scripted(router: &str, lines: &[Value]) -> Running {
    let path = std::env::temp_dir().join(format!("scripts-{}-{router}", std::process::id()));
    let text: Vec<String> = lines.iter().map(Value::to_string).collect();
    std::fs::write(&path, text.join("\n")).unwrap();
    let model = Model::built_in();
    let script = Script::read(&path, &model).await.unwrap();
    std::fs::remove_file(&path).unwrap();
    let args = ["mock", "--router", router].into_iter().chain(FAST.split_whitespace());
    let args = Flags::parse_from(args.chain(["--workers", "1"])).mock;
    start(&args, model, Some(script)).unwrap()
}

/// The texts of the events of a stream, and why it finished.
async fn stream(stack: &Stack, body: &Value) -> (Vec<String>, String) {
    let mut body = body.clone();
    body["stream"] = true.into();
    let mut answer = String::new();
    stack.post(&body).await.read_to_string(&mut answer).await.unwrap();
    let events = answer.lines().filter_map(|line| line.strip_prefix("data: "));
    let events = events.filter(|event| *event != "[DONE]");
    let events: Vec<Value> = events.map(|event| serde_json::from_str(event).unwrap()).collect();
    let choice = |event: &Value| event["choices"][0].clone();
    let texts = events.iter().map(|event| choice(event)["text"].as_str().unwrap().to_owned());
    let finish =
        events.iter().find_map(|event| choice(event)["finish_reason"].as_str().map(str::to_owned));
    (texts.filter(|text| !text.is_empty()).collect(), finish.unwrap_or_default())
}

#[tokio::test]
async fn an_answer_comes_back_byte_for_byte_however_steps_cut_it() {
    let stack = router(None).await;
    let steps = [json!(1), json!(2), json!(3), json!("all"), json!("every-cut")];
    let lines = steps.iter().map(|step| {
        json!({"text": TEXT, "when": format!("by {step}!"), "tokens_per_step": step, "pieces": "characters"})
    });
    let _fleet = scripted(&stack.workers, &lines.collect::<Vec<_>>()).await;
    until("a worker", || stack.ready() == 1).await;
    for step in &steps {
        let prompt = format!("by {step}!");
        for seed in 0..if step == "every-cut" { 90 } else { 1 } {
            let body = json!({"model": "mock", "prompt": prompt, "max_tokens": 500, "seed": seed});
            let (texts, finish) = stream(&stack, &body).await;
            assert_eq!(texts.concat(), TEXT, "{step}, seed {seed}");
            assert_eq!(finish, "stop");
            assert!(texts.len() > 1 || step != 1, "a stream of single characters has many events");
        }
    }
    let whole =
        stack.complete(&json!({"model": "mock", "prompt": "by 2!", "max_tokens": 500})).await;
    assert_eq!(whole["choices"][0]["text"], TEXT);
    let cut = stack.complete(&json!({"model": "mock", "prompt": "by 2!", "max_tokens": 5})).await;
    assert_eq!(cut["choices"][0]["finish_reason"], "length");
    assert_eq!(cut["usage"]["completion_tokens"], 5);
}

#[tokio::test]
async fn a_grammar_is_refused_but_where_a_script_answers() {
    let stack = router(None).await;
    let fleet = fleet(&stack.workers, &format!("{FAST} --workers 1"));
    until("a worker", || stack.ready() == 1).await;
    let body = json!({"model": "mock", "prompt": "a", "max_tokens": 9, "guided_regex": "[0-9]+"});
    let mut answer = String::new();
    stack.post(&body).await.read_to_string(&mut answer).await.unwrap();
    assert!(answer.starts_with("HTTP/1.1 400") && answer.contains("--script FILE"), "{answer}");
    drop(fleet);
    until("no worker", || stack.ready() == 0).await;
    let _fleet = scripted(&stack.workers, &[json!({"text": "seven"})]).await;
    until("a worker", || stack.ready() == 1).await;
    assert_eq!(stack.complete(&body).await["choices"][0]["text"], "seven");
}
