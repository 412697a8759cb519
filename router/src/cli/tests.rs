//! Processes that are told to end while some of their threads never will. Each is this test program once more.

use std::io::{BufRead as _, BufReader};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use tokio::task::spawn_blocking;

use super::*;
use crate::config::LogConfig;

/// The variable that makes a process a router, and says what is busy in it.
const BUSY: &str = "HEADRACE_TEST_BUSY";
/// Longer than a test may take.
const FOR_EVER: Duration = Duration::from_secs(600);
/// A bound of some seconds, on a busy machine.
const SOON: Duration = Duration::from_secs(60);

/// Not a test of its own: the other process.
#[test]
#[ignore = "the process that the other tests start"]
fn a_busy_router() {
    let busy = std::env::var(BUSY).unwrap();
    let args = RouterArgs { port: 0, worker_listen: "127.0.0.1:0".into(), ..RouterArgs::default() };
    let config = Config::try_from(args).unwrap();
    let bounds = StopDeadlines { drain: Some(config.drain_timeout + OVERDUE), stop: STOP };
    let runtime = Runtime::start(busy == "core").unwrap();
    let server = runtime.block_on(Server::start(config)).unwrap();
    let (begun, begins) = channel();
    let sleep = move || {
        begun.send(()).unwrap();
        std::thread::sleep(FOR_EVER);
    };
    match busy.as_str() {
        "tokeniser" => {
            let pool = Arc::clone(server.app().fleet.tokenize_pool());
            runtime.spawn(async move { drop(pool.run(sleep).await) });
            begins.recv().unwrap();
        }
        "blocking" => {
            runtime.block_on(async { drop(spawn_blocking(sleep)) });
            begins.recv().unwrap();
        }
        "panics" => {
            let filter = "trace".into();
            init_log(&LogConfig { filter, json: false, requests_per_s: 20, prompts: false })
                .unwrap();
            for _ in 0..200 {
                let panics = async { panic!("{}", "x".repeat(1_000)) };
                runtime.block_on(async { tokio::spawn(panics).await.unwrap_err() });
            }
        }
        "runtime" => {
            for _ in 0..std::thread::available_parallelism().unwrap().get() {
                let sleep = sleep.clone();
                runtime.spawn(async move { sleep() });
                begins.recv().unwrap();
            }
        }
        "core" => {
            runtime.spawn(async move { sleep() }); // on the one that serves
            begins.recv().unwrap();
        }
        other => panic!("{other}"),
    }
    std::process::exit(run(runtime, server, bounds).unwrap().into());
}

struct Router {
    process: Child,
    stdout: BufReader<ChildStdout>,
}

impl Router {
    /// A router that listens and is busy with `what`.
    fn busy_with(what: &str) -> Self {
        Self::saying(what, Stdio::inherit())
    }

    /// The same, with its log there.
    fn saying(what: &str, stderr: impl Into<Stdio>) -> Self {
        let program = std::env::current_exe().unwrap();
        let mut process = Command::new(program)
            .args(["--exact", "cli::tests::a_busy_router", "--ignored", "--nocapture"])
            .env(BUSY, what)
            .stdout(Stdio::piped())
            .stderr(stderr)
            .spawn()
            .unwrap();
        let mut stdout = BufReader::new(process.stdout.take().unwrap());
        let mut line = String::new();
        while !line.contains("for clients") {
            line.clear();
            assert!(stdout.read_line(&mut line).unwrap() > 0, "it ended");
        }
        Self { process, stdout }
    }

    fn signal(&self, name: &str) {
        let pid = self.process.id().to_string();
        assert!(Command::new("kill").args([name, &pid]).status().unwrap().success());
    }

    fn status(mut self) -> Option<i32> {
        let give_up_at = Instant::now() + SOON;
        loop {
            if let Some(status) = self.process.try_wait().unwrap() {
                return status.code();
            }
            assert!(Instant::now() < give_up_at, "it lives on");
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

impl Drop for Router {
    fn drop(&mut self) {
        let _ = self.process.kill(); // it has ended, if all is well
        let _ = self.process.wait();
        let _ = &self.stdout; // open until here, so that what it prints goes somewhere
    }
}

#[test]
fn a_drain_ends_though_a_thread_is_busy() {
    for busy in ["tokeniser", "blocking"] {
        let router = Router::busy_with(busy);
        router.signal("-TERM");
        assert_eq!(router.status(), Some(0), "{busy}");
    }
}

#[test]
fn the_second_signal_ends_it_though_every_thread_is_busy() {
    for busy in ["runtime", "core"] {
        let router = Router::busy_with(busy);
        router.signal("-TERM");
        router.signal("-INT");
        let status = router.status();
        // both may come before the first was looked at, and then in any order
        assert!(status == Some(128 + 2) || status == Some(128 + 15), "{busy}: {status:?}");
    }
}

#[test]
fn panics_do_not_wait_for_somebody_to_read_of_them() {
    let (unread, writes) = std::io::pipe().unwrap();
    let router = Router::saying("panics", writes); // it listens after 200 kB of them
    router.signal("-TERM");
    assert_eq!(router.status(), Some(0));
    drop(unread);
}

#[test]
fn more_signals_change_nothing_about_that() {
    let router = Router::busy_with("runtime");
    for name in ["-TERM", "-TERM", "-INT", "-INT", "-TERM"] {
        router.signal(name);
    }
    let status = router.status();
    assert!(status == Some(128 + 2) || status == Some(128 + 15), "{status:?}");
}
