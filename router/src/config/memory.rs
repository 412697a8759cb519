//! How much memory requests and answers may take, checked.

use super::{ConfigError, RouterArgs, flag};

/// How much memory requests and answers may take, in bytes.
#[derive(Debug, Clone, Copy)]
pub struct MemoryConfig {
    /// All request bodies, with what is made of them until they are tokenised.
    pub bodies: usize,
    /// One of them.
    pub body: usize,
    /// What is kept of all answers until their clients take it.
    pub answers: usize,
    /// What is kept of one of them.
    pub answer: usize,
}

/// What one body may take: this many times the longest body. Text takes three times its bytes (see `http::chat`), the
/// messages of real agents up to six; arrays in arrays a hundred times.
const BODY_FACTOR: usize = 8;
/// And this, so that a short `--max-body-bytes` does not refuse small messages for their structure.
const BODY_FLOOR: usize = 4 << 20;
/// What the longest body is charged at its peak if it is one text: its bytes, twice where the client does not say how long
/// it is; the text; and the buffer in which its escapes are put together, which doubles.
const LEAST_FACTOR: usize = 6;
/// Below this an ordinary answer with log-probabilities would fail.
const LEAST_ANSWERS: usize = 1 << 20;

impl MemoryConfig {
    pub(super) fn check(args: &RouterArgs) -> Result<Self, ConfigError> {
        let bodies = args.max_body_memory_bytes;
        let least = args.max_body_bytes.saturating_mul(LEAST_FACTOR);
        if bodies < least {
            return Err(flag(
                "max-body-memory-bytes",
                format!("is {bodies}, too little for one body of --max-body-bytes"),
                &format!("it must be at least {least}, {LEAST_FACTOR} times --max-body-bytes"),
            ));
        }
        let body = args.max_body_bytes.saturating_mul(BODY_FACTOR).saturating_add(BODY_FLOOR);
        let answers = args.max_answer_memory_bytes;
        if answers < LEAST_ANSWERS {
            return Err(flag(
                "max-answer-memory-bytes",
                format!("is {answers}"),
                &format!("it must be at least {LEAST_ANSWERS}"),
            ));
        }
        Ok(Self { bodies, body: body.min(bodies), answers, answer: answers / 2 })
    }
}
