//! One worker as the scheduler knows it: its reports, what is booked on it, and how it therefore stands at a moment.

pub(super) mod answers;
pub(super) mod list;
mod others;
pub(super) mod outline;
mod prefills;
mod prompts;

use std::sync::Arc;

use self::answers::RunningAnswer;
pub(super) use self::others::OtherQueue;
use self::prefills::{Prefill, Prefills};
use self::prompts::Arriving;
use super::Joining;
use super::claims::Claims;
use super::credit::Credit;
use super::holdings::{Tier, WorkerHolders};
use super::legs::{BookedLeg, Given, LegPart};
use super::measured::Measured;
use crate::core::candidate::{Exclusion, GroupRank, WorkerId, WorkerName};
use crate::core::cost::{StepFeatures, StepFit, context};
use crate::core::estimate::WorkerLoad;
use crate::core::frame::{Capacity, Load, QueueRule, RequestId, Role, Step};
use crate::core::transfer::Inbound;

/// Weight of a step in the mean number of tokens that a row gets from one. A guess: some twenty steps count.
const ACCEPTED_WEIGHT: f64 = 0.05;

/// No worker has as many tokens; one that says so miscounts.
const ABSURD_TOKENS: u64 = 1 << 36;

/// What the scheduler knows of one worker: bounds, load, step times, and what is booked.
#[derive(Debug)]
pub(super) struct Worker<W> {
    pub(super) id: WorkerId,
    /// What the caller keeps of it.
    pub(super) member: W,
    pub(super) name: WorkerName,
    pub(super) role: Role,
    pub(super) kv_block_bytes: u64,
    /// What it learnt of its pulls.
    pub(super) inbound: Inbound,
    pub(super) open: bool,
    pub(super) capacity: Capacity,
    /// How it shares its steps among prompts.
    rule: QueueRule,
    pub(super) group: Option<GroupRank>,
    pub(super) places: WorkerHolders,
    pub(super) credit: Credit,
    /// How often all that it had said of its blocks was forgotten.
    pub(super) forgotten: u64,
    pub(super) fit: StepFit,
    /// Tokens that a row gets from a step.
    pub(super) accepted: f64,
    /// Its own last report.
    pub(super) load: Load,
    step: u64,
    kv_tokens: u64,
    waiting_tokens: u64,
    /// Prompts of other routers.
    others: OtherQueue,
    pub(super) booked_requests: u32,
    pub(super) booked_tokens: u64,
    /// Reports that came.
    pub(super) reports: u64,
    /// Legs booked since the last report, which it may not have counted yet.
    unreported: u32,
    /// Legs whose prompts it is to compute, without a first token, in the order in which it computes them.
    prefills: Prefills,
    /// Answers that are generated.
    pub(super) answers: Vec<RunningAnswer>,
    /// Legs whose KV is on its way to it.
    arrivals: Vec<Arriving>,
    pub(super) arriving_tokens: u64,
    /// Tokens of theirs that will need blocks.
    arriving_new: f64,
    /// Prefill legs that are done, whose KV waits to be fetched.
    pub(super) pinned: u32,
    /// Legs that make way.
    yielding: u32,
    /// What it says of its speed, against what is seen of it.
    pub(super) claims: Claims,
    /// What is seen of it, while it is not believed.
    pub(super) measured: Measured,
    /// When the last step was reported, or when it got work after it, if it had work of this router ever since.
    busy_since_ms: Option<f64>,
    /// It was the former.
    busy_since_step: bool,
    /// When the step that runs began.
    pub(super) step_began_ms: f64,
    /// It began with prompts to compute.
    backlog_runs: bool,
    /// What it computes of each prompt is thought out. That is done once all is known of the step before, and before anything
    /// else is booked.
    planned: bool,
}

