//! Mock workers over real sockets: with a real router, and with frames by hand.

use std::time::Duration;

use clap::Parser;
use headrace_router::app::App;
use headrace_router::config::{Config, RouterArgs};
use headrace_router::core::frame::{
    Blocks, Cancel, Drain, Frame, Hello, MAX_FRAME_BYTES, PROTOCOL, RequestId, Resync, Sampling,
    Snapshot, Step, Submit, Welcome,
};
use headrace_router::fleet::codec::{FrameReader, FrameWriter};
use headrace_router::server::Server;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::timeout;

use super::*;

mod groups;
mod scripts;
mod split;

/// Whatever a test waits for comes in this time, or it fails.
const IN_TIME: Duration = Duration::from_secs(60);

#[derive(Parser)]
struct Flags {
    #[command(flatten)]
    mock: MockArgs,
}

fn fleet(router: &str, flags: &str) -> Running {
    knowing(None, router, flags)
}

fn knowing(secret: Option<&str>, router: &str, flags: &str) -> Running {
    let args = ["mock", "--router", router].into_iter().chain(flags.split_whitespace());
    let mut args = Flags::parse_from(args).mock;
    args.secret = secret.map(Into::into);
    start(&args, Model::built_in(), None).unwrap()
}

/// A router on free ports, and how clients reach it.
struct Stack {
    app: Arc<App>,
    http: std::net::SocketAddr,
    workers: String,
}

async fn router(secret: Option<&str>) -> Stack {
    let args = RouterArgs {
        port: 0,
        worker_listen: "127.0.0.1:0".into(),
        secret: secret.map(Into::into),
        api_key: Vec::new(),
        tokenizer_threads: 1,
        heartbeat_ms: 50,
        heartbeat_timeout_ms: 1_000,
        ..RouterArgs::default()
    };
    let server = Server::start(Config::try_from(args).unwrap()).await.unwrap();
    let (app, http) = (Arc::clone(server.app()), server.http_address());
    let workers = server.worker_address().to_string();
    tokio::spawn(server.serve());
    Stack { app, http, workers }
}

impl Stack {
    fn worker(&self, name: &str) -> Value {
        let workers = self.app.fleet.workers();
        let found = workers["workers"].as_array().unwrap().iter().find(|other| other["id"] == name);
        found.cloned().unwrap_or_default()
    }

    fn ready(&self) -> usize {
        let workers = self.app.fleet.workers();
        let of_all = workers["workers"].as_array().unwrap();
        of_all.iter().filter(|worker| worker["state"] == "ready").count()
    }

    async fn complete(&self, body: &Value) -> Value {
        let mut stream = self.post(body).await;
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.unwrap();
        let (head, body) = answer.split_once("\r\n\r\n").unwrap();
        assert!(head.starts_with("HTTP/1.1 200"), "{answer}");
        let json = body.find('{').map(|at| &body[at..=body.rfind('}').unwrap()]);
        serde_json::from_str(json.unwrap()).unwrap()
    }

    async fn post(&self, body: &Value) -> TcpStream {
        let body = body.to_string();
        let mut stream = TcpStream::connect(self.http).await.unwrap();
        let head = format!(
            "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-type: \
             application/json\r\ncontent-length: {}\r\n\r\n",
            body.len()
        );
        stream.write_all((head + &body).as_bytes()).await.unwrap();
        stream
    }
}

