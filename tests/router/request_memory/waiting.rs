//! What a request holds while it waits: thousands do so at once.

use super::fake_worker::Event;
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
            ("/v1/chat/completions", chat, 12_900),
            ("/v1/completions", completion, 12_900),
            ("/v1/messages", message, 15_700),
            ("/v1/responses", response, 17_000),
        ] {
            for (room, what) in [(2 * MANY as u32, "a first token"), (1, "a worker")] {
                let bytes = held(path, &body, room).await;
                assert!(bytes < most, "{path} holds {bytes} bytes while it waits for {what}");
            }
        }
    });
}
