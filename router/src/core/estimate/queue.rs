//! The prompts that a worker has, replayed by the worker's own rule: when each of them gives its first token, without one
//! more prompt and with it.

use serde::{Deserialize, Serialize};

use super::lockstep::GroupSteps;
use super::{Demand, WorkerLoad};
use crate::core::frame::QueueRule;

/// Prompts of a queue that are replayed one by one. Those behind count as one long prompt, together with the last of them:
/// where each prompt takes half of what is left, they get nothing of the next steps anyway.
pub(in crate::core) const MOST_QUEUED: usize = 10;
/// Of a worker that is not behind with its work.
const FEW: usize = 4;

/// A prompt that a worker has, as of the end of the step that runs.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct QueuedPrompt {
    /// Tokens that the step that runs computes.
    #[serde(default, skip_serializing_if = "is_none")]
    pub running: u32,
    /// Those that are left after it.
    pub left: u32,
    /// Position of the first of these.
    pub from: u32,
    /// Prompts that stand here.
    #[serde(default = "one", skip_serializing_if = "is_one")]
    pub prompts: u32,
    /// It begins when another one is so far.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub awaits: Option<Awaited>,
}

/// A prompt whose blocks another one is going to share: it waits for them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Awaited {
    /// Its place in the queue.
    pub place: u32,
    /// Tokens that it may still have left then.
    pub left: u32,
}

/// The prompts of a worker, in its order.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct PromptQueue {
    /// How it shares its steps among them.
    pub rule: QueueRule,
    /// The prompts; at most [`MOST_QUEUED`].
    pub prompts: Vec<QueuedPrompt>,
    /// The one that the request which is to be placed would wait for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub awaits: Option<Awaited>,
    /// Ms until answers that run have probably given back the blocks that the request lacks, where that is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub room_ms: Option<f64>,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde asks for it")]
fn is_none(tokens: &u32) -> bool {
    *tokens == 0
}

fn one() -> u32 {
    1
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde asks for it")]
fn is_one(prompts: &u32) -> bool {
    *prompts == 1
}

impl PromptQueue {
    /// Nothing is known of it.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.prompts.is_empty() && self.room_ms.is_none()
    }

    /// One more, behind all others.
    pub(in crate::core) fn push(&mut self, prompt: QueuedPrompt) {
        let len = self.prompts.len();
        if len < MOST_QUEUED {
            if len == self.prompts.capacity() {
                // a decision keeps it as long as its request lasts: no room for more than there can be
                self.prompts.reserve_exact(if len < FEW { FEW - len } else { MOST_QUEUED - len });
            }
            self.prompts.push(prompt);
        } else if let Some(last) = self.prompts.last_mut() {
            last.running = last.running.saturating_add(prompt.running);
            last.left = last.left.saturating_add(prompt.left);
            last.prompts = last.prompts.saturating_add(prompt.prompts);
        }
    }

    /// Those that wait for a first token.
    pub(super) fn waiting(&self) -> f64 {
        self.prompts.iter().map(|prompt| f64::from(prompt.prompts)).sum()
    }
}

/// Tokens that each of some prompts gets of a step's `budget`, in their order; `left[i]` is what the prompt lacks, 0 where it
/// cannot begin. `contested(i)`: others behind it want some, too. The engine's rule: see `engine/admission.py`, `chunk_of`.
pub(in crate::core) fn share_out(
    rule: QueueRule,
    budget: f64,
    left: &[f64],
    chunks: &mut [f64],
    contested: impl Fn(usize) -> bool,
) {
    let mut rest = budget;
    for (i, (left, chunk)) in left.iter().zip(chunks.iter_mut()).enumerate() {
        *chunk = match rule {
            QueueRule::Halves if *left > rest && contested(i) => (rest / 2.0).ceil(),
            QueueRule::Halves | QueueRule::Fifo => left.min(rest),
        };
        rest -= *chunk;
    }
    for (left, chunk) in left.iter().zip(chunks) {
        let more = (left - *chunk).min(rest); // what nobody else wanted
        *chunk += more;
        rest -= more;
    }
}

