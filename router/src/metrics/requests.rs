//! Requests from their arrival to the end of their answers, of all models. What is known by model is in `models`.

use super::kinds::labels::{ByReason, ByResult};
use super::kinds::{Counter, Gauge, Histogram, Labelled, group};

group! {
    /// Requests of all models from their arrival to the end of their answers.
    Requests {
        streams: Gauge = "headrace_streams",
            "Answers in flight, each choice counted.";
        retries: Counter = "headrace_retries_total",
            "Legs placed again after their worker was lost or failed before their first token.";
        resumes: Counter = "headrace_resumes_total",
            "Answers in flight that went on with another worker.";
        slo: Labelled<ByResult> = "headrace_slo_requests_total",
            "Requests with a deadline for their first token: those that met it and --slo-tpot-ms, and those that did not.";
        streams_broken: Labelled<ByReason> = "headrace_streams_broken_total",
            "Streams that had begun and ended with an error event, by the error's kind.";
        direct_reads: Counter = "headrace_direct_reads_total",
            "Times that a worker's link gave a stream its tokens itself, without waking the task of its connection.";
        drafted_tokens: Counter = "headrace_drafted_tokens_total",
            "Tokens that workers drafted (--mtp) and checked.";
        accepted_tokens: Counter = "headrace_accepted_tokens_total",
            "Drafted tokens that became part of an answer.";
        encode_seconds: Histogram = "headrace_encode_seconds",
            "Chat template and tokenisation, waiting for a thread included.";
        resume_seconds: Histogram = "headrace_resume_seconds",
            "From the loss of a worker to the next token of an answer that went on with another one.";
    }
}
