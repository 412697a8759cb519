//! Responses that are kept for clients.

use super::kinds::{Counter, Gauge, group};

group! {
    /// Responses that are kept for clients.
    Responses {
        stored: Gauge = "headrace_responses_stored",
            "Responses that clients can ask for again.";
        stored_bytes: Gauge = "headrace_responses_stored_bytes",
            "Bytes of stored responses and what keeping them takes, in memory or in --response-store.";
        evicted: Counter = "headrace_responses_evicted_total",
            "Stored responses that made room for newer ones before their time.";
        not_stored: Counter = "headrace_responses_not_stored_total",
            "Responses that were to be stored and were not: too large, no room on the disk, or a disk that is too slow.";
        store_errors: Counter = "headrace_response_store_errors_total",
            "Reads and writes of --response-store that failed.";
    }
}