/// Waits for something that has no event of its own.
async fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    let looks = async {
        while !is_so() {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    timeout(IN_TIME, looks).await.unwrap_or_else(|_| panic!("{what} did not come in time"));
}

const FAST: &str = "--cost 0.1,0,0,0,0 --block-tokens 16 --blocks 256";

#[tokio::test]
async fn a_router_serves_text_and_tokens_from_mock_workers() {
    let stack = router(None).await;
    let _fleet = fleet(&stack.workers, &format!("{FAST} --workers 3"));
    until("three workers", || stack.ready() == 3).await;
    let text = "the value of the function is returned to the caller, as in the other file. ";
    let body = json!({"model": "mock", "prompt": text.repeat(20), "max_tokens": 7});
    let answer = stack.complete(&body).await;
    let tokens = answer["usage"]["prompt_tokens"].as_u64().unwrap();
    assert!((150..600).contains(&tokens), "{tokens} tokens for {} bytes", text.len() * 20);
    assert_eq!(answer["usage"]["completion_tokens"], 7);
    assert!(answer["choices"][0]["text"].as_str().unwrap().len() > 7, "tokens have text");
    let unknown =
        json!({"model": "mock", "prompt": [31_000, 32_000, 5], "max_tokens": 1, "seed": 3});
    let first = stack.complete(&unknown).await;
    assert_eq!(first["usage"]["prompt_tokens"], 3);
    assert_eq!(first["choices"][0]["text"], stack.complete(&unknown).await["choices"][0]["text"]);
}

#[tokio::test]
async fn a_prompt_that_comes_again_is_cached_but_for_its_end() {
    let stack = router(None).await;
    let fleet = fleet(&stack.workers, &format!("{FAST} --workers 1"));
    until("the worker", || stack.ready() == 1).await;
    let prompt: Vec<u32> = (1_000..1_100).collect();
    let body = json!({"model": "mock", "prompt": prompt, "max_tokens": 2});
    let cached = |answer: Value| answer["usage"]["prompt_tokens_details"]["cached_tokens"].clone();
    assert_eq!(cached(stack.complete(&body).await), 0);
    assert_eq!(cached(stack.complete(&body).await), 96);
    let report = serde_json::to_value(fleet.report()).unwrap();
    assert_eq!((&report["requests"], &report["tokens"]), (&json!(2), &json!(4)));
}

#[tokio::test]
async fn log_probabilities_are_given_and_the_same_again() {
    let stack = router(None).await;
    let _fleet = fleet(&stack.workers, &format!("{FAST} --workers 1"));
    until("the worker", || stack.ready() == 1).await;
    let prompt: Vec<u32> = (1_000..1_040).collect();
    let body = json!({
        "model": "mock", "prompt": prompt, "max_tokens": 3, "seed": 5, "logprobs": 2, "echo": true,
    });
    let (first, again) = (stack.complete(&body).await, stack.complete(&body).await);
    let logprobs = &first["choices"][0]["logprobs"];
    assert_eq!(logprobs, &again["choices"][0]["logprobs"]);
    let (of, top) = (&logprobs["token_logprobs"], &logprobs["top_logprobs"]);
    let of = of.as_array().unwrap();
    assert_eq!((of.len(), top.as_array().unwrap().len()), (43, 43), "prompt and answer");
    assert!(of[0].is_null() && of[1..].iter().all(|of| of.as_f64().unwrap() < 0.0), "{of:?}");
    assert!(top.as_array().unwrap()[1..].iter().all(|top| top.as_object().unwrap().len() == 2));
    let cached = |answer: &Value| answer["usage"]["prompt_tokens_details"]["cached_tokens"].clone();
    assert_eq!(cached(&again), 0, "a prompt that is scored is computed");
}

#[tokio::test]
async fn a_client_that_hangs_up_leaves_no_block_behind() {
    let stack = router(None).await;
    let _fleet = fleet(&stack.workers, "--cost 5,0,0,0,0 --block-tokens 16 --workers 1");
    until("the worker", || stack.ready() == 1).await;
    let prompt: Vec<u32> = (1_000..1_100).collect();
    let body = json!({"model": "mock", "prompt": prompt, "max_tokens": 4_000, "stream": true});
    let mut stream = stack.post(&body).await;
    assert!(stream.read(&mut [0; 16]).await.unwrap() > 0);
    until("blocks in use", || stack.worker("w0")["blocks_used"] != 0).await;
    drop(stream);
    until("the blocks", || stack.worker("w0")["blocks_used"] == 0).await;
}

#[tokio::test]
async fn a_secret_is_proved_and_a_wrong_one_is_refused() {
    let stack = router(Some("long-enough")).await;
    let _fleet = knowing(Some("long-enough"), &stack.workers, &format!("{FAST} --workers 2"));
    until("both", || stack.ready() == 2).await;
    let mut wrong = knowing(Some("another-one"), &stack.workers, &format!("{FAST} --name x"));
    let error = timeout(IN_TIME, wrong.ended()).await.unwrap().unwrap_err();
    assert!(error.to_string().contains("refused"), "{error:#}");
    let mut none = fleet(&stack.workers, &format!("{FAST} --name y"));
    let error = timeout(IN_TIME, none.ended()).await.unwrap().unwrap_err();
    assert!(error.to_string().contains("secret"), "{error:#}");
}

#[tokio::test]
async fn a_worker_dies_and_comes_back_as_another_process() {
    let stack = router(None).await;
    let fleet = fleet(&stack.workers, &format!("{FAST} --workers 2"));
    until("both", || stack.ready() == 2).await;
    let epoch = stack.worker("w1")["epoch"].as_u64().unwrap();
    fleet.fleet.faults.send("w1:die@0-100ms".parse().unwrap()).unwrap();
    until("its death", || stack.ready() == 1).await;
    until("its return", || stack.ready() == 2).await;
    assert!(stack.worker("w1")["epoch"].as_u64().unwrap() > epoch);
}

#[tokio::test]
async fn a_frozen_worker_is_silent_and_then_goes_on() {
    let stack = router(None).await;
    let fleet = fleet(&stack.workers, &format!("{FAST} --workers 2"));
    until("both", || stack.ready() == 2).await;
    fleet.fleet.faults.send("w0:freeze@0-400ms".parse().unwrap()).unwrap();
    until("silence", || stack.worker("w0")["state"] != "ready").await;
    assert_eq!(stack.worker("w1")["state"], "ready");
    until("its return", || stack.ready() == 2).await;
}

/// Serves the same `prompts` again and again until `is_so`.
async fn serve_until(stack: &Stack, prompts: u32, what: &str, mut is_so: impl FnMut() -> bool) {
    let serve = async {
        for number in 0.. {
            if is_so() {
                return;
            }
            let first = 1_000 + 100 * (number % prompts);
            let prompt: Vec<u32> = (first..first + 100).collect();
            stack.complete(&json!({"model": "mock", "prompt": prompt, "max_tokens": 1})).await;
        }
    };
    timeout(IN_TIME, serve).await.unwrap_or_else(|_| panic!("{what} did not come in time"));
}

/// One worker with this fault, which the router asks for its snapshot again while all requests are served.
async fn asked_again(fault: &str) -> (Stack, Running) {
    let stack = router(None).await;
    let fleet = fleet(&stack.workers, &format!("{FAST} --workers 1 --fault {fault}"));
    until("the worker", || stack.ready() == 1).await;
    let resyncs = || fleet.fleet.pace.lock().unwrap().resyncs;
    serve_until(&stack, 5, "a request for the snapshot", || resyncs() > 0).await;
    (stack, fleet)
}

#[tokio::test]
async fn a_gap_heals() {
    let (stack, _fleet) = asked_again("gap").await;
    until("belief", || stack.worker("w0")["credit_withdrawn"].is_null()).await;
    let worker = stack.worker("w0");
    assert_eq!(worker["blocks_indexed"], worker["blocks_cached"]);
}

#[tokio::test]
async fn lost_events_heal() {
    asked_again("drop-events=0.5").await;
}

#[tokio::test]
async fn who_claims_more_than_its_pool_is_not_believed() {
    let (stack, _fleet) = asked_again("overclaim").await;
    assert!(stack.worker("w0")["blocks_indexed"].as_u64().unwrap() <= 256);
}

#[tokio::test]
async fn who_loses_what_it_stored_is_found_out() {
    asked_again("forget=1").await;
}

/// A router of which the test writes every frame.
struct ByHand {
    reader: FrameReader<OwnedReadHalf>,
    writer: FrameWriter<OwnedWriteHalf>,
    hello: Hello,
}

impl ByHand {
    /// Welcomes the next worker and takes its empty snapshot.
    async fn welcome(listener: &TcpListener, hash_key: u8) -> Self {
        let (stream, _) = timeout(IN_TIME, listener.accept()).await.unwrap().unwrap();
        let (read, write) = stream.into_split();
        let (mut reader, writer) =
            (FrameReader::new(read, MAX_FRAME_BYTES), FrameWriter::new(write));
        let Some(Frame::Hello(hello)) = reader.next().await.unwrap() else { panic!("no Hello") };
        let mut by_hand = Self { reader, writer, hello };
        by_hand
            .send(Frame::Welcome(Welcome {
                protocol: PROTOCOL,
                router: "by hand".into(),
                heartbeat_ms: 60_000,
                challenge: Vec::new(),
                proof: Vec::new(),
                hash_key: vec![hash_key; 32],
            }))
            .await;
        by_hand
    }

    async fn send(&mut self, frame: Frame) {
        self.writer.push(&frame).unwrap();
        self.writer.flush().await.unwrap();
    }

    async fn next(&mut self) -> Frame {
        timeout(IN_TIME, self.reader.next()).await.unwrap().unwrap().expect("the worker hung up")
    }

    async fn snapshot(&mut self) -> Snapshot {
        loop {
            if let Frame::Snapshot(snapshot) = self.next().await {
                return snapshot;
            }
        }
    }

    /// Sends a prompt of `blocks` blocks of its own and reads to its end: events on the way, and the last step.
    async fn serve(&mut self, number: u32, blocks: u32) -> (Vec<Blocks>, Step) {
        let tokens = (0..16 * blocks).flat_map(|i| (number * 700 + i).to_le_bytes()).collect();
        self.send(Frame::Submit(Submit {
            request: RequestId(number.into()),
            tokens,
            sampling: Sampling::default(),
            stop_ids: Vec::new(),
            max_tokens: 1,
            deadline_ms: None,
            priority: 0,
            salt: Vec::new(),
            kv_from: None,
            resume: None,
            kv_transfer: None,
            pooling: None,
            request_id: "".into(),
            trace: None,
        }))
        .await;
        let mut events = Vec::new();
        loop {
            let frame = self.next().await;
            if let Frame::Blocks(blocks) = frame {
                events.push(blocks);
            } else if let Frame::Step(step) = frame
                && !step.outputs.is_empty()
            {
                return (events, step);
            }
        }
    }
}

async fn by_hand(flags: &str) -> (ByHand, Running, TcpListener) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let running = fleet(&address, &format!("{FAST} --workers 1 {flags}"));
    (ByHand::welcome(&listener, 7).await, running, listener)
}