impl<W> Worker<W> {
    pub(super) fn new(joining: Joining, member: W, fit: StepFit, places: WorkerHolders) -> Self {
        Self {
            id: joining.id,
            member,
            name: joining.name.into(),
            role: joining.role,
            kv_block_bytes: joining.kv_block_bytes,
            inbound: Inbound::default(),
            open: false,
            capacity: joining.capacity,
            rule: joining.queue_rule,
            group: joining.group,
            places,
            credit: Credit::default(),
            forgotten: 0,
            fit,
            accepted: 1.0,
            load: Load::default(),
            step: 0,
            kv_tokens: 0,
            waiting_tokens: 0,
            others: OtherQueue::default(),
            booked_requests: 0,
            booked_tokens: 0,
            reports: 0,
            unreported: 0,
            prefills: Prefills::default(),
            answers: Vec::new(),
            arrivals: Vec::new(),
            arriving_tokens: 0,
            arriving_new: 0.0,
            pinned: 0,
            yielding: 0,
            claims: Claims::default(),
            measured: Measured::default(),
            busy_since_ms: None,
            busy_since_step: false,
            step_began_ms: 0.0,
            backlog_runs: false,
            planned: true,
        }
    }

    /// Holds what it says of its steps against the time since the last one. True if its word begins or ceases to count.
    pub(super) fn audit(&mut self, step: &Step, given: Given, now_ms: f64) -> bool {
        if step.step == self.step {
            return false; // a heartbeat
        }
        self.claims.gave(given.rows.into());
        // what it does for other routers is not known here
        let at_work = self.booked_at_work();
        let foreign = at_work == 0 || step.load.running.saturating_add(step.load.waiting) > at_work;
        let said = f64::from(step.prefill_tokens) + f64::from(step.decode_rows);
        if !foreign && self.claims.work(said, self.pending_tokens()) {
            return true;
        }
        let Some(since_ms) = self.busy_since_ms.filter(|_| self.busy_since_step) else {
            return false;
        };
        // steps whose frames were put together are counted by their numbers, which only grow
        let steps = step.step.checked_sub(self.step).unwrap_or(1);
        self.claims.step(step.ms, steps, now_ms - since_ms)
    }

    /// Takes a report in; how many ms of the step went into prompts. `teaches`: the duration of the step is this worker's
    /// own doing.
    pub(super) fn report(&mut self, step: &Step, given: Given, teaches: bool, now_ms: f64) -> f64 {
        self.load = step.load;
        self.reports += 1;
        self.unreported = 0;
        self.waiting_tokens = step.waiting_tokens.min(ABSURD_TOKENS);
        if step.step == self.step {
            return 0.0; // a heartbeat
        }
        self.step = step.step;
        self.plan();
        let believed = self.claims.doubt().is_none();
        if believed {
            let worked = step.prefill_tokens > 0 || step.decode_rows > 0;
            if teaches && worked {
                // what it waited for other ranks is not its own doing
                self.fit.observe(&StepFeatures::of(step), own_ms(step));
            }
            let of_others = self.others.take_done();
            self.prefills.computed(step.prefill_tokens.saturating_sub(of_others));
        } else {
            self.measure(step, given, now_ms);
        }
        self.kv_tokens = step.kv_tokens.min(ABSURD_TOKENS);
        if step.decode_rows > 0 && given.rows > 0 {
            // no more than what came of it here, where the rest is not wanted any more perhaps
            let accepted = f64::from(step.accepted.min(step.drafted));
            let gained = 1.0 + accepted / f64::from(step.decode_rows);
            let came = f64::from(given.tokens) / f64::from(given.rows);
            self.accepted += ACCEPTED_WEIGHT * (gained.min(came).max(1.0) - self.accepted);
        }
        self.prefills.step_ends();
        self.others.step_ends();
        self.planned = false;
        self.step_began_ms = now_ms;
        self.busy_since_ms = (self.booked_at_work() > 0).then_some(now_ms);
        self.busy_since_step = true;
        self.backlog_runs = self.backlog_tokens() > 0;
        if !believed {
            return 0.0; // its prompts are known when they are done
        }
        let cost = self.fit.cost();
        cost.prefill_ms * f64::from(step.prefill_tokens)
            + cost.context_ms * step.prefill_context as f64
    }

