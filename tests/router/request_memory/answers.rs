//! What answers take on their way to a client.

use super::*;

/// Tokens of an answer with 20 alternatives each.
fn scored(request: headrace_router::core::frame::RequestId, tokens: usize, end: bool) -> Output {
    let top = (0..20).map(|i| Ranked(3 + i, -f64::from(i) - 0.123_456_789)).collect();
    let at = TokenLogprob { logprob: -0.123_456_789, top };
    let finish = end.then_some(Finish::Length);
    Output {
        logprobs: Some(vec![at; tokens]),
        ..output(request, letters("a").repeat(tokens), finish)
    }
}

/// Reads an answer and throws it away; its status and length.
async fn drained(connection: &mut Connection) -> (u16, usize) {
    let head = connection.head().await;
    let mut length = 0;
    assert_eq!(head.header("transfer-encoding"), Some("chunked"));
    while let Some(chunk) = connection.chunk().await {
        length += chunk.len();
    }
    (head.status, length)
}

async fn many_choices(
    args: RouterArgs,
    extra: Value,
) -> (TestRouter, FakeWorker, Connection, Vec<headrace_router::core::frame::RequestId>) {
    let (router, mut worker) = TestRouter::with(Behaviour::new("w"), args).await;
    let mut connection = router.connect().await;
    let mut body = json!({"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "n": 8,
        "logprobs": true, "top_logprobs": 20, "ignore_eos": true});
    body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
    let head = "POST /v1/chat/completions HTTP/1.1\r\nContent-Type: application/json";
    connection.request(head, body.to_string().as_bytes()).await;
    let mut requests = Vec::new();
    for _ in 0..8 {
        requests.push(worker.submitted().await.request);
    }
    (router, worker, connection, requests)
}

#[test]
fn log_probabilities_of_many_choices_take_little_more_than_their_numbers() {
    run(async {
        let extra = json!({"max_tokens": 1000});
        let (router, worker, mut connection, requests) = many_choices(args(), extra).await;
        let measure = Measure::begin();
        for turn in 0..40 {
            let outputs = requests.iter().map(|request| scored(*request, 25, turn == 39));
            worker.send(Frame::Step(step(outputs.collect())));
            tokio::task::yield_now().await;
        }
        let (status, length) = drained(&mut connection).await;
        let peak = measure.peak();
        assert!(status == 200 && length > 8_000_000, "{status}, {length}");
        // 8,000 tokens of 253 bytes, and the frames as far as they came at once
        assert!(peak < 8_000 * 253 * 5 / 4 + BESIDE, "{peak} bytes for {length}");
        comes_to_nothing(&router.app.metrics.http.answer_bytes).await;
    });
}

#[test]
fn an_answer_beyond_its_memory_is_refused_before_or_ends_by_name() {
    run(async {
        let args = RouterArgs { max_answer_memory_bytes: MIB, ..args() };
        let (router, mut worker, mut connection, requests) = many_choices(args, json!({})).await;
        // what may be too long but says nothing of it runs until it is
        let gauge = &router.app.metrics.http.answer_bytes;
        for turn in 1..=7 {
            worker.send(Frame::Step(step(vec![scored(requests[0], 300, false)])));
            let kept = if turn < 7 { turn * 300 * 253 } else { 0 };
            in_time("the tokens", async {
                while gauge.get() < kept {
                    tokio::task::yield_now().await;
                }
            })
            .await;
        }
        let reply = connection.reply().await;
        assert_eq!((reply.status, &reply.error()["code"]), (400, &json!("answer_too_large")));
        worker.cancelled().await;
        comes_to_nothing(&router.app.metrics.http.answer_bytes).await;
        let body =
            json!({"model": MODEL, "prompt": "hi", "logprobs": 20, "n": 8, "max_tokens": 1000});
        worker.so_far();
        let reply = router.post("/v1/completions", body.to_string()).await;
        assert_eq!((reply.status, &reply.error()["code"]), (400, &json!("answer_too_large")));
        let message = reply.error()["message"].as_str().unwrap().to_owned();
        assert!(message.contains("`n`") && message.contains("`max_tokens`"), "{message}");
        let heard = worker.so_far();
        let submitted = |event: &fake_worker::Event| matches!(event, fake_worker::Event::Submit(_));
        assert!(!heard.iter().any(submitted), "{heard:?}");
    });
}

#[test]
fn tokens_of_a_long_text_are_written_as_the_client_takes_them() {
    run(async {
        let mut behaviour = Behaviour::says("w", "x");
        behaviour.hello.context_tokens = 100_000;
        let mut doc = fake_worker::doc();
        doc["context_tokens"] = json!(100_000);
        behaviour.doc = doc.to_string().into_bytes();
        let (router, _worker) = TestRouter::with(behaviour, args()).await;
        let body = json!({"prompt": "a b ".repeat(8_000), "return_token_strs": true}).to_string();
        let mut connection = router.connect().await;
        let head = "POST /tokenize HTTP/1.1\r\nContent-Type: application/json";
        connection.request(head, body.as_bytes()).await;
        connection.head().await;
        let first = connection.chunk().await.unwrap();
        let start = String::from_utf8_lossy(&first[..100]);
        assert!(start.contains(r#","max_model_len":100000,"tokens":["#), "{start}");
        // now the text is gone and the ids are there
        let measure = Measure::begin();
        let (mut length, mut last) = (first.len(), first);
        while let Some(chunk) = connection.chunk().await {
            length += chunk.len();
            last = chunk;
        }
        let peak = measure.peak();
        assert!(length > 2 * (64 << 10) && last.ends_with(b"\"]}"), "{length}");
        // some pieces of 64 KiB, here and in the client
        assert!(peak < MIB, "{peak} bytes for {length}");
        comes_to_nothing(&router.app.metrics.http.body_bytes).await;
    });
}