#[tokio::test]
async fn a_worker_that_is_told_to_says_what_its_steps_cost() {
    let (router, _running, _) = by_hand("--speed 4 --step-prior").await;
    assert_eq!(router.hello.step_prior.unwrap().fixed_ms, 0.1 / 4.0);
}

#[tokio::test]
async fn blocks_come_before_their_step_and_again_when_asked_for() {
    let (mut router, _running, _) = by_hand("--speed 4").await;
    assert_eq!(router.hello.step_prior, None, "as a real one, which does not know");
    assert!(router.snapshot().await.hashes.is_empty());
    let (events, step) = router.serve(1, 3).await;
    assert_eq!((events.len(), events[0].sequence, events[0].stored[0].hashes.len()), (1, 1, 24));
    assert_eq!((step.prefill_tokens, step.prefill_context), (48, 48 * 47 / 2));
    router.send(Frame::Resync(Resync { reason: "a test".into() })).await;
    let again = router.snapshot().await;
    assert_eq!((again.sequence, &again.hashes), (1, &events[0].stored[0].hashes));
    let (events, _) = router.serve(2, 1).await;
    assert_eq!(events[0].sequence, 2);
}

#[tokio::test]
async fn faults_reach_the_frames() {
    let (mut router, _running, _) =
        by_hand("--fault gap --fault drop-events=1@60m --fault lie=50%").await;
    let (events, step) = router.serve(1, 4).await;
    assert_eq!(events[0].sequence, 2, "a hole");
    assert_eq!(step.outputs[0].cached_tokens, Some(32), "a lie");
    let (mut router, _running, _) = by_hand("--fault stop-events").await;
    assert!(router.serve(1, 4).await.0.is_empty());
    let (mut router, _running, _) = by_hand("--fault overclaim").await;
    assert_eq!(router.serve(1, 4).await.0[0].stored.len(), 2);
}

