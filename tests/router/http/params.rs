//! Parameters beyond OpenAI's, and what answers show of them.

use headrace_router::config::RouterArgs;
use headrace_router::core::frame::{Finish, Frame, Output, Ranked, Submit, TokenLogprob};
use serde_json::{Value, json};

use super::client::{Reply, TestRouter, args, chunks};
use crate::fake_worker::{Behaviour, EOS, FakeWorker, MODEL, doc, letters, metric, output, step};

const CHAT: &str = "/v1/chat/completions";
const PLAIN: &str = "/v1/completions";

fn with(mut body: Value, extra: &Value) -> Vec<u8> {
    body.as_object_mut().unwrap().append(&mut extra.as_object().unwrap().clone());
    body.to_string().into_bytes()
}

fn chat(extra: &Value) -> Vec<u8> {
    let messages = json!([{"role": "user", "content": "hi"}]);
    with(json!({"model": MODEL, "messages": messages, "max_tokens": 20}), extra)
}

fn plain(extra: &Value) -> Vec<u8> {
    with(json!({"model": MODEL, "prompt": "hi", "max_tokens": 20}), extra)
}

fn param(reply: &Reply) -> Value {
    assert_eq!(reply.status, 400, "{}", reply.text());
    reply.error()["param"].clone()
}

fn ids(value: &Value) -> Vec<u32> {
    serde_json::from_value(value.clone()).unwrap_or_else(|error| panic!("{error} in {value}"))
}

fn tokens_of(submit: &Submit) -> Vec<u32> {
    let ids = submit.tokens.chunks_exact(4);
    ids.map(|id| u32::from_le_bytes(id.try_into().unwrap())).collect()
}

/// A router whose model has this template.
async fn templated(template: &str, args: RouterArgs) -> (TestRouter, FakeWorker) {
    let mut worker = Behaviour::says("w", "ok");
    let mut description = doc();
    description["chat_template"] = template.into();
    worker.doc = description.to_string().into_bytes();
    TestRouter::with(worker, args).await
}

#[tokio::test]
async fn an_answer_ends_with_what_ended_it_where_that_was_asked_for() {
    let (router, _worker) = TestRouter::saying("abcdef").await;
    for (included, want) in [(true, "abcde"), (false, "abc")] {
        for stream in [false, true] {
            let extra =
                json!({"stop": "de", "include_stop_str_in_output": included, "stream": stream});
            let reply = router.post(CHAT, chat(&extra)).await;
            if stream {
                let chunks = chunks(reply.text());
                let parts =
                    chunks.iter().filter_map(|c| c["choices"][0]["delta"]["content"].as_str());
                assert_eq!(parts.collect::<String>(), want);
            } else {
                assert_eq!(reply.json()["choices"][0]["message"]["content"], want);
            }
        }
    }
    // the text of a stop token, where special tokens are shown
    for (included, want) in [(true, "abcdef<|im_end|>"), (false, "abcdef")] {
        let extra = json!({"include_stop_str_in_output": included, "skip_special_tokens": false});
        let reply = router.post(PLAIN, plain(&extra)).await.json();
        assert_eq!(reply["choices"][0]["text"], want);
    }
}

#[tokio::test]
async fn ids_are_those_of_the_tokens_that_are_counted() {
    let (router, mut worker) = TestRouter::saying("abcdef").await;
    let end = vec![EOS];
    for (extra, want) in [
        (json!({}), [letters("abcdef"), end].concat()),
        (json!({"stop": "cd"}), letters("abcd")),
        (json!({"max_tokens": 20, "logit_bias": {}}), [letters("abcdef"), vec![EOS]].concat()),
    ] {
        let mut extra = extra;
        extra["return_token_ids"] = true.into();
        let reply = router.post(CHAT, chat(&extra)).await.json();
        let prompt = tokens_of(&worker.submitted().await);
        assert_eq!(ids(&reply["prompt_token_ids"]), prompt);
        assert_eq!(ids(&reply["choices"][0]["token_ids"]), want);
        assert_eq!(reply["usage"]["completion_tokens"], want.len());

        let reply = router.post(PLAIN, plain(&extra)).await.json();
        let prompt = tokens_of(&worker.submitted().await);
        assert_eq!(ids(&reply["choices"][0]["prompt_token_ids"]), prompt);
        assert_eq!(ids(&reply["choices"][0]["token_ids"]), want);
    }
    let silent = router.post(CHAT, chat(&json!({}))).await.json();
    assert!(silent.get("prompt_token_ids").is_none());
    assert!(silent["choices"][0].get("token_ids").is_none());
}

