//! A worker over HTTP as routers and clients see it.

use std::path::PathBuf;

use clap::Parser as _;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

use super::*;
use crate::{Cli, Command, load};

/// Runs `test` with a worker at an address that it gets.
async fn with_worker<T>(step_ms: &str, test: impl AsyncFnOnce(String, Rc<Worker>) -> T) -> T {
    with_flags(&["--step-ms", step_ms, "--prefix-words", "8"], test).await
}

async fn with_flags<T>(flags: &[&str], test: impl AsyncFnOnce(String, Rc<Worker>) -> T) -> T {
    let args = [&["bench", "http-worker"], flags].concat();
    let Command::HttpWorker(args) = Cli::try_parse_from(args).unwrap().command else {
        panic!("that is a worker")
    };
    let worker = Worker::new(&args);
    let listener = listen("127.0.0.1:0", false).await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let step = Duration::from_secs_f64(args.step_ms / 1e3);
    let serving = serve(listener, Rc::clone(&worker), Clock::start().unwrap(), step);
    let all = LocalSet::new();
    all.run_until(async {
        let serving = spawn_local(serving);
        let result = test(address, worker).await;
        serving.abort();
        result
    })
    .await
}

async fn load_of(address: &str, args: &[&str]) -> Value {
    static NUMBER: std::sync::atomic::AtomicU32 = std::sync::atomic::AtomicU32::new(0);
    let number = NUMBER.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
    let name = format!("headrace-http-worker-{}-{number}.json", std::process::id());
    let report: PathBuf = std::env::temp_dir().join(name);
    let file = report.display().to_string();
    let all = [&["load", "load", "--target", address, "--json", &file], args].concat();
    let Command::Load(args) = Cli::try_parse_from(all).unwrap().command else { panic!("a load") };
    load::run(*args).await.unwrap();
    let found = serde_json::from_slice(&std::fs::read(&report).unwrap()).unwrap();
    std::fs::remove_file(report).unwrap();
    found
}

/// The answer to one request as it comes off the socket.
async fn raw(address: &str, request: &str) -> String {
    let mut stream = TcpStream::connect(address).await.unwrap();
    stream.write_all(request.as_bytes()).await.unwrap();
    stream.shutdown().await.unwrap();
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).await.unwrap();
    String::from_utf8(answer).unwrap()
}

fn post(path: &str, body: &Value) -> String {
    let body = body.to_string();
    format!("POST {path} HTTP/1.1\r\ncontent-length: {}\r\n\r\n{body}", body.len())
}

#[tokio::test]
async fn every_token_of_a_stream_is_an_event_of_its_own() {
    for step_ms in ["0", "1"] {
        with_worker(step_ms, async |address, worker| {
            let flags = ["-n", "40", "-c", "8", "--max-tokens", "17", "--chat"];
            let report = load_of(&address, &flags).await;
            assert_eq!((&report["requests"], &report["errors"]), (&json!(40), &json!(0)));
            assert_eq!(
                (&report["chunks"], &report["completion_tokens"]),
                (&json!(680), &json!(680))
            );
            assert_eq!(worker.served.get().answers, 40);
            assert_eq!(worker.served.get().tokens, 680);
        })
        .await;
    }
}

#[tokio::test]
async fn answers_come_whole_and_as_text_too() {
    with_worker("0", async |address, _| {
        let report =
            load_of(&address, &["-n", "20", "-c", "4", "--max-tokens", "3", "--unary"]).await;
        assert_eq!((&report["errors"], &report["completion_tokens"]), (&json!(0), &json!(60)));
        let report = load_of(&address, &["-n", "5", "--max-tokens", "1"]).await;
        assert_eq!((&report["errors"], &report["chunks"]), (&json!(0), &json!(5)));
    })
    .await;
}

#[tokio::test]
async fn a_beginning_that_was_there_before_is_cached() {
    with_worker("0", async |address, worker| {
        let flags = ["-n", "10", "--unary", "--max-tokens", "1", "--shared-prefix", "9", "--chat"];
        let report = load_of(&address, &flags).await;
        assert_eq!(worker.served.get().cached, 9);
        assert!(report["token_hit_rate"].as_f64().unwrap() > 0.0);
    })
    .await;
}

#[tokio::test]
async fn prompts_take_time() {
    with_flags(&["--prefill-us", "1000"], async |address, worker| {
        assert_eq!(worker.prefill(12), Duration::from_millis(12));
        let flags = ["-n", "1", "--unary", "--max-tokens", "1", "--prompt-words", "48"];
        let report = load_of(&address, &flags).await;
        assert_eq!(report["prompt_tokens"], 50, "two of them are its number");
        assert!(report["ttft_ms"]["p50"].as_f64().unwrap() >= 50.0);
    })
    .await;
}

