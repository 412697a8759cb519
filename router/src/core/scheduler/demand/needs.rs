//! How many workers it takes to serve what is asked within limits, by what their steps cost.
//!
//! A step costs `fixed + prompts + rows` ms ([`StepCost`]). Let requests share among them, in each ms, `u` ms of prompts and
//! rows on each worker. Steps then follow one another without a gap, each as long as its share of that work: `T = fixed + u T`,
//! so `T = fixed / (1 - u)`. That is the time of a token, and bounds `u`. A prompt is computed in `own / (1 - rows)` ms, as the
//! rows of running answers go on in its steps, and waits for those before it as in a queue with `n` servers: with
//! probability C (Erlang), and then for `S spread / 2 / (n (1 - rho))` ms in the mean (Allen and Cunneen's
//! approximation of M/G/n, of which the tail is taken for exponential). What is in flight (Little) has to fit the
//! places and the KV blocks.
//!
//! It leaves out what prefixes share in the KV pool, transfers between workers, and that prompts are computed several at once.

use crate::core::frame::StepCost;

/// No fleet is made so busy, whatever the limits: predictions are worth nothing near 1. A guess.
const MOST_BUSY: f64 = 0.85;
/// Share of the KV blocks that is to be in use at most. A guess: fleets are not loaded evenly.
const MOST_KV: f64 = 0.9;
/// Without a limit for the first token, nine in ten wait so long for their turn at most, or as long as a prompt takes.
const USUAL_WAIT_MS: f64 = 1_000.0;
/// Share of requests that may wait longer than is said.
const LATE: f64 = 0.1;
/// No fleet is larger.
const MOST_WORKERS: usize = 4_096;

/// What is asked of a model.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ModelDemand {
    /// Requests a second, with those that wait.
    pub per_s: f64,
    /// Tokens of a prompt.
    pub prompt_tokens: f64,
    /// Of these, what no cache has.
    pub computed_tokens: f64,
    /// Mean square of the prompts' lengths by the square of their mean.
    pub spread: f64,
    /// Tokens of an answer.
    pub output_tokens: f64,
}

/// A worker, as far as it matters how much of the work it does.
#[derive(Debug, Clone, Copy)]
pub(super) struct MeanWorker {
    pub(super) cost: StepCost,
    /// Tokens that a row gets from a step.
    pub(super) accepted: f64,
    pub(super) sequences: f64,
    pub(super) batched_tokens: f64,
    pub(super) kv_tokens: f64,
    /// Share of the prompts that are computed by workers like this.
    pub(super) prompt_share: f64,
    /// They generate.
    pub(super) answers: bool,
}

/// Limits that nine in ten requests are to keep.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Targets {
    /// From the arrival to the first token.
    pub ttft_ms: Option<f64>,
    /// Of each further token.
    pub tpot_ms: Option<f64>,
}

/// What one worker less would break.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Binding {
    /// Nothing: one is enough.
    One,
    /// They would be busy for too much of their time.
    Busy,
    /// Prompts would wait too long.
    FirstToken,
    /// Steps would take too long.
    TokenTime,
    /// There would be too few places for sequences.
    Sequences,
    /// There would be too few KV blocks.
    KvRoom,
}

impl Binding {
    /// As metrics and answers have it.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::One => "one_is_enough",
            Self::Busy => "busy",
            Self::FirstToken => "first_token",
            Self::TokenTime => "token_time",
            Self::Sequences => "sequences",
            Self::KvRoom => "kv_room",
        }
    }
}

/// What a fleet of some size would do.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Forecast {
    /// Share of their time that workers would spend on prompts and rows.
    pub utilisation: f64,
    /// Nine in ten would wait so long for their turn at most.
    pub queue_ms: f64,
    /// The same to the first token.
    pub ttft_ms: f64,
    /// Of each further token; 0 where none is generated.
    pub tpot_ms: f64,
    /// Sequences on each worker.
    sequences: f64,
}

impl Forecast {
    const NEVER: Self = Self {
        utilisation: 1.0,
        queue_ms: f64::INFINITY,
        ttft_ms: f64::INFINITY,
        tpot_ms: f64::INFINITY,
        sequences: f64::INFINITY,
    };
}

/// How many workers are needed, and why.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Needs {
    /// As few as keep all limits that can be kept.
    pub workers: u32,
    /// What speaks against one less.
    pub because: Binding,
    /// With those that there are; `None` without any.
    pub now: Option<Forecast>,
    /// No number of workers keeps the limit of the first token: an idle one takes longer.
    pub ttft_out_of_reach: bool,
    /// The same of the limit of tokens.
    pub tpot_out_of_reach: bool,
}

