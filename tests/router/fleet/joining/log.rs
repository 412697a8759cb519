//! What the log says of workers that come and go: in words, as a warning only where something is wrong, and not the same
//! again and again.

use std::io;
use std::sync::{Arc, Mutex};

use headrace_router::config::{Config, RouterArgs};
use headrace_router::core::frame::{Bye, Frame, RefuseReason};
use headrace_router::server::Server;
use tracing::subscriber::DefaultGuard;
use tracing_subscriber::fmt::MakeWriter;

use crate::fake_worker::*;

/// The log of this thread, on which a test's tasks run.
#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<u8>>>);

impl Log {
    fn kept() -> (Self, DefaultGuard) {
        let log = Self::default();
        let format = tracing_subscriber::fmt().with_ansi(false).with_writer(log.clone());
        (log, tracing::subscriber::set_default(format.finish()))
    }

    /// Its lines with this in them.
    fn lines(&self, text: &str) -> Vec<String> {
        let log = String::from_utf8(self.0.lock().unwrap().clone()).unwrap();
        log.lines().filter(|line| line.contains(text)).map(str::to_owned).collect()
    }
}

impl io::Write for Log {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap().write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl MakeWriter<'_> for Log {
    type Writer = Self;

    fn make_writer(&self) -> Self {
        self.clone()
    }
}

#[tokio::test]
async fn a_name_that_is_taken_is_said_once_in_words_and_counted_each_time() {
    let (log, _guard) = Log::kept();
    let app = start_router(|_| {}).await;
    let _worker = Behaviour::new("w1").ready(&app).await;
    for n in 1..=5 {
        let mut stranger = Behaviour::new("w1");
        stranger.hello.epoch += n << 32;
        assert_eq!(stranger.join(&app).await.unwrap_err().reason, RefuseReason::NameTaken);
        let refused = || metric(&app, "headrace_link_errors_total", "refused_name_taken");
        until("it was counted", || refused() == n as f64).await;
    }
    let lines = log.lines("worker did not join");
    let [line] = &*lines else { panic!("{lines:#?}") };
    let words = "refused: a worker of this name is here and lives";
    assert!(line.contains("worker=\"w1\"") && line.contains(words), "{line}");
}

#[tokio::test]
async fn a_worker_that_leaves_as_it_said_is_no_reason_to_warn_and_one_that_is_lost_is() {
    let (log, _guard) = Log::kept();
    let app = start_router(|_| {}).await;
    let worker = Behaviour::new("w1").ready(&app).await;
    worker.send(Frame::Bye(Bye { reason: "a new version".into() }));
    until("w1 drains", || app.fleet.workers()["workers"][0]["state"] == "draining").await;
    drop(worker);
    until("w1 is gone", || !log.lines("worker left").is_empty()).await;
    assert!(log.lines(" WARN ").is_empty(), "{:#?}", log.lines(""));
    drop(Behaviour::new("w2").ready(&app).await);
    until("w2 is gone", || !log.lines("worker left worker=\"w2\"").is_empty()).await;
    assert_eq!(log.lines(" WARN ").len(), 1, "{:#?}", log.lines(""));
}

#[tokio::test]
async fn a_router_that_ends_warns_of_nothing() {
    let (log, _guard) = Log::kept();
    let args = RouterArgs { port: 0, worker_listen: "127.0.0.1:0".into(), ..RouterArgs::default() };
    let server = Server::start(Config::try_from(args).unwrap()).await.unwrap();
    let _worker = Behaviour::new("w1").ready(server.app()).await;
    server.stopper().drain();
    server.serve().await;
    assert_eq!(log.lines("worker left in good order worker=\"w1\"").len(), 1);
    assert!(log.lines(" WARN ").is_empty(), "{:#?}", log.lines(""));
}
