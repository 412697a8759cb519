//! What clients and their connections do.

use super::kinds::labels::ByAnswer;
use super::kinds::{Counter, Gauge, Labelled, group};

group! {
    /// What clients and their connections do.
    Http {
        answered: Labelled<ByAnswer> = "headrace_http_requests_total",
            "HTTP requests answered.";
        connections: Gauge = "headrace_http_connections",
            "Open connections of clients.";
        connections_refused: Counter = "headrace_http_connections_refused_total",
            "Connections turned away because --max-connections were open.";
        connections_stalled: Counter = "headrace_http_connections_stalled_total",
            "Connections cut because the client read nothing for --stall-timeout-ms.";
        stream_waits: Counter = "headrace_http_stream_waits_total",
            "Events of HTTP/1.1 streams that had to wait because their client's socket was full.";
        connections_evicted: Counter = "headrace_http_connections_evicted_total",
            "Connections closed while they rested, or while a body came slowly, to make room for new ones.";
        connections_flooding: Counter = "headrace_http_connections_flooding_total",
            "HTTP/2 connections ended because their clients sent pings, settings, windows or resets without end.";
        answers_stalled: Counter = "headrace_http_answers_stalled_total",
            "HTTP/2 answers cut because the client took nothing of them for --stall-timeout-ms.";
        answers_refused: Counter = "headrace_http_answers_refused_total",
            "Answers not given because too much waits already for the client to be read.";
        ignored_parameters: Counter = "headrace_http_ignored_parameters_total",
            "Fields of requests that changed nothing, as X-Headrace-Ignored said.";
        unread_bytes: Gauge = "headrace_http_unread_bytes",
            "Whole answers that wait for their clients.";
        body_bytes: Gauge = "headrace_http_body_bytes",
            "Memory charged to bodies of requests, and to what is made of them until they are tokenised.";
        answer_bytes: Gauge = "headrace_http_answer_bytes",
            "Memory charged to what is kept of answers: text and log-probabilities not sent yet, and stop strings.";
    }
}

impl Http {
    /// A request was answered; `error` is the error's kind, empty without one.
    pub fn request(&self, route: &str, status: u16, error: &'static str) {
        self.answered.inc(ByAnswer { route: route.to_owned(), status, error });
    }
}