/// What a prompt costs behind others.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(super) struct Behind {
    /// Until it begins.
    pub(super) wait_ms: f64,
    /// From then to its first token.
    pub(super) ms: f64,
    /// By how much the first token of each of those before it comes later.
    later_ms: [f64; MOST_QUEUED],
    /// The same, summed up.
    pub(super) delay_ms: f64,
    /// What it makes the steps of all who step with it longer by.
    pub(super) raise_ms: f64,
}

const LINE: usize = MOST_QUEUED + 1;

/// A queue while it is worked off. Places from `prompts` on are not taken.
struct Line<'a> {
    load: &'a WorkerLoad,
    rule: QueueRule,
    group: GroupSteps,
    prompts: usize,
    left: [f64; LINE],
    from: [f64; LINE],
    count: [f64; LINE],
    awaits: [Option<Awaited>; LINE],
    /// When its first token comes.
    ends_ms: [f64; LINE],
    now_ms: f64,
    steps: f64,
    rows: f64,
    kv_tokens: f64,
}

impl<'a> Line<'a> {
    fn new(load: &'a WorkerLoad, queue: &PromptQueue) -> Self {
        let mut line = Self {
            load,
            rule: queue.rule,
            group: GroupSteps::of(load),
            prompts: queue.prompts.len().min(MOST_QUEUED),
            left: [0.0; LINE],
            from: [0.0; LINE],
            count: [1.0; LINE],
            awaits: [None; LINE],
            ends_ms: [0.0; LINE],
            now_ms: 0.0,
            steps: 1.0,
            rows: load.rows,
            kv_tokens: load.kv_tokens,
        };
        let mut running_ms = line.around_ms();
        for (i, prompt) in queue.prompts.iter().take(MOST_QUEUED).enumerate() {
            line.left[i] = prompt.left.into();
            line.from[i] = prompt.from.into();
            line.count[i] = prompt.prompts.into();
            line.awaits[i] = prompt.awaits;
            let (from, running) = (prompt.from.saturating_sub(prompt.running), prompt.running);
            running_ms += load.cost.prompt_ms(from.into(), running.into());
        }
        running_ms = running_ms.max(line.group.step_ms());
        line.now_ms = (running_ms - load.elapsed_ms).max(0.0);
        for i in 0..line.prompts {
            if line.left[i] == 0.0 {
                line.done(i);
            }
        }
        line
    }

    /// A step without prompts.
    fn around_ms(&self) -> f64 {
        let cost = &self.load.cost;
        cost.fixed_ms + cost.row_ms * self.rows + cost.kv_ms * self.kv_tokens
    }

    fn done(&mut self, i: usize) {
        self.ends_ms[i] = self.now_ms;
        self.rows += self.count[i];
        self.kv_tokens += self.from[i];
    }

    /// What prompt `i` waits for is still to come.
    fn is_held(&self, i: usize) -> bool {
        self.awaits[i].is_some_and(|awaited| {
            let place = awaited.place as usize;
            place < i && self.left[place] > f64::from(awaited.left)
        })
    }

