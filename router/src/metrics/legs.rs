//! How the parts of requests that ran on one worker each ended.

use super::kinds::labels::{ByOutcome, ByStage};
use super::kinds::{Counter, Histogram, Labelled, group};

group! {
    /// How the parts of requests that ran on one worker each ended.
    Legs {
        ended: Labelled<ByOutcome> = "headrace_legs_total",
            "Legs of requests that ended, by outcome.";
        cancelled: Labelled<ByStage> = "headrace_cancels_total",
            "Legs cancelled before their end (hang-up, stop string, deadline), by stage.";
        stalled: Counter = "headrace_stalls_total",
            "Legs cancelled because their client took nothing.";
        prefills_lost: Counter = "headrace_prefills_lost_total",
            "Prefill legs that gave no token: the decode worker computed the prompt.";
        cancel_to_freed_seconds: Histogram = "headrace_cancel_to_freed_seconds",
            "From the cancel of a leg to its worker's word that the blocks are free.";
        hangup_to_freed_seconds: Histogram = "headrace_hangup_to_freed_seconds",
            "From the first cancel of a request to the last of its blocks free, on all workers.";
    }
}