#[tokio::test]
async fn a_stream_has_the_ids_of_each_choice_and_those_of_the_prompt_once() {
    let (router, mut worker) = TestRouter::saying("abc").await;
    let want = [letters("abc"), vec![EOS]].concat();
    let extra = json!({"return_token_ids": true, "stream": true, "n": 2, "logprobs": true});
    let reply = router.post(CHAT, chat(&extra)).await;
    let prompt = tokens_of(&worker.submitted().await);
    let events = chunks(reply.text());
    let of_prompt: Vec<_> = events.iter().filter(|e| e.get("prompt_token_ids").is_some()).collect();
    assert_eq!(of_prompt.len(), 1);
    assert_eq!(ids(&events[0]["prompt_token_ids"]), prompt);
    for index in 0..2 {
        let own = events.iter().map(|event| &event["choices"][0]).filter(|c| c["index"] == index);
        let parts = own.filter_map(|choice| choice.get("token_ids")).flat_map(ids);
        assert_eq!(parts.collect::<Vec<_>>(), want);
    }
    let extra = json!({"return_token_ids": true, "stream": true, "prompt": ["hi", "xz"]});
    let events = chunks(router.post(PLAIN, plain(&extra)).await.text());
    for (index, prompt) in ["hi", "xz"].iter().enumerate() {
        let own = events.iter().map(|event| &event["choices"][0]).filter(|c| c["index"] == index);
        let own: Vec<_> = own.collect();
        let of_prompt = own.iter().filter_map(|choice| choice.get("prompt_token_ids"));
        assert_eq!(of_prompt.map(ids).collect::<Vec<_>>(), [letters(prompt)]);
        let parts = own.iter().filter_map(|choice| choice.get("token_ids")).flat_map(ids);
        assert_eq!(parts.collect::<Vec<_>>(), want);
    }
}

#[tokio::test]
async fn a_prompt_is_cut_at_its_beginning() {
    let (router, mut worker) = TestRouter::saying("ok").await;
    let long = "a".repeat(4_200) + "xyz"; // more than the context
    for (truncate, max_tokens, kept) in [(3, 20, 3), (-1, 96, 4_000), (4_000, 96, 4_000)] {
        let extra =
            json!({"truncate_prompt_tokens": truncate, "max_tokens": max_tokens, "prompt": long});
        let reply = router.post(PLAIN, plain(&extra)).await;
        assert_eq!(reply.status, 200, "{}", reply.text());
        assert_eq!(reply.json()["usage"]["prompt_tokens"], kept);
        let prompt = tokens_of(&worker.submitted().await);
        assert!(prompt.len() == kept && prompt.ends_with(&letters("xyz")));
    }
    let short = router.post(PLAIN, plain(&json!({"truncate_prompt_tokens": 50}))).await;
    assert_eq!(short.json()["usage"]["prompt_tokens"], 2);
    let messages = json!([{"role": "user", "content": long}]);
    let extra = json!({"truncate_prompt_tokens": 10, "messages": messages});
    assert_eq!(router.post(CHAT, chat(&extra)).await.json()["usage"]["prompt_tokens"], 10);
    // it is cut to what does not fit
    let extra = json!({"truncate_prompt_tokens": 4_090, "prompt": long});
    let refused = router.post(PLAIN, plain(&extra)).await;
    assert_eq!(refused.error()["code"], "context_length_exceeded");
    let extra = json!({"truncate_prompt_tokens": 1, "echo": true});
    assert_eq!(param(&router.post(PLAIN, plain(&extra)).await), "truncate_prompt_tokens");
    let endless = json!({"truncate_prompt_tokens": 5, "prompt": "a".repeat(40_000)});
    assert_eq!(
        router.post(PLAIN, plain(&endless)).await.error()["code"],
        "context_length_exceeded"
    );
}

#[tokio::test]
async fn documents_and_verbosity_reach_templates_that_read_them() {
    let template = "{% for d in documents %}[{{ d.title }}]{% endfor %}{{ verbosity }}{{ messages[0].content }}";
    let (router, mut worker) = templated(template, args()).await;
    let extra = json!({"documents": [{"title": "A"}, {"title": "B"}], "verbosity": "low"});
    assert_eq!(router.post(CHAT, chat(&extra)).await.status, 200);
    let prompt = json!({"tokens": tokens_of(&worker.submitted().await)}).to_string();
    assert_eq!(router.post("/detokenize", prompt).await.json()["prompt"], "[A][B]lowhi");

    let (plain, _worker) = TestRouter::saying("ok").await;
    for (name, value) in [("documents", json!([{"title": "A"}])), ("verbosity", json!("high"))] {
        let refused = plain.post(CHAT, chat(&json!({ name: value }))).await;
        assert_eq!(param(&refused), name);
        assert!(refused.text().contains("does not read it"));
    }
    let harmless = json!({"documents": [], "verbosity": "medium"});
    assert_eq!(plain.post(CHAT, chat(&harmless)).await.status, 200);
}

