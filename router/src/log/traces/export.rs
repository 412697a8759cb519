//! Spans on their way to the collector: a bounded queue, and the task that sends them in batches.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use opentelemetry_otlp::SpanExporter;
use opentelemetry_sdk::trace::{SpanData, SpanExporter as _};
use tokio::sync::{Mutex, mpsc};
use tokio::task::JoinHandle;
use tokio::time::{sleep, timeout};
use tokio_util::sync::CancellationToken;

use crate::metrics::Metrics;

/// Spans that wait. At most some 10 MB; a request has five or so. A guess.
const WAITING: usize = 4_096;
/// Spans that are sent together at most, as OpenTelemetry has it.
const BATCH: usize = 512;
/// From the first span of a batch on others are waited for.
const GATHERING: Duration = Duration::from_secs(1);

/// Where spans are put that ended.
#[derive(Debug)]
pub(super) struct SpanQueue {
    spans: mpsc::Sender<SpanData>,
    waiting: Arc<AtomicU64>,
}

impl SpanQueue {
    /// Never waits: a span that finds no room is lost.
    pub(super) fn push(&self, span: SpanData, metrics: &Metrics) {
        self.waiting.fetch_add(1, Relaxed);
        let lost = match self.spans.try_send(span) {
            Ok(()) => return,
            Err(mpsc::error::TrySendError::Full(_)) => "queue_full",
            Err(mpsc::error::TrySendError::Closed(_)) => "shutdown",
        };
        self.waiting.fetch_sub(1, Relaxed);
        metrics.spans.dropped.inc(lost);
    }
}

/// The task that sends spans.
#[derive(Debug)]
pub(super) struct Export {
    task: Mutex<JoinHandle<()>>,
    closing: CancellationToken,
    waiting: Arc<AtomicU64>,
    metrics: Arc<Metrics>,
}

impl Export {
    /// `refused` counts the spans of a batch that the collector did not want.
    pub(super) fn start(
        exporter: SpanExporter,
        refused: Arc<AtomicU64>,
        metrics: Arc<Metrics>,
    ) -> (Self, SpanQueue) {
        let (spans, inbox) = mpsc::channel(WAITING);
        let (waiting, closing) = (Arc::new(AtomicU64::new(0)), CancellationToken::new());
        let sending = Sending {
            exporter,
            inbox,
            refused,
            waiting: Arc::clone(&waiting),
            metrics: Arc::clone(&metrics),
            is_losing: false,
        };
        let task = Mutex::new(tokio::spawn(sending.run(closing.clone())));
        let queue = SpanQueue { spans, waiting: Arc::clone(&waiting) };
        (Self { task, closing, waiting, metrics }, queue)
    }

    /// Takes no more spans, and sends those that wait for at most so long.
    pub(super) async fn end(&self, within: Duration) {
        self.closing.cancel();
        let mut task = self.task.lock().await;
        if !task.is_finished() && timeout(within, &mut *task).await.is_err() {
            task.abort();
            let _ = (&mut *task).await; // from here on no span finds a queue
            let spans = self.waiting.swap(0, Relaxed);
            self.metrics.spans.dropped.add("shutdown", spans);
            tracing::warn!(spans, "the collector did not take the last spans in time");
        }
    }
}

struct Sending {
    exporter: SpanExporter,
    inbox: mpsc::Receiver<SpanData>,
    refused: Arc<AtomicU64>,
    waiting: Arc<AtomicU64>,
    metrics: Arc<Metrics>,
    /// The last batch was lost.
    is_losing: bool,
}

impl Sending {
    async fn run(mut self, closing: CancellationToken) {
        let mut batch = Vec::with_capacity(BATCH);
        while !closing.is_cancelled() {
            tokio::select! {
                spans = self.inbox.recv_many(&mut batch, BATCH) => if spans == 0 {
                    return; // nobody is left who makes any
                },
                () = closing.cancelled() => {}
            }
            tokio::select! {
                () = self.gather(&mut batch) => {}
                () = sleep(GATHERING) => {}
                () = closing.cancelled() => {}
            }
            self.send(&mut batch).await;
        }
        self.inbox.close();
        while self.inbox.recv_many(&mut batch, BATCH).await > 0 {
            self.send(&mut batch).await;
        }
    }

    /// Takes spans until the batch is full.
    async fn gather(&mut self, batch: &mut Vec<SpanData>) {
        while batch.len() < BATCH {
            let room = BATCH - batch.len();
            if self.inbox.recv_many(batch, room).await == 0 {
                return;
            }
        }
    }

    async fn send(&mut self, batch: &mut Vec<SpanData>) {
        let spans = batch.len() as u64;
        if spans == 0 {
            return;
        }
        let sent = self.exporter.export(std::mem::take(batch)).await; // it tries some times
        let counted = &self.metrics.spans;
        self.waiting.fetch_sub(spans, Relaxed);
        match sent {
            Ok(()) => {
                let refused = self.refused.swap(0, Relaxed).min(spans);
                counted.exported.inc_by(spans - refused);
                if refused > 0 {
                    counted.dropped.add("refused", refused);
                }
                if std::mem::take(&mut self.is_losing) {
                    tracing::info!("the collector takes spans again");
                }
            }
            Err(error) => {
                counted.dropped.add("not_taken", spans);
                if !std::mem::replace(&mut self.is_losing, true) {
                    tracing::warn!(
                        %error,
                        "spans are lost: the collector does not take them; requests are served as before"
                    );
                }
            }
        }
        batch.reserve(BATCH);
    }
}
