//! What is counted for requests with a slo, and what is said of the stages.

use tokio::time::advance;

use super::*;
use crate::config::LogConfig;

const MS: Duration = Duration::from_millis(1);

fn request_trace(tpot_ms: Option<f64>) -> (Arc<RequestTrace>, Arc<Metrics>) {
    let metrics = Arc::new(Metrics::default());
    let slo = Slo { first_token: 100 * MS, tpot_ms, metrics: Arc::clone(&metrics) };
    (RequestTrace::new("r", Some(slo)), metrics)
}

fn counted(metrics: &Metrics) -> String {
    let text = metrics.text();
    let lines = text.lines().filter(|line| line.starts_with("headrace_slo_requests_total{"));
    lines.map(|line| line.split('"').nth(1).unwrap()).collect::<Vec<_>>().join(",")
}

fn usage(completion_tokens: u32) -> Usage {
    Usage { completion_tokens, ..Usage::default() }
}

/// A request whose first token comes after `first` and whose 11th and last one `rest` later.
async fn after(first: Duration, rest: Duration) -> String {
    let (request_trace, metrics) = request_trace(Some(5.0));
    advance(first).await;
    request_trace.first_token(0, Instant::now(), first);
    advance(rest).await;
    request_trace.last_token(Instant::now());
    request_trace.answered(usage(11), 1);
    request_trace.answered(usage(11), 1); // once is all that counts
    counted(&metrics)
}

#[tokio::test(start_paused = true)]
async fn a_goal_is_met_or_missed_by_its_first_or_by_the_further_tokens() {
    assert_eq!(after(100 * MS, 50 * MS).await, "met");
    assert_eq!(after(101 * MS, 50 * MS).await, "late_first_token");
    assert_eq!(after(100 * MS, 51 * MS).await, "slow_tokens");
    let (request_trace, metrics) = request_trace(Some(1e-9));
    request_trace.first_token(0, Instant::now(), MS);
    request_trace.answered(usage(2), 2); // one token a choice: none further
    assert_eq!(counted(&metrics), "met");
}

#[tokio::test(start_paused = true)]
async fn the_time_per_token_is_that_of_the_tokens_after_the_first_of_each_choice() {
    let request_trace = RequestTrace::default();
    assert_eq!(request_trace.answered(usage(11), 1), None, "it has no token");
    advance(30 * MS).await;
    request_trace.first_token(0, Instant::now(), MS);
    assert_eq!(request_trace.answered(usage(11), 1), None, "the last one is not known");
    advance(50 * MS).await;
    request_trace.last_token(Instant::now());
    assert_eq!(request_trace.answered(usage(11), 1), Some(5 * MS));
    assert_eq!(request_trace.answered(usage(22), 2), Some(5 * MS), "two choices side by side");
    assert_eq!(request_trace.answered(usage(1), 1), None, "there is none after the first");
    assert_eq!(request_trace.answered(usage(2), 2), None);
    assert_eq!(request_trace.answered(usage(0), 0), None);
}

#[tokio::test(start_paused = true)]
async fn errors_count_as_rejected_or_failed_and_the_clients_own_do_not_count() {
    let failed = |error: RouteError| {
        let (request_trace, metrics) = request_trace(None);
        request_trace.failed(&error);
        counted(&metrics)
    };
    assert_eq!(failed(RouteError::NoWorker { retry_after: MS }), "rejected");
    assert_eq!(failed(RouteError::ShuttingDown), "rejected");
    let (cut, metrics) = request_trace(None);
    cut.first_token(0, Instant::now(), MS);
    cut.failed(&RouteError::ShuttingDown);
    assert_eq!(counted(&metrics), "failed", "at the end of a drain, say");
    assert_eq!(failed(RouteError::mistake("")), "failed");
    assert_eq!(failed(RouteError::BadRequest { param: None, message: String::new() }), "");
    let (request_trace, metrics) = request_trace(None);
    request_trace.refused("bad_request", "no".into());
    advance(200 * MS).await;
    drop(request_trace);
    assert_eq!(counted(&metrics), "");
}