impl Needs {
    pub(super) fn of(
        asked: &ModelDemand,
        machine: &MeanWorker,
        targets: Targets,
        workers: u32,
    ) -> Self {
        let idle = machine.forecast(&ModelDemand { per_s: 0.0, ..*asked }, 1);
        let out_of_reach =
            |target: Option<f64>, idle_ms: f64| target.is_some_and(|ms| ms < idle_ms);
        let ttft_out_of_reach = out_of_reach(targets.ttft_ms, idle.ttft_ms);
        let tpot_out_of_reach = out_of_reach(targets.tpot_ms, idle.tpot_ms);
        let targets = Targets {
            ttft_ms: targets.ttft_ms.filter(|_| !ttft_out_of_reach),
            tpot_ms: targets.tpot_ms.filter(|_| !tpot_out_of_reach),
        };
        // more of them never break what fewer keep
        let broken = |workers: usize| machine.broken(asked, &idle, targets, workers);
        let (mut least, mut most) = (1, MOST_WORKERS);
        while least < most {
            let middle = usize::midpoint(least, most);
            match broken(middle) {
                Some(_) => least = middle + 1,
                None => most = middle,
            }
        }
        Self {
            workers: u32::try_from(least).unwrap_or(u32::MAX),
            because: (least > 1).then(|| broken(least - 1)).flatten().unwrap_or(Binding::One),
            now: (workers > 0).then(|| machine.forecast(asked, workers as usize)),
            ttft_out_of_reach,
            tpot_out_of_reach,
        }
    }
}

impl MeanWorker {
    fn broken(
        &self,
        asked: &ModelDemand,
        idle: &Forecast,
        targets: Targets,
        workers: usize,
    ) -> Option<Binding> {
        let then = self.forecast(asked, workers);
        let held = then.sequences * (asked.prompt_tokens + asked.output_tokens / 2.0);
        let late = match targets.ttft_ms {
            Some(ms) => then.ttft_ms > ms,
            None => then.queue_ms > idle.ttft_ms.max(USUAL_WAIT_MS),
        };
        let bounds = [
            (Binding::Busy, then.utilisation > MOST_BUSY),
            (Binding::FirstToken, late),
            (Binding::TokenTime, targets.tpot_ms.is_some_and(|ms| then.tpot_ms > ms)),
            (Binding::Sequences, self.answers && then.sequences > self.sequences),
            (Binding::KvRoom, self.answers && held > MOST_KV * self.kv_tokens),
        ];
        bounds.into_iter().find_map(|(bound, is_broken)| is_broken.then_some(bound))
    }

    /// What so many workers like this would do.
    fn forecast(&self, asked: &ModelDemand, workers: usize) -> Forecast {
        let StepCost { fixed_ms, row_ms, kv_ms, .. } = self.cost;
        let each = asked.per_s / workers as f64 / 1e3; // requests a ms
        let (computed, steps) =
            (asked.computed_tokens, asked.output_tokens / self.accepted.max(1.0));
        let mut own_ms = self.cost.prompt_ms(asked.prompt_tokens - computed, computed);
        if !self.answers {
            own_ms += fixed_ms * (computed / self.batched_tokens.max(1.0)).max(1.0);
        }
        let row_ms = row_ms + kv_ms * (asked.prompt_tokens + asked.output_tokens / 2.0);
        let rows = if self.answers { each * steps * row_ms } else { 0.0 };
        let utilisation = rows + each * self.prompt_share * own_ms;
        if utilisation >= 1.0 {
            return Forecast::NEVER;
        }
        let (mut step_ms, mut service_ms) = (0.0, own_ms);
        if self.answers {
            step_ms = (fixed_ms / (1.0 - utilisation)).max(fixed_ms + row_ms);
            service_ms = own_ms / (1.0 - rows) + step_ms;
        }
        let turn_ms = own_ms / (1.0 - rows); // for which others wait
        let load = each * self.prompt_share * turn_ms * workers as f64;
        let queue_ms = self.queue_ms(asked, workers, load, turn_ms);
        Forecast {
            utilisation,
            queue_ms,
            ttft_ms: queue_ms + service_ms,
            tpot_ms: step_ms / self.accepted.max(1.0),
            sequences: each * (steps * step_ms + service_ms),
        }
    }

    /// How long nine in ten wait at most, by M/G/n with so many servers' worth of load.
    fn queue_ms(&self, asked: &ModelDemand, workers: usize, load: f64, turn_ms: f64) -> f64 {
        let free = workers as f64 - load;
        if free <= 0.0 {
            return f64::INFINITY;
        }
        let waits = erlang_c(workers, load);
        if waits <= LATE {
            return 0.0;
        }
        let mean_ms = turn_ms * asked.spread / 2.0 / free;
        mean_ms * (waits / LATE).ln()
    }
}

/// Probability that all of so many servers are taken.
fn erlang_c(servers: usize, load: f64) -> f64 {
    // Erlang's B, one server after the other
    let blocked =
        (1..=servers).fold(1.0, |blocked, n| load * blocked / (n as f64 + load * blocked));
    let busy = load / servers as f64;
    blocked / (1.0 - busy * (1.0 - blocked))
}

#[cfg(test)]
mod tests;