#[tokio::test]
async fn a_chat_may_bring_its_template_only_where_operators_allow_it() {
    let (router, _worker) = TestRouter::saying("ok").await;
    let own = json!({"chat_template": "{{ messages[0].content }}!"});
    for path in [CHAT, "/tokenize"] {
        let mut body: Value = serde_json::from_slice(&chat(&own)).unwrap();
        body.as_object_mut().unwrap().remove("max_tokens");
        let refused = router.post(path, body.to_string()).await;
        assert_eq!(param(&refused), "chat_template");
        assert!(refused.text().contains("--allow-request-templates"));
    }
    let allowing = RouterArgs { allow_request_templates: true, ..args() };
    let (router, mut worker) = TestRouter::with(Behaviour::says("w", "ok"), allowing).await;
    assert_eq!(router.post(CHAT, chat(&own)).await.status, 200);
    assert_eq!(tokens_of(&worker.submitted().await), letters("hi!"));
    for (template, why) in [
        ("{% for %}", "cannot be used"),
        ("{{ raise_exception('no') }}", "no"),
        (
            "{% for i in range(99999999) %}{% for j in range(99999999) %}{% endfor %}{% endfor %}",
            "template",
        ),
    ] {
        let refused = router.post(CHAT, chat(&json!({"chat_template": template}))).await;
        assert_eq!(refused.status, 400, "{template}: {}", refused.text());
        assert!(refused.text().contains(why), "{}", refused.text());
    }
}

#[tokio::test]
async fn what_the_tokenizer_puts_around_a_text_can_be_chosen() {
    // this tokenizer puts nothing around a text, so both are the same
    let (router, mut worker) = TestRouter::saying("ok").await;
    for special in [true, false] {
        let extra = json!({"add_special_tokens": special});
        assert_eq!(router.post(PLAIN, plain(&extra)).await.status, 200);
        assert_eq!(tokens_of(&worker.submitted().await), letters("hi"));
        assert_eq!(router.post(CHAT, chat(&extra)).await.status, 200);
        worker.submitted().await;
    }
    let wrong = router.post(PLAIN, plain(&json!({"add_special_tokens": 1}))).await;
    assert_eq!(param(&wrong), "add_special_tokens");
}

#[tokio::test]
async fn unknown_parameters_are_refused_or_named_in_a_header() {
    let extra = json!({"frobnicate": 1, "top_a": 0.5, "stream": true,
        "stream_options": {"include_usage": true, "colour": "red"}});
    let (router, _worker) = TestRouter::saying("ok").await;
    let refused = router.post(CHAT, chat(&extra)).await;
    assert_eq!((refused.status, refused.header("x-headrace-ignored")), (400, None));

    let warning = RouterArgs { unknown_parameters: "warn".into(), ..args() };
    let (router, _worker) = TestRouter::with(Behaviour::says("w", "ok"), warning).await;
    for (path, body) in [(CHAT, chat(&extra)), (PLAIN, plain(&extra))] {
        let reply = router.post(path, body).await;
        assert_eq!(reply.status, 200, "{}", reply.text());
        let names = reply.header("x-headrace-ignored").unwrap();
        assert_eq!(names, "frobnicate, stream_options.colour, top_a");
    }
    assert_eq!(metric(&router.app, "headrace_http_ignored_parameters_total", ""), 6.0);
    // what is known and not supported would change the answer
    let refused = router.post(CHAT, chat(&json!({"use_beam_search": true}))).await;
    assert_eq!(param(&refused), "use_beam_search");
    let plain = router.post(CHAT, chat(&json!({}))).await;
    assert_eq!(plain.header("x-headrace-ignored"), None);
}

#[tokio::test]
async fn clients_of_dynamo_are_understood() {
    let (router, mut worker) = TestRouter::saying("ok").await;
    let extra = json!({"temperature": 0.7, "nvext": {"ignore_eos": true, "greed_sampling": true,
        "annotations": ["llm_metrics"]}});
    let reply = router.post(CHAT, chat(&extra)).await;
    assert_eq!(reply.header("x-headrace-ignored"), Some("nvext.annotations"));
    let submit = worker.submitted().await;
    assert_eq!(submit.sampling.temperature.to_bits(), 0.0_f64.to_bits());
    assert!(submit.stop_ids.is_empty());
    let refused = router.post(CHAT, chat(&json!({"nvext": {"dp_rank": 1}}))).await;
    assert_eq!(param(&refused), "nvext.dp_rank");
}