    /// Learns from when a frame came and what it gave.
    fn measure(&mut self, step: &Step, given: Given, now_ms: f64) {
        let ms = self.busy_since_ms.map_or(0.0, |since_ms| now_ms - since_ms);
        let kv_tokens = step.kv_tokens.min(self.booked_tokens) as f64;
        if let Some((work, ms)) = self.measured.frame(given.rows, kv_tokens, ms) {
            self.fit.observe(&work, ms);
        }
    }

    /// Tokens of prompts that have no first token yet, whatever of them was cached.
    fn pending_tokens(&self) -> f64 {
        self.prefills.sums().prompt_tokens as f64 + self.arriving_tokens as f64
    }

    /// Tokens of this router's prompts that are to be computed.
    pub(super) fn backlog_tokens(&self) -> u64 {
        self.prefills.sums().left
    }

    /// Takes note if it has nothing to do any more.
    fn note_rest(&mut self) {
        if self.booked_at_work() == 0 {
            self.busy_since_ms = None;
        }
    }

    pub(super) fn book(
        &mut self,
        request: RequestId,
        leg: &BookedLeg,
        output_tokens: f64,
        now_ms: f64,
    ) {
        if leg.part == LegPart::Decode {
            let prompt_tokens = leg.prompt_tokens;
            let lacks = prompt_tokens.saturating_sub(leg.cached_tokens);
            let new_tokens = f64::from(lacks) + output_tokens;
            self.arrivals.push(Arriving { request, prompt_tokens, new_tokens });
            self.count_arrivals();
        } else {
            self.compute(request, leg, now_ms);
        }
        self.yielding += u32::from(leg.yields);
        self.booked_requests += 1;
        self.booked_tokens += leg.tokens;
    }

    fn compute(&mut self, request: RequestId, leg: &BookedLeg, now_ms: f64) {
        let rests = self.occupied() == 0;
        if rests {
            self.step_began_ms = now_ms;
            self.backlog_runs = true;
        }
        self.plan();
        if self.busy_since_ms.is_none() {
            (self.busy_since_ms, self.busy_since_step) = (Some(now_ms), false);
        }
        let prompt_tokens = leg.prompt_tokens;
        let left = prompt_tokens.saturating_sub(leg.cached_tokens);
        let running = if rests { left.min(self.capacity.batched_tokens) } else { 0 };
        self.prefills.push(Prefill {
            request,
            prompt_tokens,
            left,
            running,
            has_blocks: false,
            max_tokens: leg.tokens.saturating_sub(prompt_tokens.into()) as f64,
            keys: Arc::clone(&leg.keys),
            awaits: leg.awaits,
            yields: leg.yields,
        });
        self.unreported += 1;
    }

    /// The KV of this leg will not come.
    pub(super) fn alone(&mut self, request: RequestId, leg: &BookedLeg, now_ms: f64) {
        self.settled(request);
        self.compute(request, leg, now_ms);
    }

    /// The leg got its first token.
    pub(super) fn begun(&mut self, request: RequestId, leg: &BookedLeg) {
        let part = leg.part;
        if self.claims.doubt().is_some()
            && let Some(i) = self.prefills.find(request)
        {
            let prefill = self.prefills.get(i);
            self.measured.prompt(prefill.prompt_tokens, prefill.left);
        }
        self.settled(request);
        self.pinned += u32::from(part == LegPart::Prefill);
        if part != LegPart::Prefill {
            let max_tokens = leg.tokens.saturating_sub(leg.prompt_tokens.into()) as f64;
            self.answers.push(RunningAnswer {
                request,
                prompt_tokens: leg.prompt_tokens,
                keys: Arc::clone(&leg.keys),
                max_tokens,
                since_step: self.step,
            });
        }
        self.note_rest();
    }

