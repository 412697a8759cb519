//! Load and replay against a real router with workers without a model, all in one process.

use std::path::{Path, PathBuf};

use clap::Parser as _;
use headrace_router::config::{Config, RouterArgs};
use headrace_router::process::stopper::Stopper;
use headrace_router::server::Server;
use serde_json::{Value, json};

use crate::{BadInput, Cli, Command, load, mock, replay};

const TOKENIZER: &str = include_str!("../../tests/data/tokenizer_byte_level.json");
const VOCAB: &str = "570";
const CHAT_TEMPLATE: &str =
    "{% for m in messages %}{{ m['role'] + ' ' + m['content'] }}{% endfor %}";

/// A router with two workers, and a folder for files. The router ends with it, and the workers with the router.
struct Stack {
    folder: PathBuf,
    address: String,
    stopper: Stopper,
}

impl Stack {
    async fn start(name: &str) -> Self {
        let folder = std::env::temp_dir().join(format!("headrace-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let doc = json!({
            "tokenizer": TOKENIZER, "chat_template": CHAT_TEMPLATE, "eos_token_ids": [2],
            "eos_token": "<|im_end|>", "context_tokens": 4096, "vocab_size": 577, "generation": {},
        });
        std::fs::write(folder.join("doc.json"), doc.to_string()).unwrap();
        let args =
            RouterArgs { port: 0, worker_listen: "127.0.0.1:0".into(), ..RouterArgs::default() };
        let server = Server::start(Config::try_from(args).unwrap()).await.unwrap();
        let address = server.http_address().to_string();
        let workers = server.worker_address().to_string();
        let stopper = server.stopper();
        tokio::spawn(server.serve());
        let doc = folder.join("doc.json").display().to_string();
        let args = ["mock", "--router", &workers, "--workers", "2", "--doc", &doc, "--once"];
        let as_fast_as_it_goes = ["--cost", "0,0,0,0,0", "--block-tokens", "16"];
        let Command::Mock(args) = parse(&[&args[..], &as_fast_as_it_goes].concat()) else {
            panic!("those are workers")
        };
        tokio::spawn(async move { mock::run(&args).await });
        let stack = Self { folder, address, stopper };
        stack.wait_for_workers().await;
        stack
    }

    async fn wait_for_workers(&self) {
        for _ in 0..10_000 {
            if self.load(&["-n", "1"]).await.is_ok() {
                return;
            }
            tokio::task::yield_now().await;
        }
        panic!("the workers did not come");
    }

    async fn load(&self, args: &[&str]) -> anyhow::Result<Value> {
        let report = self.folder.join("report.json").display().to_string();
        let all = ["load", "--target", &self.address, "--json", &report, "--max-tokens", "4"];
        let Command::Load(args) = parse(&[&all, args].concat()) else { panic!("that is a load") };
        load::run(*args).await?;
        Ok(read(Path::new(&report)))
    }

    async fn replay(&self, trace: &str, args: &[&str]) -> anyhow::Result<Value> {
        let file = self.folder.join("trace.jsonl");
        std::fs::write(&file, trace).unwrap();
        let (file, report) = (file.display().to_string(), self.folder.join("replay.json"));
        let json = report.display().to_string();
        let all = ["replay", &file, "--target", &self.address, "--vocab", VOCAB, "--json", &json];
        let Command::Replay(args) = parse(&[&all, args].concat()) else { panic!("no replay") };
        replay::run(*args).await?;
        Ok(read(&report))
    }
}

impl Drop for Stack {
    fn drop(&mut self) {
        self.stopper.stop();
        let _ = std::fs::remove_dir_all(&self.folder); // what stays is in the folder for such things
    }
}

fn parse(args: &[&str]) -> Command {
    Cli::try_parse_from([&["headrace-bench"], args].concat()).unwrap().command
}