#[tokio::test]
async fn tokenizers_describe_themselves_and_answer_under_v1_too() {
    let (router, _worker) = TestRouter::saying("ok").await;
    let text = json!({"prompt": "hi"}).to_string();
    let (short, long) =
        (router.post("/tokenize", &text).await, router.post("/v1/tokenize", &text).await);
    assert_eq!((short.status, short.json()), (200, long.json()));
    let tokens = json!({"tokens": letters("hi")}).to_string();
    assert_eq!(router.post("/v1/detokenize", tokens).await.json()["prompt"], "hi");
    for path in ["/tokenizer_info", "/tokenizer_info/fake"] {
        let info = router.get(path).await.json();
        assert_eq!((&info["eos_token"], &info["bos_token"]), (&json!("<|im_end|>"), &Value::Null));
        assert!(info["chat_template"].as_str().unwrap().contains("im_start"));
        assert_eq!((&info["encoder"], &info["encoder_reason"]), (&json!("fast"), &Value::Null));
    }
    assert_eq!(router.get("/tokenizer_info/other").await.status, 404);
}

#[tokio::test]
async fn ids_go_on_where_a_worker_was_lost() {
    let (router, mut first) = TestRouter::with(Behaviour::new("w1"), args()).await;
    let mut connection = router.connect().await;
    let head = format!("POST {PLAIN} HTTP/1.1\r\nContent-Type: application/json");
    connection.request(&head, &plain(&json!({"return_token_ids": true}))).await;
    let request = first.submitted().await.request;
    first.gives(request, &letters("ab"), None);
    let mut second = Behaviour::new("w2").ready(&router.app).await;
    drop(first);
    let resumed = second.submitted().await;
    second.gives(resumed.request, &[letters("c"), vec![EOS]].concat(), Some(Finish::Stop));
    let reply = connection.reply().await.json();
    let own = ids(&reply["choices"][0]["token_ids"]);
    // what the first one gave may have been lost with its link, but nothing comes twice
    assert!(own.ends_with(&[letters("c"), vec![EOS]].concat()));
    assert_eq!(reply["usage"]["completion_tokens"], own.len());
}

#[tokio::test]
async fn a_worker_is_told_what_is_never_chosen() {
    let (router, mut worker) = TestRouter::saying("ok").await;
    let extra = json!({"allowed_token_ids": [7, 5, 7], "bad_words": ["xz", " q", "q"], "prompt": ["a", "b"]});
    assert_eq!(router.post(PLAIN, plain(&extra)).await.status, 200);
    for _ in 0..2 {
        let limits = worker.submitted().await.sampling.limits.unwrap();
        assert_eq!(limits.allowed, [5, 7]);
        let mut rest = limits.banned.as_slice();
        let words: Vec<Vec<u32>> = limits
            .lengths
            .iter()
            .map(|length| {
                let (word, more) = rest.split_at(*length as usize);
                rest = more;
                word.to_vec()
            })
            .collect();
        assert!(rest.is_empty());
        assert!(words.contains(&letters("xz")) && words.contains(&letters("q")), "{words:?}");
        let all = words.len();
        assert_eq!(words.into_iter().collect::<std::collections::HashSet<_>>().len(), all);
    }
    assert_eq!(router.post(CHAT, chat(&json!({"bad_words": []}))).await.status, 200);
    assert_eq!(worker.submitted().await.sampling.limits, None);

    let nothing = json!({"allowed_token_ids": letters("q"), "bad_words": ["q"]});
    assert_eq!(param(&router.post(CHAT, chat(&nothing)).await), "bad_words");
    for (extra, at) in [
        (json!({"bad_words": ["a", 1]}), "bad_words[1]"),
        (json!({"bad_words": ["a", " "]}), "bad_words[1]"),
        (json!({"allowed_token_ids": [1, 577]}), "allowed_token_ids[1]"),
    ] {
        assert_eq!(param(&router.post(CHAT, chat(&extra)).await), at);
    }
}

fn scored(logprob: f64, top: &[(u32, f64)]) -> TokenLogprob {
    let top = top.iter().map(|(id, logprob)| Ranked(*id, *logprob)).collect();
    TokenLogprob { logprob, top }
}