    /// Works off all of it; what came of the last prompt: when it began, and what its own tokens made the steps longer by.
    fn run(&mut self) -> (f64, f64) {
        let n = self.prompts;
        let own = n - 1;
        let (mut began_ms, mut raise_ms) = (None, 0.0);
        // each pass ends one prompt, lets one begin that waited, or brings one to its last step
        for _ in 0..4 * LINE {
            let (mut ready, mut chunks) = ([0.0; LINE], [0.0; LINE]);
            let mut last = None;
            for (i, ready) in ready.iter_mut().enumerate().take(n) {
                if self.left[i] > 0.0 {
                    last = Some(i);
                    *ready = if self.is_held(i) { 0.0 } else { self.left[i] };
                }
            }
            let Some(last) = last else { break };
            let budget = (self.load.step_tokens - self.rows).max(1.0);
            share_out(self.rule, budget, &ready[..n], &mut chunks[..n], |i| i < last);
            let steps = self.alike(budget, &chunks[..n]);
            let around_ms = self.around_ms();
            let (mut prompts_ms, mut own_ms) = (0.0, 0.0);
            for (i, chunk) in chunks.iter().enumerate().take(n) {
                let tokens = chunk * steps;
                if tokens > 0.0 {
                    own_ms = self.load.cost.prompt_ms(self.from[i], tokens);
                    prompts_ms += own_ms;
                }
            }
            if chunks[own] > 0.0 {
                began_ms.get_or_insert(self.now_ms);
                raise_ms += self.raise_ms(steps, around_ms + (prompts_ms - own_ms) / steps, own_ms);
            }
            self.now_ms += self.group.lockstep_ms(self.steps, steps, around_ms, prompts_ms);
            self.steps += steps;
            for (i, chunk) in chunks.iter().enumerate().take(n) {
                let tokens = chunk * steps;
                if tokens > 0.0 {
                    self.left[i] = (self.left[i] - tokens).max(0.0);
                    self.from[i] += tokens;
                    if self.left[i] == 0.0 {
                        self.done(i);
                    }
                }
            }
        }
        (began_ms.unwrap_or(self.now_ms), raise_ms)
    }

    fn raise_ms(&self, steps: f64, around_ms: f64, own_ms: f64) -> f64 {
        self.group.raise_ms(self.steps, steps, around_ms, own_ms)
    }

    /// Steps from now on that are shared out in the same way.
    fn alike(&self, budget: f64, chunks: &[f64]) -> f64 {
        let (mut steps, mut rest) = (f64::INFINITY, budget);
        for (i, chunk) in chunks.iter().enumerate() {
            if *chunk > 0.0 {
                steps = steps.min(((self.left[i] - rest.max(*chunk)) / chunk).ceil());
                rest -= chunk;
            }
            if self.is_held(i)
                && let Some(awaited) = self.awaits[i]
            {
                let (place, left) = (awaited.place as usize, f64::from(awaited.left));
                if chunks[place] > 0.0 {
                    steps = steps.min(((self.left[place] - left) / chunks[place]).ceil());
                }
            }
        }
        steps.clamp(1.0, 1e6)
    }
}

/// What the prompt of `demand` costs behind those of `queue`.
pub(super) fn behind(load: &WorkerLoad, queue: &PromptQueue, demand: &Demand) -> Behind {
    let mut with = Line::new(load, queue);
    let n = with.prompts;
    let mut without = Line { ..Line::new(load, queue) };
    without.run();
    with.prompts = n + 1;
    with.left[n] = (demand.prompt_tokens - demand.cached_tokens).max(1.0);
    with.from[n] = demand.cached_tokens;
    with.awaits[n] = queue.awaits;
    let (began_ms, raise_ms) = with.run();
    let mut later_ms = [0.0; MOST_QUEUED];
    for (later_ms, (then, before)) in
        later_ms.iter_mut().zip(with.ends_ms.iter().zip(&without.ends_ms)).take(n)
    {
        *later_ms = (then - before).max(0.0);
    }
    let delays = later_ms.iter().zip(&with.count).map(|(ms, count)| ms * count);
    let delay_ms = delays.sum();
    Behind { wait_ms: began_ms, ms: with.ends_ms[n] - began_ms, later_ms, delay_ms, raise_ms }
}

/// By how much the first token of each of the prompts of `queue` comes later with that of `demand` behind them.
pub(in crate::core) fn delays_ms(
    load: &WorkerLoad,
    queue: &PromptQueue,
    demand: &Demand,
) -> [f64; MOST_QUEUED] {
    if queue.prompts.is_empty() { [0.0; MOST_QUEUED] } else { behind(load, queue, demand).later_ms }
}

#[cfg(test)]
mod tests;