#[tokio::test]
async fn the_cache_outlives_the_link_but_not_the_key() {
    let (mut router, _running, listener) = by_hand("").await;
    let (events, _) = router.serve(1, 3).await;
    drop(router);
    let mut router = ByHand::welcome(&listener, 7).await;
    assert_eq!(router.snapshot().await.hashes, events[0].stored[0].hashes);
    drop(router);
    let mut router = ByHand::welcome(&listener, 8).await;
    assert!(router.snapshot().await.hashes.is_empty());
}

#[tokio::test]
async fn a_cancel_is_answered_whatever_it_names() {
    let (mut router, _running, _) = by_hand("").await;
    router.send(Frame::Cancel(Cancel { request: RequestId(404) })).await;
    loop {
        if let Frame::Freed(freed) = router.next().await {
            assert_eq!((freed.request, freed.blocks), (RequestId(404), 0));
            return;
        }
    }
}

#[tokio::test]
async fn a_drained_fleet_says_goodbye_and_ends() {
    let (mut router, mut running, _) = by_hand("").await;
    router.serve(1, 3).await;
    router.send(Frame::Drain(Drain { budget_ms: 10_000, migration: None })).await;
    timeout(IN_TIME, running.ended()).await.unwrap().unwrap();
    let mut last = None;
    while let Ok(Some(frame)) = router.reader.next().await {
        last = Some(frame);
    }
    assert!(matches!(last, Some(Frame::Bye(_))), "{last:?}");
}

#[tokio::test]
async fn a_fleet_says_what_time_its_steps_should_have_taken() {
    let (mut router, running, _) = by_hand("--speed 20 --noise 0").await;
    router.snapshot().await;
    for number in 0..40 {
        router.serve(number, 1).await;
    }
    let report = serde_json::to_value(running.report()).unwrap();
    assert!((report["asked_s"].as_f64().unwrap() - 40.0 * 0.1e-3 / 20.0).abs() < 1e-9);
}
