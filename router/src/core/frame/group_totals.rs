//! What a rank tells of the work that its group does beside steps.

use serde::{Deserialize, Serialize};

/// Totals of one rank of a group since its start, sent where they have changed. What moves of experts cost and save is decided
/// by the group: all its ranks say the same of `waves`, `refused`, `gain_s` and `cost_s`.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct GroupTotals {
    /// Rounds in which prompts of this rank waited for those of other ranks.
    pub held_rounds: u64,
    /// How long they waited, in ms.
    pub held_ms: f64,
    /// Waves of moves that all ranks carried out.
    pub waves: u64,
    /// Slots of this rank that got another expert.
    pub slots: u64,
    /// Bytes of experts that this rank sent.
    pub bytes: u64,
    /// Plans that were given up since a rank refused a part of them.
    pub refused: u64,
    /// Seconds that moves were predicted to save.
    pub gain_s: f64,
    /// Seconds that moves were predicted to take.
    pub cost_s: f64,
    /// Seconds between steps that moves took on this rank.
    pub spent_s: f64,
}