    pub(super) fn release(&mut self, request: RequestId, leg: &BookedLeg) {
        if leg.part != LegPart::Decode && leg.reports == self.reports {
            self.unreported = self.unreported.saturating_sub(1);
        }
        if !leg.begun && leg.part != LegPart::Decode {
            self.claims.gave(leg.prompt_tokens.into()); // as much of it may have been done
        }
        self.yielding = self.yielding.saturating_sub(u32::from(leg.yields));
        self.booked_requests = self.booked_requests.saturating_sub(1);
        self.booked_tokens = self.booked_tokens.saturating_sub(leg.tokens);
        let pinned = leg.begun && leg.part == LegPart::Prefill;
        self.pinned = self.pinned.saturating_sub(u32::from(pinned));
        if leg.begun
            && let Some(i) = self.answers.iter().position(|answer| answer.request == request)
        {
            self.answers.swap_remove(i);
        }
        self.settled(request);
        self.note_rest();
    }

    /// Requests that it has, as far as is known: its own report (which counts the work of other routers too) and what
    /// was sent since, but at least what this router has on it; and those whose KV is on its way, which it does not report.
    /// Who only waits to be fetched takes no place.
    pub(super) fn occupied(&self) -> u32 {
        let known = self.reported().saturating_add(self.unreported).max(self.booked_at_work());
        known.saturating_add(self.arriving())
    }

    fn reported(&self) -> u32 {
        self.load.running.saturating_add(self.load.waiting)
    }

    /// Legs of this router that it reports among its own.
    fn booked_at_work(&self) -> u32 {
        self.booked_requests.saturating_sub(self.pinned).saturating_sub(self.arriving())
    }

    fn arriving(&self) -> u32 {
        u32::try_from(self.arrivals.len()).unwrap_or(u32::MAX)
    }

    /// It takes answers, and whole requests.
    pub(super) fn decodes(&self) -> bool {
        self.role != Role::Prefill
    }

    /// Blocks that it says a tier can hold.
    pub(super) fn capacity_of(&self, tier: Tier) -> u32 {
        match tier {
            Tier::Device => self.capacity.blocks,
            Tier::Host => self.capacity.host_blocks,
            Tier::Disk => self.capacity.disk_blocks,
        }
    }

    /// Requests that it can hold, in the batch and in its queue.
    pub(super) fn places_for_requests(&self) -> u32 {
        self.capacity.sequences.saturating_add(self.capacity.waiting)
    }

    /// The same for one request: who makes way for others leaves them the last quarter of the queue.
    pub(super) fn places_for(&self, yields: bool) -> u32 {
        let kept = if yields { self.capacity.waiting.div_ceil(4) } else { 0 };
        self.places_for_requests().saturating_sub(kept)
    }

    /// Why no request can go there, or none that makes way for others.
    pub(super) fn exclusion(&self, yields: bool) -> Option<Exclusion> {
        if !self.open {
            Some(Exclusion::Closed)
        } else if !self.decodes() && self.kv_block_bytes == 0 {
            Some(Exclusion::NoTransfer)
        } else if self.occupied() >= self.places_for(yields) {
            Some(Exclusion::Full)
        } else {
            None
        }
    }

    /// How it stands.
    pub(super) fn worker_load(&self, block_tokens: u32, now_ms: f64) -> WorkerLoad {
        let load = self.standing_load(block_tokens);
        WorkerLoad { elapsed_ms: load.elapsed_ms(self.step_began_ms, now_ms), ..load }
    }

    /// The same at no moment.
    pub(super) fn standing_load(&self, block_tokens: u32) -> WorkerLoad {
        let (backlog_tokens, backlog_context) = self.backlog();
        let occupied = self.occupied();
        let to_come =
            (self.prefills.sums().without_blocks as f64 + self.others.left() + self.arriving_new)
                / f64::from(block_tokens);
        WorkerLoad {
            cost: self.fit.cost(),
            step_tokens: self.capacity.batched_tokens.into(),
            slots: self.capacity.sequences.into(),
            occupied: occupied.into(),
            rows: self.rows(),
            kv_tokens: self.kv_tokens(),
            backlog_tokens,
            backlog_context,
            arriving_tokens: self.arriving_tokens as f64,
            elapsed_ms: 0.0,
            backlog_runs: self.backlog_runs,
            blocks_used: f64::from(self.load.blocks_used) + to_come,
            blocks: self.capacity.blocks.into(),
            blocks_cached: self.load.blocks_cached.into(),
            reuse: 0.0,
            accepted: self.accepted,
            group_ms: 0.0,
            group_rows: 0.0,
            group_prompt_ms: 0.0,
            group_prompt_steps: 0.0,
            pressure: 0.0,
        }
    }

