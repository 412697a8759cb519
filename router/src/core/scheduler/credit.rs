//! Whether a worker is believed about the blocks that it says it holds.

/// Why a worker gets no credit for its blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Withdrawal {
    /// Its snapshot is not complete.
    Unknown,
    /// An event was lost, or came from another life of the worker.
    Lost,
    /// It took less from its cache than it had said it holds.
    Overclaimed,
    /// It said it holds more blocks than its capacity.
    OverCapacity,
    /// It holds more blocks than the index keeps for one worker.
    OverShare,
    /// It computes prompts and says nothing of their blocks.
    Silent,
}

impl Withdrawal {
    /// As a word, for metrics and logs.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Unknown => "no_snapshot",
            Self::Lost => "events_lost",
            Self::Overclaimed => "overclaimed",
            Self::OverCapacity => "over_capacity",
            Self::OverShare => "over_share",
            Self::Silent => "events_silent",
        }
    }
}

/// Credit goes when more than this share of what was promised was missing. A guess: with true events only what an
/// eviction takes between two frames is missing.
const MISSING: f64 = 0.25;
/// Requests with a promise before anybody is judged.
const SAMPLES: f64 = 6.0;
/// Weight that older requests keep when a new one is counted.
const FADE: f64 = 0.9;
/// A worker that computed so many prompts, and so many new blocks of them, without a word of any block. Guesses: few
/// enough to matter soon, and more than the prompts that one frame may bring to an end.
const SILENT_PROMPTS: u32 = 8;
const SILENT_BLOCKS: u64 = 64;

/// How far one worker's word is believed.
#[derive(Debug, Clone)]
pub(super) struct Credit {
    withdrawn: Option<Withdrawal>,
    /// Tokens promised and missing, and requests with a promise: all fading.
    promised: f64,
    missing: f64,
    samples: f64,
    /// Blocks of computed prompts that were not announced, since the last event, and the prompts with such blocks.
    unheard_blocks: u64,
    unheard_prompts: u32,
    /// Its silence cost it the credit, and the snapshot that it then sent was empty: a worker without a prefix cache. It
    /// is left alone until it speaks of a block.
    mute: bool,
}

impl Default for Credit {
    fn default() -> Self {
        Self {
            withdrawn: Some(Withdrawal::Unknown),
            promised: 0.0,
            missing: 0.0,
            samples: 0.0,
            unheard_blocks: 0,
            unheard_prompts: 0,
            mute: false,
        }
    }
}

impl Credit {
    pub(super) fn given(&self) -> bool {
        self.withdrawn.is_none()
    }

    pub(super) fn withdrawn(&self) -> Option<Withdrawal> {
        self.withdrawn
    }

    pub(super) fn withdraw(&mut self, why: Withdrawal) {
        // a snapshot that begins does not make the silence before it forgotten
        let mute = self.mute || self.withdrawn == Some(Withdrawal::Silent);
        *self = Self { withdrawn: Some(why), mute, ..Self::default() };
    }

    /// A fresh snapshot is there, of so many blocks.
    pub(super) fn restore(&mut self, blocks: u32) {
        let mute = blocks == 0 && (self.mute || self.withdrawn == Some(Withdrawal::Silent));
        *self = Self { withdrawn: mute.then_some(Withdrawal::Silent), mute, ..Self::default() };
    }

    /// A block event came.
    pub(super) fn heard(&mut self) {
        (self.unheard_blocks, self.unheard_prompts) = (0, 0);
        if self.mute && self.withdrawn == Some(Withdrawal::Silent) {
            (self.mute, self.withdrawn) = (false, None); // its snapshot was empty, and nothing was missed since
        }
    }

    /// A prompt was computed, and so many of its full blocks were not announced by then. Blocks, not tokens: a prompt that
    /// was cached up to its last block makes no new one, and there is nothing to announce.
    pub(super) fn computed(&mut self, unannounced: u32) {
        self.unheard_blocks += u64::from(unannounced);
        self.unheard_prompts += u32::from(unannounced > 0);
    }

    /// Whether it has been silent for too long.
    pub(super) fn silent(&mut self) -> Option<Withdrawal> {
        let silent = self.unheard_prompts > SILENT_PROMPTS && self.unheard_blocks > SILENT_BLOCKS;
        (silent && self.given()).then(|| {
            self.withdraw(Withdrawal::Silent);
            Withdrawal::Silent
        })
    }

    /// A request's cached tokens are known. More than promised is fine; up to a block less is rounding.
    pub(super) fn audit(
        &mut self,
        promised: u32,
        actual: u32,
        block_tokens: u32,
    ) -> Option<Withdrawal> {
        if promised == 0 || !self.given() {
            return None;
        }
        let missing = promised.saturating_sub(actual);
        let missing = if missing < block_tokens { 0 } else { missing };
        self.promised = self.promised * FADE + f64::from(promised);
        self.missing = self.missing * FADE + f64::from(missing);
        self.samples = self.samples * FADE + 1.0;
        let overclaims = self.samples > SAMPLES * FADE && self.missing > MISSING * self.promised;
        overclaims.then(|| {
            self.withdraw(Withdrawal::Overclaimed);
            Withdrawal::Overclaimed
        })
    }
}