#[tokio::test(start_paused = true)]
async fn a_client_that_hangs_up_counts_only_if_its_first_token_was_late() {
    for (first, want) in [(99, ""), (101, "late_first_token")] {
        let (waiting, metrics) = request_trace(None);
        advance(first * MS).await;
        drop(waiting);
        assert_eq!(counted(&metrics), want);
        let (begun, metrics) = request_trace(None);
        advance(first * MS).await;
        begun.first_token(0, Instant::now(), MS);
        advance(500 * MS).await;
        drop(begun);
        assert_eq!(counted(&metrics), want);
    }
}

#[tokio::test(start_paused = true)]
async fn stages_are_those_of_choice_0_and_add_up_over_its_tries() {
    let request_trace = RequestTrace::new("r", None);
    for choice in [0, 1] {
        request_trace.tokenised(choice, (choice + 1) * MS);
        request_trace.waited(choice, 3 * MS);
        request_trace.waited(choice, 4 * MS);
    }
    advance(9 * MS).await;
    request_trace.first_token(1, Instant::now(), 5 * MS);
    let stages = request_trace.stages();
    assert_eq!((stages.tokenise, stages.queue), (Some(MS), Some(7 * MS)));
    assert_eq!((stages.prefill, stages.first_token), (None, Some(9 * MS)));
    advance(MS).await;
    request_trace.first_token(0, Instant::now(), 6 * MS);
    let stages = request_trace.stages();
    assert_eq!((stages.prefill, stages.first_token), (Some(6 * MS), Some(9 * MS)));
}

#[tokio::test(start_paused = true)]
async fn a_request_counts_for_its_model_and_its_lengths_once_it_has_finished() {
    let config =
        LogConfig { filter: "info".into(), json: false, requests_per_s: 0, prompts: false };
    let (log, metrics) = (Arc::new(RequestLog::new(&config)), Arc::new(Metrics::default()));
    let begin = || {
        let ends = Ends { log: Arc::clone(&log), metrics: Arc::clone(&metrics), span: None };
        RequestTrace::logged("r".into(), None, false, ends)
    };
    let counted = metrics.models.of("m");
    for finished in [true, false] {
        let request = begin();
        request.asks("m", &counted);
        request.asks("another", &metrics.models.of("another")); // it is the first that counts
        request.first_token(0, Instant::now(), MS);
        request.used(Usage { prompt_tokens: 5, ..usage(3) });
        advance(4 * MS).await;
        request.last_token(Instant::now());
        if finished {
            request.answered(usage(3), 1);
        } else {
            request.failed(&RouteError::ClientGone);
        }
    }
    assert_eq!(counted.requests.so_far(), [("client_gone", 1), ("finished", 1)].into());
    assert_eq!(
        (counted.prompt_sizes.so_far().count(), counted.output_sizes.so_far().count()),
        (1, 1)
    );
    assert_eq!(counted.tpot_seconds.so_far().count(), 1);
    assert!(metrics.models.of("another").requests.so_far().is_empty());
}

#[tokio::test(start_paused = true)]
async fn a_request_is_told_to_the_log_once_when_the_last_of_it_is_gone() {
    let config =
        LogConfig { filter: "info".into(), json: false, requests_per_s: 0, prompts: false };
    let log = Arc::new(RequestLog::new(&config));
    let metrics = Arc::new(Metrics::default());
    let ends = Ends { log: Arc::clone(&log), metrics: Arc::clone(&metrics), span: None };
    let begin = || RequestTrace::logged("r".into(), None, false, ends.clone());
    let counts = || (log.counts().finished, log.counts().failed);
    let answered = begin();
    let held = Arc::clone(&answered);
    answered.answered(usage(2), 1);
    answered.replied(200);
    drop(answered);
    assert_eq!(counts(), (0, 0), "a part of it is still at work");
    drop(held);
    assert_eq!(counts(), (1, 0));
    let failed = begin();
    failed.failed(&RouteError::ShuttingDown);
    failed.failed(&RouteError::ClientGone); // the first error is the one that counts
    drop(failed);
    let refused = begin();
    refused.refused("bad_request", "no".into());
    refused.replied(400);
    drop(refused);
    drop(begin()); // its client left
    assert_eq!(counts(), (1, 3));
    drop(RequestTrace::new("r", None)); // nobody told it of a log
    assert_eq!(counts(), (1, 3));
    let ends = metrics.models.of(UNKNOWN).requests.so_far(); // none of them had found its model
    let once = ["bad_request", "client_gone", "finished", "shutting_down"].map(|word| (word, 1));
    assert_eq!(ends, once.into());
}
