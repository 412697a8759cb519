//! What a request holds while it waits: thousands do so at once.

use super::fake_worker::{EOS, Event};
use super::*;

/// Requests that are measured, behind as many that are there already.
const MANY: usize = 32;

/// What each of many requests holds, connection included, while a worker with so much room works on none of them. The
/// test's own end of the connection is part of it.
async fn held(path: &str, body: &Value, room: u32) -> usize {
    let mut behaviour = Behaviour::new("w");
    behaviour.hello.capacity.sequences = room;
    behaviour.hello.capacity.waiting = 0;
    let (router, mut worker) = TestRouter::with(behaviour, args()).await;
    let (head, body) = (format!("POST {path} HTTP/1.1\r\n{JSON}"), body.to_string());
    let mut connections = Vec::with_capacity(2 * MANY);
    let mut submitted = 0;
    let mut measure = Measure::begin();
    for number in 0..2 * MANY {
        if number == MANY {
            measure = Measure::begin();
        }
        let mut connection = router.connect().await;
        connection.request(&head, body.as_bytes()).await;
        connections.push(connection);
        fake_worker::until("a request that waits", || {
            submitted +=
                worker.so_far().iter().filter(|event| matches!(event, Event::Submit(_))).count();
            let queued = fake_worker::metric(&router.app, "headrace_queue_requests", "");
            submitted as f64 + queued > number as f64
        })
        .await;
    }
    assert_eq!(submitted, room.min(2 * MANY as u32) as usize);
    measure.grown() / MANY
}

#[test]
fn a_request_that_waits_holds_little_of_what_it_took_to_read_and_to_place_it() {
    run(async {
        let messages = json!([{"role": "user", "content": "hi"}]);
        let chat = json!({"model": MODEL, "messages": messages, "stream": true});
        let completion = json!({"model": MODEL, "prompt": "hi", "stream": true});
        let message =
            json!({"model": MODEL, "messages": messages, "max_tokens": 9, "stream": true});
        let response = json!({"model": MODEL, "input": "hi", "stream": true});
        for (path, body, most) in [
            ("/v1/chat/completions", chat, 11_500),
            ("/v1/completions", completion, 11_500),
            ("/v1/messages", message, 13_700),
            ("/v1/responses", response, 15_300),
        ] {
            for (room, what) in [(2 * MANY as u32, "a first token"), (1, "a worker")] {
                let bytes = held(path, &body, room).await;
                assert!(bytes < most, "{path} holds {bytes} bytes while it waits for {what}");
            }
        }
    });
}

/// What a connection holds after its answer, the test's own end of it included.
async fn held_at_rest(head: &str, body: &str, generates: bool) -> usize {
    let (router, mut worker) = TestRouter::with(Behaviour::new("w"), args()).await;
    let mut connections = Vec::with_capacity(2 * MANY);
    let mut measure = Measure::begin();
    for number in 0..2 * MANY {
        if number == MANY {
            measure = Measure::begin();
        }
        let mut connection = router.connect().await;
        connection.request(head, body.as_bytes()).await;
        if generates {
            let request = worker.submitted().await.request;
            worker.gives(request, &[EOS], Some(Finish::Stop));
        }
        connection.reply().await;
        connections.push(connection);
    }
    measure.grown() / MANY
}

#[test]
fn a_connection_that_rests_after_an_answer_holds_no_room_to_read_the_next_request() {
    run(async {
        let asks = |stream| json!({"model": MODEL, "prompt": "hi", "stream": stream}).to_string();
        let post = format!("POST /v1/completions HTTP/1.1\r\n{JSON}");
        for (head, body, generates) in [
            (post.as_str(), asks(false), true),
            (&post, asks(true), true),
            (&post, "{}".into(), false), // 400
            ("GET /health HTTP/1.1", String::new(), false),
        ] {
            let bytes = held_at_rest(head, &body, generates).await;
            assert!(bytes < 7_000, "{head} {body}: {bytes} bytes");
        }
    });
}