#[tokio::test]
async fn the_prompt_is_scored_apart_from_the_answer() {
    let q = letters("q")[0];
    for (path, body) in [
        (CHAT, chat(&json!({"prompt_logprobs": 1, "logprobs": true, "n": 2}))),
        (PLAIN, plain(&json!({"prompt_logprobs": 1, "prompt": [q, q, q], "logprobs": 0, "n": 2}))),
    ] {
        let (router, mut worker) = TestRouter::with(Behaviour::new("w"), args()).await;
        let mut connection = router.connect().await;
        let head = format!("POST {path} HTTP/1.1\r\nContent-Type: application/json");
        connection.request(&head, &body).await;
        for _ in 0..2 {
            let submit = worker.submitted().await;
            assert_eq!(submit.sampling.prompt_logprobs, Some(1));
            let prompt = tokens_of(&submit);
            let mut scores = vec![scored(-0.5, &[(prompt[1], -0.5)])];
            scores.resize(prompt.len() - 1, scored(-3.0, &[(q + 1, -0.25)]));
            let ids = [letters("o"), vec![EOS]].concat();
            let logprobs = Some(vec![scored(-1.0, &[]), scored(-2.0, &[])]);
            let last = output(submit.request, ids, Some(Finish::Stop));
            let last = Output { prompt_logprobs: Some(scores), logprobs, ..last };
            worker.send(Frame::Step(step(vec![last])));
        }
        let reply = connection.reply().await.json();
        let (prompts, own) = if path == CHAT {
            assert_eq!(reply["choices"][0].get("prompt_logprobs"), None);
            (vec![&reply["prompt_logprobs"]], &reply["choices"][0]["logprobs"]["content"])
        } else {
            let choices = reply["choices"].as_array().unwrap();
            assert_eq!(reply.get("prompt_logprobs"), None);
            (
                choices.iter().map(|choice| &choice["prompt_logprobs"]).collect(),
                &choices[1]["logprobs"]["tokens"],
            )
        };
        assert_eq!(own.as_array().unwrap().len(), 1);
        for prompt in prompts {
            let entries = prompt.as_array().unwrap();
            assert_eq!(entries[0], Value::Null);
            let first = entries[1].as_object().unwrap().values().next().unwrap();
            assert_eq!((&first["rank"], &first["logprob"]), (&json!(1), &json!(-0.5)));
            // what is not among the best has no rank
            let last = entries.last().unwrap();
            assert_eq!(last.as_object().unwrap().len(), 2);
            assert_eq!(
                last[(q + 1).to_string()],
                json!({"logprob": -0.25, "rank": 1, "decoded_token": "r"})
            );
            if path == PLAIN {
                assert_eq!(entries.len(), 3);
                assert_eq!(
                    last[q.to_string()],
                    json!({"logprob": -3.0, "rank": null, "decoded_token": "q"})
                );
            }
        }
    }
    let (router, _worker) = TestRouter::saying("ok").await;
    let streamed = json!({"prompt_logprobs": 1, "stream": true});
    assert_eq!(param(&router.post(CHAT, chat(&streamed)).await), "prompt_logprobs");
    let twice = json!({"prompt_logprobs": 1, "echo": true, "logprobs": 1});
    assert_eq!(param(&router.post(PLAIN, plain(&twice)).await), "prompt_logprobs");
}

#[tokio::test]
async fn a_model_is_found_and_listed_under_all_its_names() {
    let mut behaviour = Behaviour::says("w", "ok");
    behaviour.hello.aliases = vec!["second".into(), "org/third".into()];
    let (router, _worker) = TestRouter::with(behaviour, args()).await;
    for name in [MODEL, "second", "org/third"] {
        let reply = router.post(PLAIN, plain(&json!({"model": name}))).await;
        assert_eq!((reply.status, reply.json()["model"].as_str()), (200, Some(MODEL)));
        let model = router.get(&format!("/v1/models/{name}")).await.json();
        assert_eq!((&model["id"], &model["root"]), (&json!(name), &json!(MODEL)));
    }
    let list = router.get("/v1/models").await.json();
    let listed: Vec<_> =
        list["data"].as_array().unwrap().iter().map(|model| &model["id"]).collect();
    assert_eq!(listed, [MODEL, "org/third", "second"]);
    assert_eq!(router.post(PLAIN, plain(&json!({"model": "fourth"}))).await.status, 404);

    for aliases in [vec![MODEL.to_owned()], vec!["a".into(), "a".into()], vec![String::new()]] {
        let mut other = Behaviour::new("w2");
        other.hello.aliases = aliases;
        let refused = other.join(&router.app).await.err().unwrap();
        assert_eq!(refused.field, "aliases");
    }
}
