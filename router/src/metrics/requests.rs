//! Requests from their arrival to the end of their answers, and their tokens.

use super::kinds::{Counter, Gauge, Histogram, Labelled, group};
use super::labels::{ByReason, ByResult};

group! {
    /// Requests from their arrival to the end of their answers, and their tokens.
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
        prompt_tokens: Counter = "headrace_prompt_tokens_total",
            "Tokens of prompts.";
        completion_tokens: Counter = "headrace_completion_tokens_total",
            "Tokens generated.";
        cached_tokens: Counter = "headrace_cached_tokens_total",
            "Tokens of prompts that workers took from their prefix caches.";
        direct_reads: Counter = "headrace_direct_reads_total",
            "Times that a worker's link gave a stream its tokens itself, without waking the task of its connection.";
        drafted_tokens: Counter = "headrace_drafted_tokens_total",
            "Tokens that workers drafted (--mtp) and checked.";
        accepted_tokens: Counter = "headrace_accepted_tokens_total",
            "Drafted tokens that became part of an answer.";
        encode_seconds: Histogram = "headrace_encode_seconds",
            "Chat template and tokenisation, waiting for a thread included.";
        ttft_seconds: Histogram = "headrace_ttft_seconds",
            "Arrival of a request to its first token.";
        itl_seconds: Histogram = "headrace_itl_seconds",
            "From step to step of one leg.";
        tpot_seconds: Histogram = "headrace_tpot_seconds",
            "Mean time for each token of a whole answer after its first.";
        resume_seconds: Histogram = "headrace_resume_seconds",
            "From the loss of a worker to the next token of an answer that went on with another one.";
        request_seconds: Histogram = "headrace_request_seconds",
            "Arrival of a request to the end of its last choice.";
    }
}
