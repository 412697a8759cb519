//! The requests of a trace as the router gets them, and what has become of each.

use std::sync::Arc;

use headrace_router::core::candidate::WorkerId;

use crate::random::{Random, mix};
use crate::report::sample::{Answer, Failure, Sample};
use crate::trace::{Requests, Row, Scale};

/// A request of the trace, from its arrival to its last token.
#[derive(Debug)]
pub(super) struct Arrival {
    pub(super) due_ms: f64,
    pub(super) prompt_tokens: u32,
    /// Tokens of its answer.
    pub(super) answer_tokens: u32,
    /// Those that it asks for at most.
    max_tokens: u32,
    /// Keys of its full blocks.
    pub(super) keys: Arc<[u64]>,
    pub(super) session: String,
    pub(super) state: State,
    /// Times that it was tried again.
    pub(super) retries: u32,
    pub(super) excluded: Vec<WorkerId>,
    /// It got tokens since it was tried last.
    pub(super) got_on: bool,
    answer: Answer,
    last_ms: f64,
}

/// Where a request is.
#[derive(Debug)]
pub(super) enum State {
    /// Not there yet, or on its way to another worker.
    Nowhere,
    /// In the router's queue, under this number.
    Waits(u64),
    /// On its workers.
    Placed,
    Done,
    Failed(Failure),
}

/// All requests of a trace that runs so many times as fast as it was recorded. `spread`: those of one moment come evenly until
/// the next one. They ask for `max_tokens`, or for exactly their answer.
pub(super) fn arrivals(
    requests: &Requests,
    scale: Scale,
    speed: f64,
    spread: bool,
    max_tokens: Option<u32>,
) -> Vec<Arrival> {
    let mut arrivals: Vec<Arrival> =
        requests.rows.iter().map(|row| Arrival::new(row, scale, speed)).collect();
    for arrival in &mut arrivals {
        arrival.max_tokens = arrival.answer_tokens.max(max_tokens.unwrap_or(0));
    }
    if spread {
        let mut rest = &mut arrivals[..];
        while let Some(first_ms) = rest.first().map(|arrival| arrival.due_ms) {
            let n = rest.partition_point(|arrival| arrival.due_ms <= first_ms);
            let (moment, later) = rest.split_at_mut(n);
            let gap_ms = later.first().map_or(0.0, |next| next.due_ms - first_ms);
            for (place, arrival) in moment.iter_mut().enumerate() {
                arrival.due_ms += gap_ms * place as f64 / n as f64;
            }
            rest = later;
        }
    }
    arrivals
}

impl Arrival {
    fn new(row: &Row, scale: Scale, speed: f64) -> Self {
        let prompt_tokens = scale.input_tokens(row);
        let full = (prompt_tokens / scale.block_tokens) as usize;
        let answer_tokens = scale.output_tokens(row).max(1);
        let key = |id: &u64| Random::new(*id).next();
        Self {
            due_ms: row.at_ms / speed,
            prompt_tokens,
            answer_tokens,
            max_tokens: answer_tokens,
            keys: row.blocks.iter().take(full).map(key).collect(),
            session: row.session_key(),
            state: State::Nowhere,
            retries: 0,
            excluded: Vec::new(),
            got_on: false,
            answer: Answer { prompt_tokens, ..Answer::default() },
            last_ms: 0.0,
        }
    }

    /// It got tokens, the first time with how much of its prompt was cached.
    pub(super) fn tokens(
        &mut self,
        count: u32,
        cached: Option<u32>,
        worker: &Arc<str>,
        now_ms: f64,
    ) {
        let since_ms = now_ms - self.due_ms;
        self.got_on = true;
        if !self.begun() {
            let cached = cached.unwrap_or(0);
            self.answer.ttft_ms = since_ms;
            self.answer.cached_tokens = Some(cached);
            self.answer.worker = Some(Arc::clone(worker));
        } else {
            self.answer.gaps_ms.push((now_ms - self.last_ms) as f32);
        }
        self.answer.completion_tokens += count;
        (self.answer.last_ms, self.answer.e2e_ms) = (since_ms, since_ms);
        self.last_ms = now_ms;
    }

    /// Keys of the full blocks of prompt and answer so far; those of the answer are made up.
    pub(super) fn keys_now(&self, block_tokens: u32) -> Arc<[u64]> {
        let full = ((self.prompt_tokens + self.answer.completion_tokens) / block_tokens) as usize;
        if full == self.keys.len() {
            return Arc::clone(&self.keys);
        }
        let mut keys = self.keys.to_vec();
        for place in self.keys.len()..full {
            let last = keys.last().copied().unwrap_or_default();
            keys.push(mix(last ^ mix(self.due_ms.to_bits() ^ place as u64)));
        }
        keys.into()
    }

    /// Tokens of the longest answer that it may get, from any number of workers.
    pub(super) fn limit(&self) -> u32 {
        self.max_tokens
    }

    /// A client has seen part of the answer.
    pub(super) fn begun(&self) -> bool {
        self.answer.completion_tokens > 0
    }

    pub(super) fn completion_tokens(&self) -> u32 {
        self.answer.completion_tokens
    }

    pub(super) fn fail(&mut self, kind: &str, text: impl Into<String>) {
        self.state = State::Failed(Failure { kind: kind.into(), text: text.into() });
    }

    pub(super) fn sample(&self) -> Sample {
        let result = match &self.state {
            State::Done => Ok(self.answer.clone()),
            State::Failed(failure) => Err(failure.clone()),
            State::Nowhere | State::Waits(_) | State::Placed => {
                Err(Failure { kind: "cut".into(), text: "the simulation ended first".into() })
            }
        };
        Sample { due_ms: self.due_ms, lag_ms: 0.0, result }
    }
}
