//! What a step does to the arrays of the engine, one stage of the step in each call.
//!
//! Where all logits of a step have just gone through the caches, the rest of the step costs as much as there is code and
//! data to fetch: a call here stands for dozens of calls of numpy. The GIL is kept, because a call takes microseconds. The
//! arrays are read and written under numpy's borrow checks: an array that is in use elsewhere is an error.

#![expect(
    clippy::needless_pass_by_value,
    clippy::too_many_arguments,
    clippy::type_complexity,
    reason = "arguments and results are those of Python: owned, and named there"
)]

mod answers;
mod counts;
mod draws;
mod hash;
mod inputs;
mod slices;

pub(crate) use answers::cut_answers;
pub(crate) use counts::CountColumns;
pub(crate) use draws::{SamplingColumns, noise_keys};
pub(crate) use hash::hash_next_blocks;
pub(crate) use inputs::InputColumns;