fn read(path: &Path) -> Value {
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn loops_of_both_kinds_count_what_was_answered() {
    let stack = Stack::start("loops").await;
    let closed = stack.load(&["-n", "12", "-c", "3", "--chat", "--slo", "ttft=1m"]).await.unwrap();
    assert_eq!((&closed["requests"], &closed["errors"]), (&json!(12), &json!(0)));
    assert_eq!(closed["completion_tokens"], 48);
    assert_eq!(closed["goodput"]["met"], 12);
    assert_eq!(closed["token_hit_rate"], 0.0);
    assert!(closed["ttft_ms"]["p50"].as_f64() < closed["e2e_ms"]["p50"].as_f64());
    let open = ["--rate", "400", "-n", "20", "--prompt-tokens", "40", "--vocab", VOCAB];
    let open = stack.load(&open).await.unwrap();
    assert_eq!((&open["requests"], &open["prompt_tokens"]), (&json!(20), &json!(800)));
    assert_eq!(open["offered_per_s"], 400.0);
    assert_eq!(open["client_lag_ms"]["count"], 20);
    let unary = stack.load(&["-n", "3", "--unary"]).await.unwrap();
    assert_eq!((&unary["chunks"], &unary["completion_tokens"]), (&json!(3), &json!(12)));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_the_server_refuses_is_counted_by_kind() {
    let stack = Stack::start("refused").await;
    let long = ["-n", "5", "--prompt-tokens", "170000", "--vocab", VOCAB];
    let error = stack.load(&long).await.unwrap_err().to_string();
    assert!(error.contains("no request was answered: 400"), "{error}");
    let report = read(&stack.folder.join("report.json"));
    assert_eq!((&report["errors"], &report["errors_by_kind"]["400"]), (&json!(5), &json!(5)));
    let error = format!("{:#}", stack.load(&["-n", "5", "--model", "other"]).await.unwrap_err());
    assert!(error.contains("does not serve `other`, but "), "{error}");
    let nobody = ["load", "--target", "127.0.0.1:1", "--model", "m", "--start-timeout-s", "0"];
    let Command::Load(args) = parse(&nobody) else { panic!("that is a load") };
    let error = load::run(*args).await.unwrap_err().to_string();
    assert!(error.contains("127.0.0.1:1 is not ready: nobody listens there"), "{error}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_trace_goes_out_with_its_lengths() {
    let stack = Stack::start("trace").await;
    let trace = r#"{"timestamp": 0, "input_length": 1000, "output_length": 20, "hash_ids": [0, 1]}
        {"timestamp": 20, "input_length": 1200, "output_length": 9, "hash_ids": [0, 1, 2]}"#;
    let args = ["--scale", "32", "--output-scale", "4", "--workers", "2", "--blocks", "10"];
    let report = stack.replay(trace, &args).await.unwrap();
    assert_eq!((&report["requests"], &report["errors"]), (&json!(2), &json!(0)));
    assert_eq!(report["prompt_tokens"], (16 + 16) + (32 + 6));
    assert_eq!(report["completion_tokens"], 5 + 3);
    assert_eq!(report["bound_hit_rate"], 1024.0 / 2200.0);
    assert_eq!((&report["trace"], &report["mode"]), (&json!("trace"), &json!("live")));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_bad_row_stops_before_anything_is_sent() {
    let stack = Stack::start("bad-row").await;
    let trace = r#"{"timestamp": 0, "input_length": 1000, "output_length": 20, "hash_ids": [0, 1]}
        {"timestamp": 20, "input_length": "x", "output_length": 9, "hash_ids": [0, 1, 2]}"#;
    let error = stack.replay(trace, &[]).await.unwrap_err();
    assert!(error.is::<BadInput>());
    assert!(error.to_string().contains("trace.jsonl:2: `input_length` is \"x\""), "{error}");
    assert!(!stack.folder.join("replay.json").exists());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn conversations_take_their_turns() {
    let stack = Stack::start("chat").await;
    let trace = r#"
        {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello there"},
            {"role": "user", "content": "Bye"}, {"role": "assistant", "content": "So long"}]}
        {"messages": [{"role": "user", "content": "Ho"}, {"role": "assistant", "content": "Well"}]}"#
        .replace("\n            ", " ");
    let report = stack.replay(&trace, &["--rate", "1000"]).await.unwrap();
    assert_eq!((&report["requests"], &report["errors"]), (&json!(3), &json!(0)));
    assert_eq!(report["completion_tokens"], 2 + 1 + 1);
    let error = stack.replay(&trace, &["--scale", "2"]).await.unwrap_err();
    assert!(error.is::<BadInput>(), "{error}");
}
