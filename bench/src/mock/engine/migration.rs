//! Legs of one request on two workers: the prompt is computed here and pulled from here, or it arrives from elsewhere and
//! the answer goes on here. How its bytes travel is not the engine's business.

use headrace_router::core::frame::{Failed, FailureKind, RequestId};

use super::Engine;
use super::sequence::{Sequence, Stage};

/// A prompt that was admitted and may be pulled from now on, as it is computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Export {
    pub(crate) request: RequestId,
    pub(crate) prompt_tokens: u32,
    /// Leading tokens whose KV is there already.
    pub(crate) computed: u32,
    pub(crate) lease_ms: u32,
}

/// How far a prompt is that may be pulled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Progress {
    pub(crate) request: RequestId,
    pub(crate) computed: u32,
    /// The first token is out: from now on the blocks are kept this long for who pulls them.
    pub(crate) pinned_ms: Option<u32>,
}

/// A prompt that has its blocks and may be pulled into them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Pull {
    pub(crate) request: RequestId,
    pub(crate) prompt_tokens: u32,
    /// Leading tokens that this worker's own cache gave.
    pub(crate) held: u32,
    pub(crate) ticket: Vec<u8>,
}

impl Engine {
    /// Prompts that were admitted since the last call and are to be handed over.
    pub(crate) fn take_exports(&mut self) -> Vec<Export> {
        std::mem::take(&mut self.exports)
    }

    /// Prompts that got their blocks since the last call and are to be pulled.
    pub(crate) fn take_pulls(&mut self) -> Vec<Pull> {
        std::mem::take(&mut self.pulls)
    }

    /// The prompt of this request can be pulled: it takes its place in the queue for blocks.
    pub(crate) fn ticket(&mut self, request: RequestId, ticket: Vec<u8>) {
        let at = |s: &Sequence| s.leg.request == request && s.stage == Stage::NoTicket;
        if let Some(place) = self.parked.iter().position(at) {
            let mut sequence = self.parked.remove(place);
            sequence.stage = Stage::Reserves;
            sequence.ticket = ticket;
            self.wait(sequence);
        }
    }

    /// All of a prompt has arrived.
    pub(crate) fn pulled(&mut self, request: RequestId) {
        let Some(mut sequence) = self.unpark(request, &[Stage::Arrives]) else { return };
        sequence.stage = Stage::Arrived;
        sequence.computed = sequence.leg.prompt_tokens;
        self.publish(&mut sequence);
        self.go(sequence);
    }

    /// A prompt will not arrive: it is computed here once the answer may go on.
    pub(crate) fn pull_failed(&mut self, request: RequestId) {
        let Some(sequence) = self.unpark(request, &[Stage::Arrives]) else { return };
        self.lose(sequence);
    }

    /// The other worker's part is over, with so many tokens of the answer; with none, everything is left to this one.
    /// Says how many ms the prompt may still take to arrive; `None` where none is expected.
    ///
    /// # Errors
    /// The answer would have no token left; the request is gone.
    pub(crate) fn go_on(
        &mut self,
        request: RequestId,
        generated: u32,
    ) -> Result<Option<u32>, Failed> {
        let here = |s: &&mut Sequence| s.leg.request == request && !s.continues;
        let all = self.waiting.iter_mut().chain(&mut self.parked);
        let Some(sequence) = all.into_iter().find(here) else { return Ok(None) };
        let Some(patience_ms) = sequence.leg.arrives else { return Ok(None) };
        if generated >= sequence.limit - sequence.leg.prompt_tokens {
            self.cancel(request);
            let (kind, message) = (FailureKind::BadResume, "no token is left to generate".into());
            return Err(Failed { request, kind, message });
        }
        sequence.continues = true;
        sequence.generated = generated;
        if generated == 0 {
            self.alone(request);
        } else if let Some(sequence) = self.unpark(request, &[Stage::Arrived, Stage::Lost]) {
            self.go(sequence);
        }
        Ok(Some(patience_ms).filter(|_| self.expects(request)))
    }

    /// Nothing more is awaited from elsewhere: it computes its prompt, and what it knows of its answer, itself.
    ///
    /// One whose answer may not go on yet does so only if it is told to.
    pub(crate) fn alone(&mut self, request: RequestId) {
        let waits = |s: &&mut Sequence| s.leg.request == request && s.stage == Stage::Reserves;
        if let Some(sequence) = self.waiting.iter_mut().find(waits).filter(|s| s.continues) {
            sequence.stage = Stage::Own; // its place in the queue stays
            self.waiting_tokens += u64::from(sequence.total());
            return;
        }
        let stages = [Stage::NoTicket, Stage::Arrives, Stage::Arrived, Stage::Lost];
        let Some(mut sequence) = self.unpark(request, &stages) else { return };
        match sequence.stage {
            Stage::NoTicket if sequence.continues => {
                sequence.stage = Stage::Own;
                self.wait(sequence);
            }
            Stage::NoTicket => self.parked.push(sequence),
            Stage::Own
            | Stage::Reserves
            | Stage::Arrives
            | Stage::Arrived
            | Stage::Lost
            | Stage::Pinned => self.lose(sequence),
        }
    }

    /// True while the prompt of this request is expected from elsewhere.
    pub(crate) fn expects(&self, request: RequestId) -> bool {
        let mut all = self.waiting.iter().chain(&self.parked);
        all.any(|sequence| {
            let expects =
                matches!(sequence.stage, Stage::NoTicket | Stage::Reserves | Stage::Arrives);
            sequence.leg.request == request && expects
        })
    }

    /// Keeps the blocks of a prompt that is done for who pulls them.
    pub(super) fn pin(&mut self, mut sequence: Sequence) {
        sequence.stage = Stage::Pinned;
        self.parked.push(sequence);
    }

    /// Those that hold blocks for an answer that goes on here.
    pub(super) fn arrivals(&self) -> impl Iterator<Item = &Sequence> {
        let arrives = |s: &&Sequence| !matches!(s.stage, Stage::NoTicket | Stage::Pinned);
        self.parked.iter().filter(arrives)
    }

    fn unpark(&mut self, request: RequestId, stages: &[Stage]) -> Option<Sequence> {
        let at = |s: &Sequence| s.leg.request == request && stages.contains(&s.stage);
        self.parked.iter().position(at).map(|place| self.parked.remove(place))
    }

    /// What came of its prompt counts for nothing, but for what the cache keeps of it.
    fn lose(&mut self, mut sequence: Sequence) {
        self.free(&sequence);
        sequence.gave_way();
        sequence.stage = Stage::Lost;
        self.go(sequence);
    }

    /// Lets one run that has its prompt, and one wait for its turn that has not, if the answer may go on.
    fn go(&mut self, mut sequence: Sequence) {
        if !sequence.continues {
            self.parked.push(sequence);
            return;
        }
        let arrived = sequence.stage == Stage::Arrived;
        sequence.stage = Stage::Own;
        if arrived {
            sequence.in_prefill = false;
            self.run(sequence);
        } else {
            self.wait(sequence);
        }
    }
}
