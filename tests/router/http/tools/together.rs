//! Tokens that come together, or one at a time: the answer, its log-probabilities and what is charged are the same.

use headrace_router::core::frame::{Finish, Frame, Output, Ranked, Submit, TokenLogprob};
use serde_json::{Value, json};
use tokio::time::sleep;

use super::super::client::{Reply, TestRouter, args, chunks};
use super::{body, tool};
use crate::fake_worker::{Behaviour, EOS, FakeWorker, in_time, output, step};

/// Two calls, of `f` and of `g`, in each form; text around them where the form has room for it.
const FORMS: [(&str, &str); 12] = [
    (
        "hermes",
        r#"So: <tool_call>
{"name": "f", "arguments": {"city": "Bön"}}
</tool_call>
<tool_call>
{"name": "g", "arguments": {"city": "B"}}
</tool_call> Done."#,
    ),
    (
        "qwen3-coder",
        "So: <tool_call>\n<function=f>\n<parameter=city>\nBön\n</parameter>\n</function>\n</tool_call>\n\
         <tool_call>\n<function=g>\n<parameter=city>\nB\n</parameter>\n</function>\n</tool_call> Done.",
    ),
    (
        "llama3-json",
        r#"{"name": "f", "parameters": {"city": "Bön"}}; {"name": "g", "parameters": {"city": "B"}}"#,
    ),
    ("pythonic", r#"[f(city="Bön"), g(city="B")]"#),
    (
        "mistral",
        r#"So: [TOOL_CALLS] [{"name": "f", "arguments": {"city": "Bön"}}, {"name": "g", "arguments": {"city": "B"}}]"#,
    ),
    ("mistral", r#"So: [TOOL_CALLS]f[ARGS]{"city": "Bön"}[TOOL_CALLS]g[ARGS]{"city": "B"}"#),
    (
        "deepseek-v3",
        "So: <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{\"city\": \"Bön\"}\n```<｜tool▁call▁end｜>\n\
         <｜tool▁call▁begin｜>function<｜tool▁sep｜>g\n```json\n{\"city\": \"B\"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜> Done.",
    ),
    (
        "deepseek-v3.1",
        "So: <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{\"city\": \"Bön\"}<｜tool▁call▁end｜>\
         <｜tool▁call▁begin｜>g<｜tool▁sep｜>{\"city\": \"B\"}<｜tool▁call▁end｜><｜tool▁calls▁end｜> Done.",
    ),
    (
        "glm-4.5",
        "So: <tool_call>f\n<arg_key>city</arg_key>\n<arg_value>Bön</arg_value>\n</tool_call>\n\
         <tool_call>g\n<arg_key>city</arg_key>\n<arg_value>B</arg_value>\n</tool_call> Done.",
    ),
    (
        "kimi-k2",
        "So: <|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{\"city\": \"Bön\"}<|tool_call_end|>\
         <|tool_call_begin|>functions.g:1<|tool_call_argument_begin|>{\"city\": \"B\"}<|tool_call_end|><|tool_calls_section_end|> Done.",
    ),
    (
        "harmony",
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{\"city\": \"Bön\"}<|call|>\
         <|start|>assistant<|channel|>commentary to=functions.g <|constrain|>json<|message|>{\"city\": \"B\"}<|call|>",
    ),
    (
        "gemma",
        "So: <|tool_call>call:f{city:<|\"|>Bön<|\"|>}<tool_call|><|tool_call>call:g{city:<|\"|>B<|\"|>}<tool_call|> Done.",
    ),
];

/// Bytes as tokens, so that characters are cut, too, and the end.
fn tokens(text: &str) -> Vec<u32> {
    let token = |byte: u8| -> u32 {
        let byte = u32::from(byte);
        match byte {
            0x21..=0x7e => byte - 0x21 + 3,
            0xa1..=0xac => byte - 0xa1 + 97,
            0xae..=0xff => byte - 0xae + 109,
            0..=0x20 => byte + 191,
            0x7f..=0xa0 => byte - 0x7f + 224,
            0xad => 258,
            _ => unreachable!("a byte"),
        }
    };
    text.bytes().map(token).chain([EOS]).collect()
}

/// How tokens come: so many at a time, again and again.
#[derive(Debug, Clone, Copy)]
enum Cut<'a> {
    /// One, and the next one when that was taken.
    Each,
    By(&'a [usize]),
}

fn scored(submit: &Submit, ids: &[u32], finish: Option<Finish>) -> Output {
    let logprob = |id: &u32| TokenLogprob {
        logprob: -f64::from(*id) / 64.0,
        top: vec![Ranked(*id, -f64::from(*id) / 64.0)],
    };
    let logprobs = submit.sampling.logprobs.map(|_| ids.iter().map(logprob).collect());
    // drafts are for the counters: the first token of each step is none
    let drafted = u32::try_from(ids.len()).unwrap() - 1;
    Output { logprobs, drafted, accepted: drafted, ..output(submit.request, ids.to_vec(), finish) }
}

/// Says all tokens to all choices.
async fn say(
    router: &TestRouter,
    worker: &FakeWorker,
    submits: &[Submit],
    all: &[u32],
    cut: Cut<'_>,
) {
    let sizes = match cut {
        Cut::Each => &[1][..],
        Cut::By(sizes) => sizes,
    };
    for submit in submits {
        let limit = all.len().min(submit.max_tokens as usize);
        let (mut from, mut sizes) = (0, sizes.iter().cycle());
        while from < limit {
            let to = limit.min(from + sizes.next().unwrap());
            let finish = match to == limit {
                true if limit == all.len() => Some(Finish::Stop),
                true => Some(Finish::Length),
                false => None,
            };
            let output = scored(submit, &all[from..to], finish);
            worker.send(Frame::Step(step(vec![output])));
            from = to;
            if matches!(cut, Cut::Each) && !taken(router, from).await {
                break;
            }
        }
    }
}

/// Waits until the request has so many tokens; false if it is over.
async fn taken(router: &TestRouter, tokens: usize) -> bool {
    let look = async {
        loop {
            let decision = router.get("/decisions/r").await.json();
            let actual = &decision["decisions"].as_array().unwrap().last().unwrap()["actual"];
            if actual["outcome"] != "running" {
                return false;
            }
            if actual["output_tokens"].as_u64().unwrap() >= tokens as u64 {
                return true;
            }
            sleep(std::time::Duration::from_millis(1)).await;
        }
    };
    in_time("a token", look).await
}

async fn answered(
    (router, worker): (&TestRouter, &mut FakeWorker),
    (path, asked): (&str, &Value),
    all: &[u32],
    cut: Cut<'_>,
) -> Reply {
    let head = format!("POST {path} HTTP/1.1\r\nContent-Type: application/json\r\nX-Request-ID: r");
    let asked_body = asked.to_string();
    let ask = router.send(&head, asked_body.as_bytes());
    let choices = asked["n"].as_u64().unwrap_or(1);
    let reply = async {
        let mut submits = Vec::new();
        for _ in 0..choices {
            submits.push(worker.submitted().await);
        }
        say(router, worker, &submits, all, cut).await;
    };
    let (reply, ()) = tokio::join!(ask, reply);
    assert_eq!(reply.status, 200, "{}", reply.text());
    reply
}

/// What differs from request to request is left out: ids, times.
fn same_in_all(value: &mut Value) {
    match value {
        Value::Object(fields) => {
            for name in
                ["id", "created", "created_at", "completed_at", "item_id", "call_id", "obfuscation"]
            {
                fields.remove(name);
            }
            fields.values_mut().for_each(same_in_all);
        }
        Value::Array(all) => all.iter_mut().for_each(same_in_all),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => {}
    }
}

fn whole(reply: &Reply) -> Value {
    let mut answer = reply.json();
    same_in_all(&mut answer);
    // drafts are counted by steps, and steps are what is cut
    let details = &mut answer["usage"]["completion_tokens_details"];
    if let Some(details) = details.as_object_mut() {
        let mut count = |name: &str| details.remove(name).unwrap().as_u64().unwrap();
        assert!(
            count("accepted_prediction_tokens") < 1_000
                && count("rejected_prediction_tokens") < 1_000
        );
    }
    answer
}

/// What a stream says, put together as a client does, in the form of the whole answer's choices.
fn joined(reply: &Reply) -> (Vec<Value>, Value) {
    let mut choices = vec![json!({"content": "", "reasoning": "", "calls": []}); 2];
    let (mut used, mut usage) = (0, Value::Null);
    for chunk in chunks(reply.text()) {
        usage = chunk["usage"].clone();
        let Some(choice) = chunk["choices"].get(0) else { continue };
        let at = choice["index"].as_u64().unwrap() as usize;
        used = used.max(at + 1);
        let all = &mut choices[at];
        for name in ["content", "reasoning"] {
            if let Some(more) = choice["delta"][name].as_str() {
                all[name] = (all[name].as_str().unwrap().to_owned() + more).into();
            }
        }
        if let Some(call) = choice["delta"]["tool_calls"].get(0) {
            let calls = all["calls"].as_array_mut().unwrap();
            let function = &call["function"];
            if call.get("id").is_some() {
                calls.push(json!({"name": function["name"], "arguments": ""}));
            }
            let last = calls.last_mut().unwrap();
            let more = function["arguments"].as_str().unwrap();
            last["arguments"] = (last["arguments"].as_str().unwrap().to_owned() + more).into();
        }
        for (name, more) in [
            ("logprobs", choice["logprobs"].get("content")),
            ("token_ids", choice.get("token_ids")),
        ] {
            if let Some(more) = more.and_then(Value::as_array) {
                let mut list = all[name].as_array().cloned().unwrap_or_default();
                list.extend(more.iter().cloned());
                all[name] = list.into();
            }
        }
        if !choice["finish_reason"].is_null() {
            assert!(all["finish"].is_null(), "it ends once");
            all["finish"] = choice["finish_reason"].clone();
        }
    }
    choices.truncate(used);
    let usage =
        json!([usage["completion_tokens"], usage["completion_tokens_details"]["reasoning_tokens"]]);
    (choices, usage)
}

/// The same of a whole answer.
fn parted(answer: &Value) -> (Vec<Value>, Value) {
    let choices = answer["choices"].as_array().unwrap().iter().map(|choice| {
        let message = &choice["message"];
        let calls = message["tool_calls"].as_array().cloned().unwrap_or_default();
        let calls: Vec<_> = calls.iter().map(|call| call["function"].clone()).collect();
        let text = |name: &str| message[name].as_str().unwrap_or_default().to_owned();
        let mut said = json!({"content": text("content"), "reasoning": text("reasoning"), "calls": calls,
            "finish": choice["finish_reason"]});
        if let Some(logprobs) = choice["logprobs"].get("content") {
            said["logprobs"] = logprobs.clone();
        }
        if let Some(ids) = choice.get("token_ids") {
            said["token_ids"] = ids.clone();
        }
        said
    });
    let usage = &answer["usage"];
    let usage =
        json!([usage["completion_tokens"], usage["completion_tokens_details"]["reasoning_tokens"]]);
    (choices.collect(), usage)
}

async fn serving(form: &str) -> (TestRouter, FakeWorker) {
    let mut args = args();
    args.tool_parser = Some(form.into());
    let reasoning = match form {
        "harmony" | "mistral" | "gemma" => form,
        _ => "think",
    };
    args.reasoning_parser = Some(reasoning.into());
    TestRouter::with(Behaviour::new("w"), args).await
}

fn asking(extra: &Value) -> Value {
    let mut asked: Value = serde_json::from_str(&body(extra)).unwrap();
    asked["tools"] = json!([tool("f"), tool("g")]);
    asked["seed"] = json!(1);
    asked
}

/// Sizes of the steps: all at once, and others that go through the text in their own ways.
const CUTS: [&[usize]; 4] = [&[10_000], &[7], &[2, 31, 1, 5], &[61, 2]];

#[tokio::test]
async fn answers_do_not_depend_on_how_their_tokens_came_together() {
    let variants = [
        json!({}),
        json!({"parallel_tool_calls": false}),
        json!({"parallel_tool_calls": false, "logprobs": true, "top_logprobs": 1, "return_token_ids": true, "n": 2}),
        json!({"parallel_tool_calls": false, "stop": ["Done", "e}", "l>\n<tool_call>\n", "}, "], "logprobs": true}),
        json!({"parallel_tool_calls": false, "stop": ["never"], "max_tokens": 70, "return_token_ids": true}),
        json!({"stop": ["one."], "logprobs": true, "return_token_ids": true, "n": 2}),
    ];
    for (place, (form, text)) in FORMS.into_iter().enumerate() {
        let (router, mut worker) = serving(form).await;
        let thinks = text.starts_with("So");
        let thought = match form {
            "mistral" => "[THINK]Hm.[/THINK]",
            "gemma" => "<|channel>thought\nHm.<channel|>",
            _ => "<think>Hm.</think>",
        };
        let all = tokens(&if thinks { format!("{thought}{text}") } else { text.to_owned() });
        for (nth, variant) in variants.iter().enumerate() {
            // each form and each variant meet all cuts, though not each form each variant with each cut
            let cuts = [CUTS[0], CUTS[1 + (place + nth) % 3]];
            let asked = asking(variant);
            let mut streamed = asked.clone();
            streamed["stream"] = json!(true);
            streamed["stream_options"] = json!({"include_usage": true});
            let path = "/v1/chat/completions";
            let mut first: Option<Value> = None;
            for cut in cuts {
                let at = (&router, &mut worker);
                let got = whole(&answered(at, (path, &asked), &all, Cut::By(cut)).await);
                let at = (&router, &mut worker);
                let stream = answered(at, (path, &streamed), &all, Cut::By(cut)).await;
                assert_eq!(joined(&stream), parted(&got), "{form} {variant} {cut:?}");
                match &first {
                    None => first = Some(got),
                    Some(first) => assert_eq!(&got, first, "{form} {variant} {cut:?}"),
                }
            }
            if asked["max_tokens"].is_number() {
                let at = (&router, &mut worker);
                let got = whole(&answered(at, (path, &asked), &all, Cut::Each).await);
                assert_eq!(Some(got), first, "{form} {variant}, each by itself");
            }
            let _ = worker.so_far();
        }
    }
}

#[tokio::test]
async fn other_apis_count_no_token_behind_the_one_call_either() {
    let (router, mut worker) = serving("hermes").await;
    let call = FORMS[0].1;
    let all = tokens(&format!("<think>Hm.</think>{call}"));
    let schema = json!({"type": "object", "properties": {"city": {"type": "string"}}});
    let model = crate::fake_worker::MODEL;
    let of_openai = |name: &str| json!({"type": "function", "name": name, "parameters": schema});
    let response = json!({"model": model, "input": "hi", "tools": [of_openai("f"), of_openai("g")],
        "parallel_tool_calls": false, "store": false});
    let of_anthropic = |name: &str| json!({"name": name, "input_schema": schema});
    let message = json!({"model": model, "max_tokens": 500, "messages": [{"role": "user", "content": "hi"}],
        "tools": [of_anthropic("f"), of_anthropic("g")],
        "tool_choice": {"type": "auto", "disable_parallel_tool_use": true}});
    let until = "}}"; // the object is the call, whatever marker follows
    let used = "<think>Hm.</think>".len() + call.find(until).unwrap() + until.len();
    for (path, asked) in [("/v1/responses", &response), ("/v1/messages", &message)] {
        let mut first: Option<Value> = None;
        for cut in CUTS {
            let at = (&router, &mut worker);
            let mut got = answered(at, (path, asked), &all, Cut::By(cut)).await.json();
            same_in_all(&mut got);
            assert_eq!(got["usage"]["output_tokens"], used, "{path} {cut:?}");
            assert_eq!(first.get_or_insert(got.clone()), &got, "{path} {cut:?}");
            let mut streamed = asked.clone();
            streamed["stream"] = json!(true);
            let at = (&router, &mut worker);
            let stream = answered(at, (path, &streamed), &all, Cut::By(cut)).await;
            let count = format!("\"output_tokens\":{used}");
            assert!(stream.text().contains(&count), "{path} {cut:?}: {}", stream.text());
        }
    }
}

#[tokio::test]
async fn tokens_behind_the_one_call_are_neither_counted_nor_sent() {
    let (router, mut worker) = serving("hermes").await;
    let call = FORMS[0].1;
    let all = tokens(call);
    let used = call.find("}}").unwrap() + "}}".len(); // the object is the call, whatever marker follows
    let extra = json!({"parallel_tool_calls": false, "logprobs": true, "return_token_ids": true});
    let at = (&router, &mut worker);
    let path = "/v1/chat/completions";
    let got = answered(at, (path, &asking(&extra)), &all, Cut::By(&[10_000])).await.json();
    assert_eq!(got["usage"]["completion_tokens"], used);
    let choice = &got["choices"][0];
    assert_eq!(choice["finish_reason"], "tool_calls");
    assert_eq!(choice["token_ids"].as_array().unwrap().len(), used);
    assert_eq!(choice["logprobs"]["content"].as_array().unwrap().len(), used);
    // all tokens but the first were drafts, of which those behind the call came to nothing
    let drafts = &got["usage"]["completion_tokens_details"];
    let count = |name: &str| drafts[name].as_u64().unwrap() as usize;
    assert_eq!(count("accepted_prediction_tokens"), used);
    assert_eq!(count("rejected_prediction_tokens"), all.len() - 1 - used);
}