    /// Those that generate.
    fn rows(&self) -> f64 {
        let no_rows = (self.prefills.len() + self.arrivals.len()) as f64 + self.others.prompts();
        if self.decodes() { (f64::from(self.occupied()) - no_rows).max(0.0) } else { 0.0 }
    }

    /// The same for a request that others make way for: their prompts wait behind its own, and half of the batch rows at least
    /// are given to requests like it.
    pub(super) fn load_before_yielding(&self, worker_load: &WorkerLoad) -> WorkerLoad {
        let (yielding, tokens) = (f64::from(self.yielding), self.prefills.sums().yielding as f64);
        let left = worker_load.backlog_tokens - tokens;
        let share =
            if worker_load.backlog_tokens > 0.0 { left / worker_load.backlog_tokens } else { 0.0 };
        WorkerLoad {
            occupied: worker_load.occupied
                - (yielding - worker_load.slots / 2.0).clamp(0.0, worker_load.occupied),
            backlog_tokens: left,
            backlog_context: worker_load.backlog_context * share,
            ..*worker_load
        }
    }

    /// Prompt tokens ahead: of this router's legs as it keeps count of them, and of other routers' as the worker says.
    fn backlog(&self) -> (f64, f64) {
        let (own, positions) = (self.backlog_tokens() as f64, self.prefills.sums().context());
        if self.others.told() {
            return (own + self.others.left(), positions + self.others.context());
        }
        let (theirs, foreign) = self.foreign();
        if foreign == 0 {
            return (own, positions);
        }
        (own + theirs, positions + context(0.0, theirs) / f64::from(foreign))
    }

    /// Prompt tokens of other routers' requests, and how many requests these are, where the worker does not tell.
    fn foreign(&self) -> (f64, u32) {
        if self.others.told() {
            return (0.0, 0);
        }
        let reported = self.reported();
        let foreign = reported.saturating_sub(self.booked_at_work());
        if foreign == 0 {
            return (0.0, 0);
        }
        let share = f64::from(foreign) / f64::from(reported);
        (self.waiting_tokens as f64 * share, foreign)
    }

    /// It is a rank of this group.
    pub(super) fn is_in(&self, group: &Arc<str>) -> bool {
        self.group.as_ref().is_some_and(|own| Arc::ptr_eq(&own.group, group))
    }

    /// It is another rank of the same group.
    pub(super) fn steps_with(&self, other: &Self) -> bool {
        self.id != other.id && other.group.as_ref().is_some_and(|rank| self.is_in(&rank.group))
    }

    /// KV tokens that a step reads now: those of the last one, unless nothing runs any more.
    fn kv_tokens(&self) -> f64 {
        if self.load.running == 0 { 0.0 } else { self.kv_tokens as f64 }
    }

    /// Duration of a step with what runs now.
    pub(super) fn running_ms(&self) -> f64 {
        self.fit.cost().step_ms(&StepFeatures {
            rows: self.load.running.into(),
            kv_tokens: self.kv_tokens(),
            ..StepFeatures::default()
        })
    }

    /// Duration of a step of this kind.
    pub(super) fn predicted_ms(&self, step: &Step) -> f64 {
        self.fit.cost().step_ms(&StepFeatures::of(step))
    }

    /// Prompt tokens that it computes in a ms, if it does nothing else, in full steps.
    pub(super) fn prefill_tokens_per_ms(&self) -> f64 {
        let cost = self.fit.cost();
        let tokens = f64::from(self.capacity.batched_tokens.max(1));
        tokens / (cost.fixed_ms + cost.prompt_ms(0.0, tokens)).max(1e-9)
    }
}

/// Ms of a step that the rank computed in.
pub(super) fn own_ms(step: &Step) -> f64 {
    (step.ms - f64::from(step.waited_us) / 1e3).max(0.0)
}