#[tokio::test]
async fn a_reader_that_takes_nothing_holds_up_nobody_else() {
    with_worker("0", async |address, worker| {
        let body = json!({"prompt": "x", "max_tokens": 200_000, "stream": true}); // 40 MB
        let mut stalled = TcpStream::connect(&address).await.unwrap();
        stalled.write_all(post("/v1/completions", &body).as_bytes()).await.unwrap();
        let report = load_of(&address, &["-n", "20", "-c", "2", "--max-tokens", "5"]).await;
        assert_eq!(report["errors"], 0);
        assert_eq!(worker.served.get().hung_up, 0);
        drop(stalled);
        while worker.served.get().hung_up == 0 {
            tokio::task::yield_now().await;
        }
    })
    .await;
}

#[tokio::test]
async fn routers_learn_of_the_model_and_of_tokens() {
    with_worker("0", async |address, worker| {
        let models = raw(&address, "GET /v1/models HTTP/1.1\r\n\r\n").await;
        assert!(
            models.starts_with("HTTP/1.1 200") && models.contains(r#""id":"mock""#),
            "{models}"
        );
        assert!(raw(&address, "GET /health HTTP/1.1\r\n\r\n").await.starts_with("HTTP/1.1 200"));
        assert!(raw(&address, "GET /nothing HTTP/1.1\r\n\r\n").await.starts_with("HTTP/1.1 404"));
        assert_eq!(worker.served.get().other, 3);
        let ids = async |text: &str| {
            let answer = raw(&address, &post("/tokenize", &json!({"prompt": text}))).await;
            let body = answer.split_once("\r\n\r\n").unwrap().1;
            serde_json::from_str::<Value>(body).unwrap()["tokens"].clone()
        };
        let (two, three) = (ids("a b").await, ids("a b c").await);
        assert_eq!(two.as_array().unwrap()[..], three.as_array().unwrap()[..2]);
        assert_eq!(three.as_array().unwrap().len(), 3);
        assert_eq!(worker.served.get().tokenised, 2);
    })
    .await;
}

#[tokio::test]
async fn what_cannot_be_read_is_refused_and_ends_the_connection() {
    with_worker("0", async |address, _| {
        for (request, status) in [
            ("PRI * HTTP/2.0\r\n\r\n".to_owned(), "400"),
            ("POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n".to_owned(), "411"),
            (format!("POST / HTTP/1.1\r\ncontent-length: {}\r\n\r\n", BODY_BYTES + 1), "413"),
            (post("/v1/completions", &json!({"prompt": 3})), "400"),
            (post("/v1/completions", &json!({"prompt": "x", "max_tokens": 1 << 30})), "413"),
        ] {
            let answer = raw(&address, &request).await;
            assert!(answer.starts_with(&format!("HTTP/1.1 {status} ")), "{answer}");
        }
    })
    .await;
}

#[tokio::test]
async fn clients_that_read_nothing_find_out_at_the_end_what_came() {
    with_worker("0", async |address, _| {
        let args =
            ["bench", "stalled", "--target", &address, "--streams", "3", "--max-tokens", "5"];
        let Command::Stalled(args) = Cli::try_parse_from(args).unwrap().command else {
            panic!("those are clients")
        };
        let report = tokio::task::spawn_blocking(move || {
            crate::peers::stalled::run_until(&args, || ()) // nobody waits for standard input
        });
        let report = serde_json::to_value(report.await.unwrap().unwrap()).unwrap();
        assert_eq!((&report["begun"], &report["whole"]), (&json!(3), &json!(3)), "{report}");
    })
    .await;
}

#[cfg(target_os = "linux")] // elsewhere a machine has but one of these addresses
#[tokio::test]
async fn connections_come_from_the_addresses_that_are_named() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let seen = tokio::spawn(async move {
        let mut seen = Vec::new();
        while seen.len() < 4 {
            let (mut stream, from) = listener.accept().await.unwrap();
            seen.push(from.ip().to_string());
            tokio::spawn(async move {
                let body = r#"{"data": [{"id": "mock"}]}"#;
                let head = format!("HTTP/1.1 200 OK\r\ncontent-length: {}\r\n\r\n", body.len());
                stream.write_all((head + body).as_bytes()).await.unwrap(); // whatever is asked
                let _ = stream.read_to_end(&mut Vec::new()).await;
            });
        }
        seen
    });
    let sources = ["--source", "127.0.0.1", "--source", "127.0.0.2"];
    load_of(&address, &[&sources[..], &["-n", "3", "-c", "3", "--unary"]].concat()).await;
    assert_eq!(seen.await.unwrap(), ["127.0.0.1", "127.0.0.2", "127.0.0.1", "127.0.0.2"]);
}
